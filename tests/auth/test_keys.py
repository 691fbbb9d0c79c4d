"""Keys: what is kept of them, how long they live, and what ends with them."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e import errors
from k8e.auth import keys, rates, store
from k8e.auth.keys import KeyQuota, Keys, Unknown
from k8e.auth.rates import FailureRates, Rates
from k8e.auth.store import SqliteKeyStore
from k8e.model import Principal, Role

HOUR = 3600.0


class Clock:
    """The time that keys see."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keys, "time", clock)
    return clock


@pytest.fixture
async def known(tmp_path: Path) -> AsyncGenerator[Keys]:
    store = SqliteKeyStore(tmp_path / "keys.db")
    yield Keys(store)
    store.close()


def again(folder: Path) -> Keys:
    """What a gateway knows that is started anew."""
    return Keys(SqliteKeyStore(folder / "keys.db"))


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_a_key_is_found_by_its_secret_and_only_a_hash_is_kept(
    known: Keys, tmp_path: Path
) -> None:
    made = await known.create("laptop")
    assert re.fullmatch("k8e-[0-9a-f]{64}", made.secret)
    assert known.of_secret(made.secret).name == "laptop"
    assert known.of_secret("e2b_" + made.secret).name == "laptop"
    principal = keys.principal(made.key)
    assert (principal.shown, principal.roles) == ("key:laptop", {Role.AGENT})
    assert re.fullmatch("key:laptop:id-[a-z2-7]{20}", principal.name)
    raw = everything(tmp_path)
    assert made.secret.encode() not in raw
    assert made.secret.removeprefix("k8e-").encode() not in raw
    assert again(tmp_path).of_secret(made.secret).name == "laptop"


@pytest.mark.parametrize(
    "secret", ["", "k8e-", "k8e-" + "0" * 64, "k8e-" + "0" * 63 + "\n", "x" * 100_000, "\ud800"]
)
async def test_what_is_no_key_of_ours_is_unknown(known: Keys, secret: str) -> None:
    await known.create("laptop")
    with pytest.raises(Unknown, match="API key"):
        known.of_secret(secret)


async def test_a_deleted_key_is_gone_for_good_and_its_name_is_free(
    known: Keys, tmp_path: Path
) -> None:
    made = await known.create("laptop")
    await known.issued("0A", made.key, "device", made.key.expires_at)
    assert known.of_certificate("0a", "laptop") == made.key
    await known.delete("laptop")
    second = await known.create("laptop")
    for gateway in (known, again(tmp_path)):
        with pytest.raises(Unknown, match="was deleted"):
            gateway.of_secret(made.secret)
        with pytest.raises(Unknown, match="was deleted"):
            gateway.of_certificate("0A", "laptop")
        assert gateway.of_secret(second.secret).key_id != made.key.key_id
    assert known.of_principal(keys.principal(second.key)) == second.key
    assert known.of_principal(keys.principal(made.key)) is None
    assert keys.principal(made.key).name != keys.principal(second.key).name


async def test_a_key_ends_with_its_time(known: Keys, clock: Clock) -> None:
    made = await known.create("laptop", "2h")
    await known.issued("0a", made.key, "device", clock.now + 9 * HOUR)
    clock.now += 2 * HOUR - 1
    assert known.of_secret(made.secret) == made.key
    clock.now += 1
    with pytest.raises(Unknown, match="has expired"):
        known.of_secret(made.secret)
    with pytest.raises(Unknown, match="has expired"):
        known.of_certificate("0a", "laptop")
    assert known.of_principal(keys.principal(made.key)) is None


async def test_a_certificate_ends_with_its_own_time_and_is_for_its_name(
    known: Keys, clock: Clock
) -> None:
    made = await known.create("laptop", "never")
    await known.issued("0a", made.key, "device", clock.now + HOUR)
    for serial, name in (("0a", "other"), ("0b", "laptop"), ("", ""), ("\ud800", "laptop")):
        with pytest.raises(Unknown, match="certificate is not known"):
            known.of_certificate(serial, name)
    assert known.listing() == [(made.key, 1)]
    clock.now += HOUR
    with pytest.raises(Unknown, match="certificate is not known"):
        known.of_certificate("0a", "laptop")
    assert known.listing() == [(made.key, 0)]


