"""What the words of a session's policy mean at a gateway with hosts of the operator's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e import errors
from k8e.egress import presets
from k8e.egress.policy import Rule, parse_rule
from k8e.sessions.network import Network
from k8e.settings import Settings

pytestmark = pytest.mark.anyio


def network(folder: Path, usual: str, trusted: str = "") -> Network:
    made = Network(
        Settings(
            home=folder,
            data_dir=folder,
            run_dir=folder,
            default_allowed_hosts=usual,
            trusted_hosts=trusted,
        )
    )
    made.reason = ""
    return made


def index(_: Path) -> tuple[Rule, ...]:
    return (parse_rule("index.corp:443", trusted=True), parse_rule("github.com"))


async def rules(made: Network, *words: str) -> dict[str, bool]:
    _, policy = await made.read(words)
    return {str(rule): rule.trusted for rule in policy.rules}


async def test_a_bare_index_host_is_trusted_as_in_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "default_rules", index)
    made = network(tmp_path, "default")
    assert await rules(made, "index.corp") == {"index.corp": False, "index.corp:443": True}
    assert await rules(made, "index.corp:443,80") == {
        "index.corp:443": True,
        "index.corp:80": False,
    }
    assert await rules(made, "github.com") == {"github.com": False}
    assert await rules(made, "none") == {}


async def test_where_default_is_not_the_default_no_index_is_asked_for_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Path) -> tuple[Rule, ...]:
        raise AssertionError("the indexes were asked")

    monkeypatch.setattr(presets, "default_rules", never)
    made = network(tmp_path, "none", "db.corp:5432, 10.0.0.0/8")
    assert await rules(made, "index.corp") == {"index.corp": False}
    assert await rules(made, "db.corp") == {"db.corp": False, "db.corp:5432": True}
    assert await rules(made, "10.1.2.3:80") == {"10.1.2.3/32:80": True}
    with pytest.raises(errors.InvalidRequest, match="private"):
        await made.read(("192.168.0.1",))
