"""``python tests/state/make_guest.py COMMIT``: keep the guest of an earlier commit, packed.

Gateways of today must go on with sandboxes in which it runs. It is packed by that commit's own
code and written to ``fixtures/guest-COMMIT.json.xz``: the guest, what it starts, and nothing else.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
_PACK = (
    "import json, sys, importlib, importlib.util as u;"
    "names = ('k8e.runtimes.guest_package', 'k8e.runtimes.packing');"  # the latter up to 0.1
    "p = importlib.import_module(next(filter(u.find_spec, names)));"
    "json.dump({'packed_source': p.packed_source(), 'boot_source': p.boot_source(),"
    "'node_boot_source': p.node_boot_source(), 'kernel_sources': p.kernel_sources()}, sys.stdout)"
)


def use(name: str) -> None:
    """Have this process launch the guest of a fixture."""
    from k8e.runtimes import guest_package

    def told(value: object) -> object:
        def answer(*_: object) -> object:
            return value

        return answer

    kept = json.loads(lzma.decompress((FIXTURES / f"{name}.json.xz").read_bytes()))
    for function, value in kept.items():
        setattr(guest_package, function, told(value))


def main(commit: str) -> None:
    archive = subprocess.run(
        ["git", "archive", commit, "src/k8e"], check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        packed = subprocess.run(
            [sys.executable, "-c", _PACK],
            cwd=folder,
            env={"PYTHONPATH": f"{folder}/src"},
            check=True,
            capture_output=True,
        ).stdout
    data = lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME)
    (FIXTURES / f"guest-{commit}.json.xz").write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