async def test_what_has_been_over_for_long_is_forgotten(
    known: Keys, clock: Clock, tmp_path: Path
) -> None:
    old = await known.create("old", "1d")
    await known.issued("0a", old.key, "device", clock.now + HOUR)
    await known.create("deleted", "never")
    await known.delete("deleted")
    clock.now += keys.KEEP + 2 * keys.DAY
    await known.create("new")
    database = sqlite3.connect(tmp_path / "keys.db")
    query = "SELECT name FROM keys ORDER BY key_id"
    assert [row[0] for row in database.execute(query)] == ["old", "new"]
    assert database.execute("SELECT count(*) FROM certificates").fetchone() == (0,)
    assert known.gone() == {old.key.owner}, "until somebody has removed what it made"
    assert [key.name for key, _ in known.listing()] == ["new"]
    clock.now += keys.KEEP + 2 * keys.DAY
    await known.create("newer")
    assert [row[0] for row in database.execute(query)] == ["new", "newer"]
    database.close()


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 30 * 24 * HOUR), ("12h", 12 * HOUR), ("never", 0), ("1h", HOUR)]
)
def test_times_to_live_are_understood(text: str, seconds: float) -> None:
    assert keys.parse_ttl(text) == seconds


@pytest.mark.parametrize("text", ["0d", "-1d", "30", "d", "3651d", "1w", "1.5d", "\u0661d", "1d\n"])
def test_other_times_to_live_are_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="how long a key can live"):
        keys.parse_ttl(text)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a\n", "x" * 61, "ä", "key:a", "\ud800"])
async def test_names_that_could_mislead_are_refused(known: Keys, name: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="name of a key"):
        await known.create(name)


async def test_a_name_is_taken_once_and_roles_are_known_ones(known: Keys) -> None:
    made = await known.create("boss", "never", ["approver", "admin", "admin"])
    assert made.key.roles == {Role.APPROVER, Role.ADMIN}
    assert known.listing() == [(made.key, 0)]
    with pytest.raises(errors.Conflict, match="'boss' already"):
        await known.create("boss")
    with pytest.raises(errors.InvalidRequest, match="agent, approver, admin"):
        await known.create("other", "", ["root"])
    with pytest.raises(errors.InvalidRequest, match="there is no key"):
        await known.delete("nobody")


async def test_calls_under_way_end_with_their_key(known: Keys) -> None:
    mine, other = (await known.create("mine")).key, (await known.create("other")).key
    begun = asyncio.Event()

    async def call(key: keys.Key) -> None:
        async with known.while_valid(key):
            begun.set()
            await asyncio.Event().wait()

    task, spared = asyncio.create_task(call(mine)), asyncio.create_task(call(other))
    await begun.wait()
    await known.delete("mine")
    with pytest.raises(Unknown, match="deleted or has expired meanwhile"):
        await asyncio.wait_for(task, 10)
    assert not spared.done()
    spared.cancel()


async def test_a_key_is_rotated_again_while_calls_with_it_are_on_their_way_out(
    known: Keys,
) -> None:
    key, begun, ending, go_on = (
        (await known.create("mine")).key,
        *(asyncio.Event() for _ in range(3)),
    )

    async def call() -> None:
        async with known.while_valid(key):
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                ending.set()
                await go_on.wait()

    task = asyncio.create_task(call())
    await begun.wait()
    await known.rotate("mine")
    await asyncio.wait_for(ending.wait(), 10)
    told: list[keys.Key] = []
    known.on_end.append(told.append)
    assert known.of_secret((await known.rotate("mine")).secret).name == "mine"
    assert len(told) == 1
    go_on.set()
    with pytest.raises(Unknown):
        await asyncio.wait_for(task, 10)


async def test_calls_under_way_end_when_their_key_expires(known: Keys) -> None:
    made = await known.create("mine", "1h")
    soon = keys.Key(made.key.key_id, "mine", made.key.roles, 0, keys.time.time() + 0.05)
    with pytest.raises(Unknown, match="expired meanwhile"):
        async with asyncio.timeout(10), known.while_valid(soon):
            await asyncio.Event().wait()


async def test_a_timeout_of_a_call_itself_is_not_taken_for_the_key_s(known: Keys) -> None:
    made = await known.create("mine")
    with pytest.raises(TimeoutError):
        async with known.while_valid(made.key):
            raise TimeoutError


# Failed attempts.


def test_failures_are_limited_by_address_and_forgiven_with_time() -> None:
    counted = FailureRates()
    told = [counted.failed("192.0.2.1", now=0) for _ in range(30)]
    assert told == [True] * 20 + [False] * 10
    assert counted.failed("192.0.2.2", now=0), "another address is another's"
    assert counted.failed("192.0.2.1", now=2)
    assert not counted.failed("192.0.2.1", now=2)


def test_a_host_with_many_addresses_has_one_limit() -> None:
    counted = FailureRates()
    told = [counted.failed(f"2001:db8::{number:x}", now=0) for number in range(21)]
    assert told[-1] is False
    assert counted.failed("2001:db8:0:1::1", now=0)


def test_many_addresses_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_ADDRESSES", 10)
    counted = FailureRates()
    for number in range(100):
        counted.failed(f"192.0.2.{number}")
    assert len(counted) == 10


# Rotation, quotas, and what was there before them.


