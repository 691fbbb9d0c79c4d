"""``k8e secret``: values come from stdin and are never printed; sessions get them as variables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from tests.places import NewPlace, Place

VALUE = "from-stdin-and-never-shown"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def test_a_secret_is_set_listed_used_and_deleted(place: Place) -> None:
    made = place.cli("secret", "set", "github", stdin=f"{VALUE}\n".encode())
    told = json.loads(made.stdout)
    assert (told["ok"], told["name"], told["key"]) == (True, "github", "value")
    listed = place.json("secret", "list")["secrets"]
    assert [(item["name"], item["key"], item["tenant_id"]) for item in listed] == [
        ("github", "value", "default")
    ]
    assert VALUE not in made.stdout.decode() + json.dumps(listed)

    flags = ("--runtime", "container", "--secret", "TOKEN=github")
    session = place.json("sandbox", "create", *flags)["session_id"]
    done = place.json("sandbox", "run", "--session-id", session, 'printf %s "$TOKEN"')
    assert done["stdout"] == VALUE, "without the end of the line"
    assert place.json("sandbox", "get", session)["secret_env_vars"] == ["TOKEN"]
    log = place.cli("sandbox", "log", session)
    assert log.stdout == b"*" * len(VALUE)
    place.json("sandbox", "destroy", session)

    assert place.json("secret", "delete", "github")["deleted"] == 1
    assert place.json("secret", "list")["secrets"] == []
    again = place.cli("secret", "delete", "github")
    assert again.returncode == 1
    assert b"not found" in again.stdout + again.stderr


def test_a_secret_has_several_values_and_a_tenant(place: Place) -> None:
    for key in ("user", "password"):
        place.cli("secret", "set", "db", key, "--tenant", "team", stdin=key.encode())
    secrets = ("--secret", "USER_NAME=db:user", "--secret", "PASSWORD=db:password")
    flags = ("--runtime", "container", "--tenant", "team", *secrets)
    session = place.json("sandbox", "create", *flags)["session_id"]
    run = ("sandbox", "run", "--session-id", session, 'echo "$USER_NAME $PASSWORD"')
    assert place.json(*run)["stdout"] == "user password\n"
    place.json("sandbox", "destroy", session)
    refused = place.cli("sandbox", "create", "--runtime", "container", *secrets)
    assert b"does not exist" in refused.stdout
    assert place.json("secret", "delete", "db", "--tenant", "team")["deleted"] == 2


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"nul\0byte", b"x" * 20_000])
def test_what_cannot_be_a_value_is_refused_and_not_repeated(place: Place, value: bytes) -> None:
    done = place.cli("secret", "set", "bad", stdin=value)
    assert done.returncode == 1
    assert "error" in json.loads(done.stdout)
    assert len(done.stdout) < 1000
    assert place.json("secret", "list")["secrets"] == []


def test_both_clients_have_the_same_secrets(place: Place) -> None:
    with SandboxClient(place.endpoint) as client:
        made = client.set_secret("api", VALUE)
        assert VALUE not in repr(made)
        session = client.create_session("container", secrets={"API_KEY": "api"})
        assert client.get_session(session).secret_env_vars == ["API_KEY"]
        assert client.exec(session, 'printf %s "$API_KEY"').stdout == VALUE
        client.destroy_session(session)
        with pytest.raises(errors.InvalidRequest):
            client.create_session("container", secrets={"API_KEY": "none"})

    async def others() -> int:
        async with AsyncSandboxClient(place.endpoint) as client:
            assert [item.name for item in await client.list_secrets()] == ["api"]
            await client.set_secret("api", "another", key="second", tenant_id="default")
            return await client.delete_secret("api")

    assert asyncio.run(others()) == 2


@pytest.mark.timeout(90)
def test_secrets_outlive_the_gateway_and_their_sessions_do_too(new_place: NewPlace) -> None:
    place = new_place()
    place.cli("secret", "set", "github", stdin=VALUE.encode())
    flags = ("--runtime", "container", "--secret", "TOKEN=github")
    session = place.json("sandbox", "create", *flags)["session_id"]
    place.cli("gateway", "stop")
    run = ("sandbox", "run", "--session-id", session, 'printf %s "$TOKEN"')
    assert place.json(*run)["stdout"] == VALUE
    later = place.json("sandbox", "create", *flags)["session_id"]
    assert place.json("sandbox", "get", later)["secret_env_vars"] == ["TOKEN"]
