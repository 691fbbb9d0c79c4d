"""Which files of tests begin first, when several workers share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

LONGEST = (
    "tests/conformance/test_runtimes.py",
    "tests/cluster/test_cilium.py",
    "tests/cluster/test_pod_sandboxes.py",
    "tests/docs/test_examples.py",
    "tests/sdk/test_typescript.py",
    "tests/cluster/test_basic.py",
    "tests/controller/test_claims.py",
    "tests/controller/test_sandboxes.py",
    "tests/controller/test_faults.py",
    "tests/controller/test_warm_pools.py",
    "tests/cluster/test_controller.py",
    "tests/cluster/test_install.py",
    "tests/agent_sandbox/test_cluster_router.py",
    "tests/rest/test_tokens.py",
    "tests/rest/test_schema.py",
    "tests/cli/test_standing_sessions.py",
    "tests/cli/test_pool.py",
    "tests/client/test_subagents.py",
    "tests/sessions/test_snapshot_attacks.py",
    "tests/sessions/test_full_disk.py",
    "tests/sessions/test_restart.py",
    "tests/sessions/test_restart_subagents.py",
    "tests/client/test_sdk.py",
    "tests/guest/test_boot.py",
    "tests/client/test_k8e_surface.py",
    "tests/rootless/test_gateway.py",
    "tests/cli/test_run.py",
    "tests/client/test_packages.py",
    "tests/client/test_events.py",
    "tests/cli/test_snapshots.py",
    "tests/cli/test_every_command.py",
    "tests/client/test_snapshots.py",
    "tests/client/test_pause.py",
    "tests/benchmarks/test_soak.py",
    "tests/sdk/test_package.py",
    "tests/conformance/test_weakened.py",
    "tests/mcp/test_approvals.py",
    "tests/packaging/test_install.py",
    "tests/client/test_egress.py",
    "tests/chaos/test_chaos.py",
    "tests/client/test_limits.py",
)
"""Those that take longest: one that began last would be waited for by all workers but its own."""


def order(items: list[pytest.Item]) -> None:
    """The longest files first, then those with the most tests; within a file, all as it was."""
    counts = Counter(map(_file, items))
    ranks = {name: at for at, name in enumerate(_ranked(counts))}
    items.sort(key=lambda item: ranks[_file(item)])


def _ranked(counts: Counter[str]) -> Iterable[str]:
    yield from LONGEST
    yield from (name for name, _ in counts.most_common() if name not in LONGEST)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