async def test_a_rotated_key_is_the_same_principal_with_another_secret(
    known: Keys, clock: Clock, tmp_path: Path
) -> None:
    before = await known.create("laptop", "1h", ["agent", "admin"], KeyQuota(3, 7.5))
    await known.issued("0a", before.key, "device", clock.now + HOUR)
    ended: list[str] = []
    known.on_end.append(lambda key: ended.append(key.owner))
    clock.now += 2 * HOUR  # also one that has expired
    after = await known.rotate("laptop", "2h")
    assert ended == [before.key.owner]
    assert keys.principal(after.key) == keys.principal(before.key)
    assert after.key.expires_at == clock.now + 2 * HOUR
    assert (after.key.max_sessions, keys.principal(after.key).rate) == (3, 7.5)
    for gateway in (known, again(tmp_path)):
        assert gateway.of_secret(after.secret) == after.key
        with pytest.raises(Unknown, match="not known"):
            gateway.of_secret(before.secret)
        with pytest.raises(Unknown, match="not known"):
            gateway.of_certificate("0A", "laptop")
    with pytest.raises(errors.InvalidRequest, match="no key"):
        await known.rotate("nobody")


@pytest.mark.parametrize(
    "quota",
    [
        KeyQuota(-1),
        KeyQuota(100_001),
        KeyQuota(0, -1.0),
        KeyQuota(0, float("nan")),
        KeyQuota(0, 1e9),
    ],
)
async def test_quotas_that_mean_nothing_are_refused(known: Keys, quota: KeyQuota) -> None:
    with pytest.raises(errors.InvalidRequest):
        await known.create("laptop", "", (), quota)


async def test_keys_of_before_go_on_owning_what_they_own_and_no_later_one_does(
    tmp_path: Path, clock: Clock
) -> None:
    secret = "k8e-" + "1" * 64
    database = sqlite3.connect(tmp_path / "keys.db")
    database.executescript(f"BEGIN;{store.MIGRATIONS[0]};PRAGMA user_version=1;COMMIT;")
    for name, shown, revoked in (("laptop", "old", 5.0), ("laptop", secret, 0.0)):
        database.execute(
            "INSERT INTO keys (name, hash, roles, created_at, expires_at, revoked_at)"
            " VALUES (?,?,'agent',1,0,?)",
            (name, keys.digest(shown), revoked),
        )
    database.commit()
    database.close()
    known = again(tmp_path)
    assert keys.principal(known.of_secret(secret)).name == "key:laptop"
    assert known.gone() == {"key:laptop:1"}
    await known.delete("laptop")
    later = await known.create("laptop")
    assert keys.principal(later.key).name.startswith("key:laptop:id-")


def test_calls_are_limited_by_caller_and_forgiven_with_time() -> None:
    counted = Rates(10)
    mine, other = Principal("key:mine"), Principal("key:other")
    for _ in range(20):
        counted.take(mine, now=0)
    with pytest.raises(errors.LimitExceeded, match="K8E_CALL_RATE"):
        counted.take(mine, now=0)
    counted.take(other, now=0)
    counted.take(mine, now=0.1)
    with pytest.raises(errors.LimitExceeded):
        counted.take(mine, now=0.1)
    slow = Principal("key:slow", label="key:slow", rate=0.1)
    counted.take(slow, now=0)
    with pytest.raises(errors.LimitExceeded, match="limit of this key"):
        counted.take(slow, now=0)
    for _ in range(100):
        counted.take(Principal("local"), now=0)
        Rates(0).take(mine, now=0)


def test_what_costs_less_than_a_call_may_be_done_more_often() -> None:
    counted = Rates(10, times=10)
    for who, most in ((Principal("key:mine"), 200), (Principal("key:slow", rate=1), 20)):
        for _ in range(most):
            counted.take(who, now=0)
        with pytest.raises(errors.LimitExceeded):
            counted.take(who, now=0)


def test_many_callers_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_CALLERS", 10)
    counted = Rates(10)
    for number in range(100):
        counted.take(Principal(f"key:{number}"))
    assert len(counted) == 10


async def test_certificates_of_a_key_are_bounded_and_the_newest_are_kept(
    known: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.auth.store.MAX_CERTIFICATES", 3)
    made, other = (await known.create("laptop")).key, (await known.create("other")).key
    await known.issued("ff", other, "d", clock.time() + 1000)
    for number in range(5):
        await known.issued(f"{number:02x}", made, "d", clock.time() + 1000)
    for serial in ("00", "01"):
        with pytest.raises(Unknown, match="certificate is not known"):
            known.of_certificate(serial, "laptop")
    assert [known.of_certificate(serial, "laptop") for serial in ("02", "03", "04")] == [made] * 3
    assert known.of_certificate("ff", "other") == other
