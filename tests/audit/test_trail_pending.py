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
from k8e.audit import trail as audit_trail
from k8e.gateway.operations import WritesRow, recorded
from tests.audit.test_trail import ME, PATIENCE, acts, make, read

DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from k8e.audit import act
from k8e.audit.act import Act, AuditCaller
from k8e.audit.trail import Trail
from k8e.gateway import operations
from k8e.gateway.service import OPERATIONS

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

async def applied(principal, call):
    (die if sys.argv[2] == "before" else Path(sys.argv[1], "applied").touch)()
    return {"name": call["template"]["name"], "digest": "d"}

async def main():
    trail = Trail(Path(sys.argv[1], "audit"), max_bytes=1 << 30, max_age=0)
    trail.record = die
    act.begin(Act(AuditCaller("key:me", "key", "192.0.2.7:40000"), "apply_template"))
    call = {"template": {"name": "half", "env": {"TOKEN": "s3cr3t-value"}}}
    row = OPERATIONS["apply_template"].audit
    await operations.recorded(trail, row, call, lambda: applied(None, call))

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
    row = WritesRow("template.deleted", ("name",))

    async def delete(name: str) -> dict[str, Any]:
        async def deleted() -> dict[str, Any]:
            assert len(list((tmp_path / audit_trail.FOLDER).iterdir())) == 1
            if name == "missing":
                raise errors.TemplateNotFound("not found")
            return {}

        return await recorded(trail, row, {"name": name}, deleted)

    with acts(ME):
        await delete("there")
        with pytest.raises(errors.TemplateNotFound):
            await delete("missing")
    assert [row["detail"] for row in read(tmp_path)] == [{"name": "there"}]
    assert list((tmp_path / audit_trail.FOLDER).iterdir()) == []


async def test_what_cannot_be_remembered_happens_all_the_same(tmp_path: Path) -> None:
    trail = make(tmp_path)
    (tmp_path / audit_trail.FOLDER).touch()  # where a folder should be
    with acts(ME), trail.during("pool.set", min=1):
        trail.record("pool.set", min=1)
    assert [row["detail"] for row in read(tmp_path)] == [{"min": 1}]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"[[1,2,3],4,5]", b'[["","",""],"a",{"b":"c"}]', b"\xff", b"[" * 60_000],
)
async def test_half_a_note_is_of_a_change_that_had_not_begun(tmp_path: Path, data: bytes) -> None:
    (tmp_path / audit_trail.FOLDER).mkdir()
    (tmp_path / audit_trail.FOLDER / "1").write_bytes(data)
    async with make(tmp_path).running():
        pass
    assert {row["action"] for row in read(tmp_path)} == {"gateway.started", "gateway.stopped"}
    assert list((tmp_path / audit_trail.FOLDER).iterdir()) == []
