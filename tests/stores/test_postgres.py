"""The stores in PostgreSQL keep the same contracts, on a real server."""

from __future__ import annotations

import pytest

from k8e.auth.store import KeyStore
from k8e.postgres.conversations import PostgresConversations
from k8e.postgres.stores import PostgresStores
from k8e.postgres.tokens import PostgresTokenStore
from k8e.sessions.approval_store import ApprovalStore
from k8e.sessions.store import SessionStore
from tests.auth.token_stores import TokenStoreContract
from tests.sessions.conversation_stores import ConversationStoreContract
from tests.stores import contracts

pytestmark = pytest.mark.anyio


class TestSessions(contracts.SessionStoreContract):
    @pytest.fixture
    def store(self, postgres: PostgresStores) -> SessionStore:
        return postgres.sessions


class TestKeys(contracts.KeyStoreContract):
    @pytest.fixture
    def store(self, postgres: PostgresStores) -> KeyStore:
        return postgres.keys


class TestApprovals(contracts.ApprovalStoreContract):
    @pytest.fixture
    def store(self, postgres: PostgresStores) -> ApprovalStore:
        return postgres.approvals


class TestConversations(ConversationStoreContract):
    @pytest.fixture
    def store(self, postgres: PostgresStores) -> PostgresConversations:
        return postgres.conversations


class TestTokens(TokenStoreContract):
    @pytest.fixture
    def store(self, postgres: PostgresStores) -> PostgresTokenStore:
        return postgres.tokens
