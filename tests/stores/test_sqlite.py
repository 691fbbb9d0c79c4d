"""The stores in SQLite keep the contracts."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.auth.store import KeyStore, SqliteKeyStore
from k8e.sessions.approval_store import ApprovalStore, SqliteApprovalStore
from k8e.sessions.snapshots import SnapshotStore, SqliteSnapshotStore
from k8e.sessions.store import SessionStore, SqliteSessionStore
from tests.stores import contracts

pytestmark = pytest.mark.anyio


class TestSessions(contracts.SessionStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Generator[SessionStore]:
        store = SqliteSessionStore(tmp_path / "sessions.db")
        yield store
        store.close()


class TestKeys(contracts.KeyStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Generator[KeyStore]:
        store = SqliteKeyStore(tmp_path / "keys.db")
        yield store
        store.close()


class TestApprovals(contracts.ApprovalStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Generator[ApprovalStore]:
        store = SqliteApprovalStore(tmp_path / "approvals.db")
        yield store
        store.close()


class TestSnapshots(contracts.SnapshotStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Generator[SnapshotStore]:
        store = SqliteSnapshotStore(tmp_path / "snapshots.db")
        yield store
        store.close()
