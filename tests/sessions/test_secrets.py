"""Secrets of users: kept encrypted, given to sessions as variables, shown to nobody."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e import errors
from k8e.model import Principal, SecretRef, SessionSpec
from k8e.sessions import secrets
from k8e.sessions.secrets import Secrets
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, OTHER, World

VALUE = "s3cret-token-of-mine"
REF = SecretRef("github", "value", "TOKEN")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Secrets]:
    kept = Secrets(tmp_path)
    yield kept
    kept.close()


def everything_below(folder: Path) -> bytes:
    found = b""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a namespace is a file that cannot be read
            found += path.read_bytes() if path.is_file() else b""
    return found


async def test_a_session_gets_a_secret_as_a_variable_and_nothing_else_has_it(
    world: World, sessions: Sessions
) -> None:
    await sessions.secrets.set(ME.name, "default", "github", "value", VALUE)
    made = await sessions.create(ME, SessionSpec(env={"A": "1"}, secret_refs=(REF,)))
    guest = world.runtime.launched[0]
    assert guest.env == {"A": "1", "TOKEN": VALUE}
    assert guest.hidden == (VALUE,)
    told = sessions.get(ME, made.session_id)
    assert told.to_json()["secret_env_vars"] == ["TOKEN"]
    assert VALUE not in repr((told, made.to_json()))
    assert VALUE.encode() not in everything_below(world.settings.data_dir)
    assert sessions.get(ME, made.session_id).spec.secret_refs == (REF,)


async def test_a_sub_agent_gets_the_secrets_of_its_parent(world: World, sessions: Sessions) -> None:
    await sessions.secrets.set(ME.name, "default", "github", "value", VALUE)
    made = await sessions.create(ME, SessionSpec(secret_refs=(REF,)))
    await sessions.run_subagent(ME, made.session_id)
    assert world.runtime.launched[1].env == {"TOKEN": VALUE}


@pytest.mark.parametrize(
    ("owner", "tenant"), [(OTHER, "default"), (ME, "another")], ids=["owner", "tenant"]
)
async def test_a_secret_is_for_one_principal_and_tenant(
    world: World, sessions: Sessions, owner: Principal, tenant: str
) -> None:
    await sessions.secrets.set(ME.name, "default", "github", "value", VALUE)
    refusals: list[str] = []
    for name in ("github", "nobodys"):
        refs = (SecretRef(name, "value", "TOKEN"),)
        with pytest.raises(errors.InvalidRequest) as caught:
            await sessions.create(owner, SessionSpec(tenant=tenant, secret_refs=refs))
        refusals.append(str(caught.value).replace(name, ""))
    assert refusals[0] == refusals[1]
    assert world.runtime.launched == []
    assert sessions.listing(owner, ended=True) == []


async def test_a_secret_is_replaced_and_deleted_for_later_sessions(
    world: World, sessions: Sessions
) -> None:
    for value in ("first", "second"):
        await sessions.secrets.set(ME.name, "default", "github", "value", value)
        await sessions.create(ME, SessionSpec(secret_refs=(REF,)))
    assert [guest.env for guest in world.runtime.launched] == [
        {"TOKEN": "first"},
        {"TOKEN": "second"},
    ]
    assert sessions.secrets.delete(ME.name, "default", "github") == 1
    with pytest.raises(errors.InvalidRequest, match="does not exist"):
        await sessions.create(ME, SessionSpec(secret_refs=(REF,)))
    with pytest.raises(errors.SecretNotFound):
        sessions.secrets.delete(ME.name, "default", "github")


async def test_one_value_of_a_secret_is_deleted_and_the_others_stay(kept: Secrets) -> None:
    for key in ("user", "password"):
        await kept.set("me", "default", "db", key, f"the {key}")
    assert kept.delete("me", "default", "db", "user") == 1
    assert [item.key for item in kept.listing("me")] == ["password"]


async def test_what_is_listed_has_no_value(kept: Secrets) -> None:
    await kept.set("me", "default", "github", "value", VALUE)
    await kept.set("me", "team", "github", "value", VALUE)
    assert VALUE not in repr([item.to_json() for item in kept.listing("me")])
    assert [item.tenant for item in kept.listing("me")] == ["default", "team"]
    assert [item.tenant for item in kept.listing("me", "team")] == ["team"]
    assert kept.listing("somebody-else") == []


async def test_values_are_encrypted_and_the_key_is_for_the_gateway_alone(
    kept: Secrets, tmp_path: Path
) -> None:
    await kept.set("me", "default", "github", "value", VALUE)
    key = tmp_path / secrets.KEY_FILE
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == secrets.KEY_BYTES
    assert VALUE.encode() not in everything_below(tmp_path)


async def test_a_deleted_value_leaves_no_bytes_behind(kept: Secrets, tmp_path: Path) -> None:
    await kept.set("me", "default", "github", "value", VALUE)
    sealed = sqlite3.connect(tmp_path / "secrets.db").execute("SELECT value FROM secrets")
    (row,) = sealed.fetchone()
    sealed.connection.close()
    assert row[12:] in everything_below(tmp_path)
    kept.delete("me", "default", "github")
    assert row[12:] not in everything_below(tmp_path)


async def test_secrets_survive_a_restart(kept: Secrets, tmp_path: Path) -> None:
    await kept.set("me", "default", "github", "value", VALUE)
    again = Secrets(tmp_path)
    assert await again.resolve("me", "default", (REF,)) == {"TOKEN": VALUE}
    again.close()


async def test_a_row_that_was_moved_to_another_owner_tells_nothing(
    kept: Secrets, tmp_path: Path
) -> None:
    await kept.set("me", "default", "github", "value", VALUE)
    with sqlite3.connect(tmp_path / "secrets.db") as database:
        database.execute("UPDATE secrets SET owner='somebody-else'")
    database.close()
    with pytest.raises(errors.StateUnusable, match="cannot be read"):
        await kept.resolve("somebody-else", "default", (REF,))


async def test_without_its_key_nothing_is_lost_or_written(kept: Secrets, tmp_path: Path) -> None:
    await kept.set("me", "default", "github", "value", VALUE)
    (tmp_path / secrets.KEY_FILE).rename(tmp_path / "elsewhere")
    again = Secrets(tmp_path)
    with pytest.raises(errors.StateUnusable, match="is gone"):
        await again.resolve("me", "default", (REF,))
    with pytest.raises(errors.StateUnusable, match="is gone"):
        await again.set("me", "default", "other", "value", "x")
    (tmp_path / secrets.KEY_FILE).write_bytes(bytes(32))
    with pytest.raises(errors.StateUnusable, match="another key"):
        await again.set("me", "default", "other", "value", "x")
    (tmp_path / "elsewhere").rename(tmp_path / secrets.KEY_FILE)
    assert await again.resolve("me", "default", (REF,)) == {"TOKEN": VALUE}
    again.close()


async def test_the_key_can_be_a_file_of_the_operator(tmp_path: Path) -> None:
    given = tmp_path / "credential"
    kept = Secrets(tmp_path, str(given))
    with pytest.raises(errors.StateUnusable, match="credential"):
        await kept.set("me", "default", "github", "value", VALUE)
    given.write_bytes(b"short")
    with pytest.raises(errors.StateUnusable, match="5 bytes"):
        await kept.set("me", "default", "github", "value", VALUE)
    given.write_bytes(bytes(range(32)))
    await kept.set("me", "default", "github", "value", VALUE)
    assert not (tmp_path / secrets.KEY_FILE).exists()
    kept.close()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("", "value", "x"),
        ("a/b", "value", "x"),
        ("..", "value", "x"),
        ("a" * 64, "value", "x"),
        ("name", "", "x"),
        ("name", "k y", "x"),
        ("name", "value", ""),
        ("name", "value", "nul\0"),
        ("name", "value", "\udcff"),
        ("name", "value", "x" * (secrets.MAX_VALUE + 1)),
    ],
)
async def test_what_cannot_be_a_secret_is_refused(
    kept: Secrets, name: str, key: str, value: str
) -> None:
    with pytest.raises((errors.InvalidRequest, errors.LimitExceeded)) as caught:
        await kept.set("me", "default", name, key, value)
    assert not value or len(value) == 1 or value not in str(caught.value)
    assert kept.listing("me") == []


async def test_nobody_keeps_more_secrets_than_they_may(
    kept: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "MAX_SECRETS", 2)
    for name in ("one", "two", "two"):
        await kept.set("me", "default", name, "value", "x")
    with pytest.raises(errors.LimitExceeded):
        await kept.set("me", "team", "three", "value", "x")
    await kept.set("somebody-else", "default", "three", "value", "x")


async def test_who_is_gone_leaves_no_secret(world: World, sessions: Sessions) -> None:
    await sessions.secrets.set(ME.name, "default", "github", "value", VALUE)
    await sessions.secrets.set(OTHER.name, "default", "github", "value", VALUE)
    await sessions.evictions.evict(ME.name, "its key was deleted")
    assert sessions.secrets.owners() == {OTHER.name}
    await sessions.secrets.set(ME.name, "default", "late", "value", VALUE)  # a call under way
    with pytest.raises(errors.Denied):
        sessions.evictions.check_owner(ME.name)
    assert sessions.secrets.owners() == {OTHER.name}
    await sessions.evictions.sweep({OTHER.name})
    assert sessions.secrets.owners() == set()


@pytest.mark.parametrize(
    "refs",
    [
        [("github", "value", "A")] * 2,
        [("github", "value", f"A{number}") for number in range(33)],
        [("github", "value", "")],
        [("github", "value", "A=B")],
        [("github", "value", "A" * 257)],
        [("github", "", "A")],
        [("", "value", "A")],
        [("github", "value")],
        "github",
        7,
    ],
)
def test_references_that_cannot_be_are_refused(refs: object) -> None:
    with pytest.raises(errors.InvalidRequest):
        SessionSpec.from_json({"secret_refs": refs})


def test_references_are_read_back_as_they_were_written() -> None:
    spec = SessionSpec.from_json({"secret_refs": {"TOKEN": "github", "USER": "db:user"}})
    assert spec.secret_refs == (REF, SecretRef("db", "user", "USER"))
    assert SessionSpec.from_json(spec.to_json(), stored=True) == spec


async def test_a_standing_session_with_other_secrets_is_not_taken(sessions: Sessions) -> None:
    await sessions.secrets.set(ME.name, "default", "github", "value", VALUE)
    await sessions.standing(ME, {"tenant": "default"})
    with pytest.raises(errors.Conflict, match="other secrets"):
        await sessions.standing(ME, {"tenant": "default", "secret_refs": {"TOKEN": "github"}})
