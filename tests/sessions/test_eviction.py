"""What is left of owners who are gone, when a gateway starts."""

from __future__ import annotations

from pathlib import Path

from k8e.model import SessionSpec
from tests.sessions.fakes import ME, OTHER, World


async def test_only_what_is_of_owners_who_were_deleted_is_removed(tmp_path: Path) -> None:
    async with World(tmp_path).running() as sessions:
        for who in (ME, OTHER):
            await sessions.create(who, SessionSpec())
        await sessions.evictions.sweep(set())
        assert sessions.count() == 2, "the list of keys may be lost"
        await sessions.evictions.sweep({ME.name, "key:nobody:id-x"})
        assert (len(sessions.listing(ME)), len(sessions.listing(OTHER))) == (0, 1)
