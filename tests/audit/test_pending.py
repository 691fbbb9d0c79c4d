"""A gateway is killed between a change and its row: the next one writes the row."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.audit import pending
from k8e.gateway import auditing
from k8e.model import Principal
from tests.audit.test_trail import ME, PATIENCE, acts, make, read

DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from k8e.audit import acting
from k8e.audit.acting import Act, Caller
from k8e.audit.trail import Trail
from k8e.gateway import auditing

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

async def applied(principal, call):
    (die if sys.argv[2] == "before" else Path(sys.argv[1], "applied").touch)()
    return {"name": call["template"]["name"], "digest": "d"}

async def main():
    trail = Trail(Path(sys.argv[1], "audit"), max_bytes=1 << 30, max_age=0)
    trail.record = die
    acting.begin(Act(Caller("key:me", "key", "192.0.2.7:40000"), "apply_template"))
    action, names = auditing._RECORDED["apply_template"]
    handler = auditing._recorded(trail, action, names, ("name", "digest"))(applied)
    await handler(None, {"template": {"name": "half", "env": {"TOKEN": "s3cr3t-value"}}})

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_change_that_a_gateway_died_at_leaves_a_row(tmp_path: Path, when: str) -> None:
    argv = [sys.executable, "-c", DYING, str(tmp_path), when]
    died = await asyncio.to_thread(subprocess.run, argv, check=False, timeout=PATIENCE)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "applied").exists() == (when == "after")
    folder = tmp_path / "audit"
    assert read(folder) == []
    for _ in range(2):  # the second finds nothing any more
        async with make(folder).running():
            pass
    (told,) = [row for row in read(folder) if not row["action"].startswith("gateway.")]
    assert (told["action"], told["principal"], told["via"]) == ("template.applied", "key:me", "key")
    assert told["detail"] == {"name": "half", "left": True}
    assert "s3cr3t" not in json.dumps(read(folder))
    assert (await make(folder).verify()).problems == []


async def test_a_change_that_ends_leaves_nothing_but_its_row(tmp_path: Path) -> None:
    trail = make(tmp_path)
    recorded = auditing._recorded(trail, "template.deleted", ("name",), ())  # pyright: ignore[reportPrivateUsage]

    async def deleted(principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        assert len(list((tmp_path / pending.FOLDER).iterdir())) == 1
        if call["name"] == "missing":
            raise errors.TemplateNotFound("not found")
        return {}

    with acts(ME):
        await recorded(deleted)(Principal("key:me"), {"name": "there"})
        with pytest.raises(errors.TemplateNotFound):
            await recorded(deleted)(Principal("key:me"), {"name": "missing"})
    assert [row["detail"] for row in read(tmp_path)] == [{"name": "there"}]
    assert list((tmp_path / pending.FOLDER).iterdir()) == []


async def test_what_cannot_be_remembered_happens_all_the_same(tmp_path: Path) -> None:
    trail = make(tmp_path)
    (tmp_path / pending.FOLDER).touch()  # where a folder should be
    with acts(ME), trail.during("pool.set", min=1):
        trail.record("pool.set", min=1)
    assert [row["detail"] for row in read(tmp_path)] == [{"min": 1}]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"[[1,2,3],4,5]", b'[["","",""],"a",{"b":"c"}]', b"\xff", b"[" * 60_000],
)
async def test_half_a_note_is_of_a_change_that_had_not_begun(tmp_path: Path, data: bytes) -> None:
    (tmp_path / pending.FOLDER).mkdir()
    (tmp_path / pending.FOLDER / "1").write_bytes(data)
    async with make(tmp_path).running():
        pass
    assert {row["action"] for row in read(tmp_path)} == {"gateway.started", "gateway.stopped"}
    assert list((tmp_path / pending.FOLDER).iterdir()) == []
