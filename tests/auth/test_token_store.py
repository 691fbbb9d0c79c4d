"""Signing keys and revocations in SQLite."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.auth.token_store import SqliteTokenStore
from tests.auth.token_stores import TokenStoreContract, key

pytestmark = pytest.mark.anyio


class TestSqliteTokenStore(TokenStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Generator[SqliteTokenStore]:
        store = SqliteTokenStore(tmp_path / "tokens.db")
        yield store
        store.close()


def test_a_key_does_not_show_its_secret() -> None:
    assert "secret" not in repr(key("a"))
