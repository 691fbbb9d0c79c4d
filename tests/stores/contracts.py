"""What every store of sessions, keys, approvals and snapshots does, wherever it keeps its rows.

A class of tests that derives from a contract gives it a ``store``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from k8e import errors
from k8e.auth.store import Key, KeyStore
from k8e.model import Limits, Phase, Role, Session, SessionSpec
from k8e.sessions import live
from k8e.sessions import store as session_stores
from k8e.sessions.approval_store import APPROVED, PENDING, REJECTED, Approval, ApprovalStore
from k8e.sessions.snapshots import Snapshot, SnapshotStore
from k8e.sessions.store import SessionStore

BASE = Session(
    session_id="sess-a",
    owner="me",
    spec=SessionSpec(tenant="t", request_id="once", env={"A": "\udcff"}, labels={"x": "\0y"}),
    runtime="gvisor",
    sandbox_id="sb-a",
    phase=Phase.CREATING,
    created_at=1000.123456,
    expires_at=2000.654321,
    auto=True,
    allowed_hosts=("example.com", "*.example.org:443"),
)
OTHER = replace(BASE, session_id="sess-b", sandbox_id="sb-b", auto=False, spec=SessionSpec())


class SessionStoreContract:
    """Derive from this, and define a fixture ``store``."""

    async def test_a_session_comes_back_as_it_was_written(self, store: SessionStore) -> None:
        await store.insert(BASE)
        assert store.get("sess-a") == BASE
        assert store.get("sess-a", "me") == BASE
        assert store.get("sess-a", "somebody") is None
        assert store.get("sess-x") is None
        assert store.unended() == [BASE]
        assert store.elsewhere(BASE) is None
        assert list(store.others()) == []

    async def test_a_session_can_get_another_sandbox_than_was_planned(
        self, store: SessionStore
    ) -> None:
        await store.insert(BASE)
        active = await store.activate(replace(BASE, sandbox_id="sb-warm"))
        assert active == replace(BASE, phase=Phase.ACTIVE, sandbox_id="sb-warm")
        assert store.get("sess-a") == active
        assert store.sandboxes() == ["sb-warm"]

    @pytest.mark.parametrize(
        "clashing",
        [
            replace(OTHER, session_id="sess-a"),
            replace(OTHER, spec=SessionSpec(request_id="once")),
            replace(OTHER, spec=SessionSpec(tenant="t"), auto=True),
        ],
        ids=["id", "request", "standing"],
    )
    async def test_ids_requests_and_standing_places_are_taken_once(
        self, store: SessionStore, clashing: Session
    ) -> None:
        await store.insert(BASE)
        with pytest.raises(errors.Conflict):
            await store.insert(clashing)
        await store.end("sess-a", "done", 5.0)
        await store.insert(clashing)
        assert store.get(clashing.session_id) == clashing

    async def test_of_many_claims_of_one_request_at_once_one_stands(
        self, store: SessionStore
    ) -> None:
        wanted = [replace(BASE, session_id=f"s-{n}", sandbox_id=f"sb-{n}") for n in range(12)]

        async def claim(session: Session) -> bool:
            try:
                await store.insert(session)
            except errors.Conflict:
                return False
            return True

        assert sum(await asyncio.gather(*map(claim, wanted))) == 1
        assert len(store.of_owner("me")) == 1

    async def test_a_request_leads_to_its_session_while_that_lives(
        self, store: SessionStore
    ) -> None:
        await store.insert(BASE)
        assert store.find_request("me", "once") == BASE
        assert store.find_request("somebody", "once") is None
        await store.end("sess-a", "done", 5.0)
        assert store.find_request("me", "once") is None

    async def test_an_ended_session_says_why_and_stays_as_it_ended(
        self, store: SessionStore
    ) -> None:
        await store.insert(BASE)
        await store.activate(BASE)
        await store.begin_end("sess-a", "asked")
        assert store.half_ended() == {"sess-a": "asked"}
        await store.end("sess-a", "asked \0 for", 5.0)
        await store.end("sess-a", "again", 6.0)
        await store.set_phase("sess-a", Phase.PAUSED)
        await store.extend("sess-a", 1.0, 1.0)
        found = store.get("sess-a")
        assert found is not None
        assert (found.phase, found.ended_reason[:5]) == (Phase.ENDED, "asked")
        assert found.expires_at == BASE.expires_at
        assert store.half_ended() == {}
        assert store.unended() == []
        assert store.of_owner("me") == []
        assert store.of_owner("me", ended=True) == [found]

    async def test_only_what_runs_is_paused(self, store: SessionStore) -> None:
        await store.insert(BASE)
        await store.set_phase("sess-a", Phase.PAUSED)
        assert [item.phase for item in store.unended()] == [Phase.CREATING]
        await store.activate(BASE)
        await store.set_phase("sess-a", Phase.PAUSED)
        assert [item.phase for item in store.unended()] == [Phase.PAUSED]
        await store.set_phase("sess-a", Phase.ACTIVE)
        assert [item.phase for item in store.unended()] == [Phase.ACTIVE]

    async def test_a_policy_that_is_under_way_is_found_again(self, store: SessionStore) -> None:
        await store.insert(BASE)
        await store.allow(BASE, ("a.example",), under_way=True)
        assert [item.allowed_hosts for item in store.half_allowed()] == [("a.example",)]
        await store.allow(BASE, ("b.example",))
        assert store.half_allowed() == []
        found = store.get("sess-a")
        assert found is not None
        assert found.allowed_hosts == ("b.example",)

    async def test_a_longer_life_is_written_down(self, store: SessionStore) -> None:
        await store.insert(BASE)
        deadline = live.boot_time() + 3600
        await store.extend("sess-a", live.date_of(deadline), deadline)
        found = store.get("sess-a")
        assert found is not None
        assert found.deadline == pytest.approx(deadline, abs=1e-3)
        assert found.expires_at == pytest.approx(time.time() + 3600, abs=5)

    async def test_writes_are_done_in_the_order_in_which_they_were_asked_for(
        self, store: SessionStore
    ) -> None:
        await store.insert(BASE)
        for number in range(40):
            store.allow(BASE, (f"h{number}.example",))
        await store.allow(BASE, ("last.example",))
        found = store.get("sess-a")
        assert found is not None
        assert found.allowed_hosts == ("last.example",)

    async def test_an_id_means_the_newest_session_of_its_owner(self, store: SessionStore) -> None:
        gone: list[str] = []
        store.on_forget.append(gone.append)
        chosen = SessionSpec(session_id="mine")
        for number, owner in enumerate(("me", "you", "me")):
            session = replace(
                OTHER, session_id="mine", owner=owner, sandbox_id=f"sb-{number}", spec=chosen
            )
            await store.insert(session)
            await store.end("mine", "done", float(number + 1))
        mine, yours = store.get("mine", "me"), store.get("mine", "you")
        assert mine is not None
        assert yours is not None
        assert (mine.sandbox_id, yours.sandbox_id) == ("sb-2", "sb-1")
        assert gone == ["sb-0"]

    async def test_what_ended_long_ago_or_is_too_much_is_forgotten(
        self, store: SessionStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from k8e.postgres import sessions as postgres_sessions

        for module in (session_stores, postgres_sessions):
            monkeypatch.setattr(module, "MAX_ENDED_EACH", 2)
        for number in range(6):
            ids = {"session_id": f"s-{number}", "sandbox_id": f"sb-{number}"}
            await store.insert(replace(OTHER, **ids))
            await store.end(f"s-{number}", "done", 100.0 + number)
        await store.forget_ended(101.5, "me")
        assert {item.session_id for item in store.of_owner("me", ended=True)} == {"s-4", "s-5"}
        assert sorted(store.sandboxes("me")) == ["sb-4", "sb-5"]
        assert store.sandboxes("you") == []

    async def test_limits_and_children_come_back(self, store: SessionStore) -> None:
        limits = Limits(cpus=0.5, memory=64 << 20, pids=30, disk=16 << 20)
        child = replace(OTHER, parent="sess-a", spec=SessionSpec(limits=limits))
        await store.insert(child)
        assert store.get("sess-b") == child

    async def test_what_is_no_text_is_nowhere(self, store: SessionStore) -> None:
        assert store.get("\ud800") is None
        assert store.find_request("me", "\ud800") is None


NOW = 1_790_000_000.0
KEY = Key(0, "ci", frozenset({Role.AGENT, Role.ADMIN}), NOW, 0, 0, "key:ci:1", 3, 2.5)


class KeyStoreContract:
    """Derive from this, and define a fixture ``store``."""

    async def test_a_key_is_found_by_its_hash_name_and_owner(self, store: KeyStore) -> None:
        made = await store.insert(KEY, b"digest")
        assert made == replace(KEY, key_id=made.key_id)
        assert made.key_id > 0
        for found in (store.hashed(b"digest"), store.named("ci"), store.owned("key:ci:1")):
            assert found == made
        assert store.hashed(b"other") is None
        assert store.listing() == [made]

    async def test_a_name_is_taken_until_its_key_is_deleted(self, store: KeyStore) -> None:
        made = await store.insert(KEY, b"digest")
        again = replace(KEY, owner="key:ci:2")
        with pytest.raises(errors.Conflict, match="already"):
            await store.insert(again, b"digest 2")
        assert await store.revoke("ci", NOW + 1) == made
        assert await store.revoke("ci", NOW + 2) is None
        found = store.hashed(b"digest")
        assert found is not None
        assert found.revoked_at == NOW + 1
        assert store.revoked() == {"key:ci:1"}
        assert (await store.insert(again, b"digest 2")).key_id != made.key_id

    async def test_of_many_keys_of_one_name_at_once_one_stands(self, store: KeyStore) -> None:
        async def make(number: int) -> bool:
            try:
                await store.insert(replace(KEY, owner=f"key:ci:{number}"), b"%d" % number)
            except errors.Conflict:
                return False
            return True

        assert sum(await asyncio.gather(*map(make, range(8)))) == 1

    async def test_a_rotated_key_has_another_secret_and_no_certificates(
        self, store: KeyStore
    ) -> None:
        made = await store.insert(KEY, b"digest")
        later = time.time() + 1000
        await store.add_certificate("0a", made.key_id, "laptop", NOW, later)
        assert store.of_certificate("0a", time.time()) == made
        assert store.certificates(made.key_id, time.time()) == 1
        after = replace(made, created_at=NOW + 5, expires_at=NOW + 50)
        await store.rotate(after, b"new")
        assert store.hashed(b"digest") is None
        assert store.hashed(b"new") == after
        assert store.of_certificate("0a", time.time()) is None
        assert store.certificates(made.key_id, time.time()) == 0

    async def test_a_certificate_is_good_until_its_date(self, store: KeyStore) -> None:
        made = await store.insert(KEY, b"digest")
        later = time.time() + 1000
        await store.add_certificate("0a", made.key_id, "laptop", NOW, later)
        assert store.of_certificate("0a", later - 1) == made
        assert store.of_certificate("0a", later) is None
        assert store.of_certificate("\ud800", NOW) is None

    async def test_what_has_been_over_for_long_is_forgotten(self, store: KeyStore) -> None:
        await store.insert(KEY, b"1")
        await store.revoke("ci", NOW)
        await store.insert(replace(KEY, name="old", owner="o", expires_at=NOW), b"2")
        await store.insert(replace(KEY, name="good", owner="g", expires_at=NOW + 1e6), b"3")
        await store.forget(NOW + 10, NOW + 20)
        assert [key.name for key in store.listing()] == ["good"]
        assert store.revoked() == {"o"}
        assert store.hashed(b"1") is None


HOUR = 3600.0


def approval(number: int = 1, sandbox: str = "sb-a", expires: float = HOUR) -> Approval:
    now = time.time()
    deadline = live.boot_time() + expires
    words = "me", "sess-a", sandbox, f"rm -r é{number}", PENDING
    return Approval(f"approval-{number}", *words, now + number, now + expires, deadline)


class ApprovalStoreContract:
    """Derive from this, and define a fixture ``store``."""

    async def test_an_approval_comes_back(self, store: ApprovalStore) -> None:
        made = approval()
        await store.insert(made)
        found = await store.get(made.approval_id)
        assert found is not None
        assert replace(found, deadline=made.deadline) == made
        assert found.deadline == pytest.approx(made.deadline, abs=1)
        assert await store.get("approval-x") is None

    async def test_what_is_no_text_is_nowhere(self, store: ApprovalStore) -> None:
        for name in ("\ud800", "a\0b", "x" * 100_000):
            assert await store.get(name) is None

    async def test_one_decision_stands_and_is_used_once(self, store: ApprovalStore) -> None:
        made = approval()
        await store.insert(made)
        assert not await store.use(made.approval_id, live.boot_time())
        verdicts = [replace(made, status=APPROVED, decided_at=5.0, advisory=False, reason="ok")] * 6
        verdicts += [replace(made, status=REJECTED)] * 6
        now = live.boot_time()
        done = await asyncio.gather(*(_done(store.decide(item, now)) for item in verdicts))
        assert sum(done) == 1
        found = await store.get(made.approval_id)
        assert found is not None
        used = await asyncio.gather(*(_done(store.use(made.approval_id, now)) for _ in range(8)))
        assert sum(used) == (found.status == APPROVED)

    async def test_nothing_is_decided_or_used_too_late(self, store: ApprovalStore) -> None:
        made = approval(expires=100.0)
        await store.insert(made)
        late = made.deadline + 1
        assert not await store.decide(replace(made, status=APPROVED), late)
        assert await store.pending(late) == []
        assert await store.decide(replace(made, status=APPROVED), live.boot_time())
        assert not await store.use(made.approval_id, late)

    async def test_what_waits_is_listed_and_counted(self, store: ApprovalStore) -> None:
        for number in (2, 1, 3):
            await store.insert(approval(number))
        await store.insert(replace(approval(4, "sb-b"), owner="you"))
        now = live.boot_time()
        assert [item.approval_id[-1] for item in await store.pending(now)] == ["1", "2", "3", "4"]
        assert [item.approval_id[-1] for item in await store.pending(now, "you")] == ["4"]
        assert (await store.pending(now))[0].length == len(approval(1).action)
        found = await store.several(["approval-3", "approval-1", "approval-x"])
        assert [item.approval_id[-1] for item in found] == ["1", "3"]
        assert await store.count_pending("sb-a", now) == 3
        assert await store.count("sb-b") == 1
        assert sorted(await store.sandboxes()) == ["sb-a", "sb-b"]

    async def test_what_is_over_is_forgotten(self, store: ApprovalStore) -> None:
        for number in (1, 2, 3):
            await store.insert(approval(number))
        now = live.boot_time()
        await store.decide(replace(approval(2), status=REJECTED), now)
        await store.forget_oldest("sb-a", now, 5)
        assert await store.get("approval-2") is None
        await store.forget(now + 2 * HOUR)
        assert await store.count("sb-a") == 0
        await store.insert(approval(4))
        await store.forget_sandbox("sb-a")
        assert await store.get("approval-4") is None

    async def test_the_newest_secret_of_the_approver_holds(self, store: ApprovalStore) -> None:
        assert await store.approver() is None
        await store.set_approver(b"salt", b"hash")
        await store.set_approver(b"salt 2", b"hash 2")
        assert await store.approver() == (b"salt 2", b"hash 2")


async def _done(answer: Awaitable[bool]) -> bool:
    return await answer


SNAPSHOT = Snapshot("me", "base", NOW, 3, 100, "sha256:a", "sess-a", ("sha256:a",), "blob-1")


class SnapshotStoreContract:
    """Derive from this, and define a fixture ``store``."""

    async def test_a_snapshot_comes_back(self, store: SnapshotStore) -> None:
        await store.insert(SNAPSHOT, replace=False)
        assert store.get("me", "base") == SNAPSHOT
        assert store.get("you", "base") is None
        assert store.of_owner("me") == [SNAPSHOT]
        assert store.with_blobs() == [SNAPSHOT]
        assert store.place(SNAPSHOT) == ""
        assert (store.owners(), store.used("me"), store.count("me")) == ({"me"}, 100, 1)

    async def test_a_name_is_taken_unless_its_snapshot_is_to_be_replaced(
        self, store: SnapshotStore
    ) -> None:
        await store.insert(SNAPSHOT, replace=False)
        newer = replace(SNAPSHOT, created_at=NOW + 1, size_bytes=5)
        with pytest.raises(errors.Conflict):
            await store.insert(newer, replace=False)
        await store.insert(newer, replace=True)
        assert store.get("me", "base") == newer
        await store.delete("me", "base")
        assert store.get("me", "base") is None
        assert (store.owners(), store.used("me")) == (set(), 0)
