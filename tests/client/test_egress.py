"""Egress through the SDK: policies and denials, over each transport."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import Exit, SandboxClient, errors, sandbox_session
from tests.client.refusals import check_policies, check_refusal
from tests.gateway import worlds
from tests.gateway.worlds import CONNECT, NOWHERE
from tests.places import Place


@pytest.fixture(scope="module")
def place() -> Generator[Place]:
    with worlds.networked() as place:
        yield place


def test_what_is_refused_is_part_of_every_result(client: SandboxClient, runtime: str) -> None:
    session_id = client.create_session(runtime, [])
    assert client.get_session(session_id).allowed_hosts == ["none"]
    found = client.run(CONNECT, "python", session_id=session_id)
    assert found.exit_code == 3, found.stderr
    check_refusal(found.denials)
    assert client.run("true", session_id=session_id).denials == []
    command = ["python3", "-c", CONNECT]
    check_refusal(client.exec(session_id, command).denials)
    end = list(client.exec_events(session_id, command))[-1]
    assert isinstance(end, Exit)
    check_refusal(end.denials)
    told = client.egress(session_id)
    assert (told.allowed_hosts, told.rules, told.denied) == (["none"], ["none"], 3)
    assert [(item.address, item.count) for item in told.denials] == [(NOWHERE, 3)]
    assert abs(told.denials[-1].at - time.time()) < 60
    client.destroy_session(session_id)


def test_a_policy_is_replaced_while_the_session_lives(client: SandboxClient, runtime: str) -> None:
    session_id = client.create_session(runtime, ["A.example", "*.b.example:443"])
    check_policies(client.egress(session_id), session_id)
    assert client.update_allowed_hosts(session_id, ["8.8.8.0/24:80"]) == ["8.8.8.0/24:80"]
    assert client.get_session(session_id).allowed_hosts == ["8.8.8.0/24:80"]
    in_effect = client.update_allowed_hosts(session_id, ["default", "c.example"])
    assert "default" not in in_effect
    assert {"github.com", "c.example"} <= set(in_effect)
    assert client.egress(session_id).rules == in_effect
    assert client.get_session(session_id).allowed_hosts == ["default", "c.example"]
    assert client.update_allowed_hosts(session_id, []) == ["none"]
    with pytest.raises(errors.InvalidRequest, match=r"'b@d\.example' is not a host name"):
        client.update_allowed_hosts(session_id, ["good.example", "b@d.example"])
    assert client.egress(session_id).rules == ["none"]
    client.destroy_session(session_id)
    with pytest.raises(errors.SessionNotFound):
        client.egress(session_id)
    with pytest.raises(errors.SessionNotFound):
        client.update_allowed_hosts(session_id, ["a.example"])


def test_no_word_at_all_means_the_gateway_s_default() -> None:
    with worlds.networked(K8E_ALLOWED_HOSTS="a.example,*.b.example") as place:
        place.json("gateway", "--background")
        with sandbox_session("container", endpoint=place.endpoint) as (client, session_id):
            assert client.get_session(session_id).allowed_hosts == ["a.example", "*.b.example"]
            assert client.egress(session_id).rules == ["a.example", "*.b.example"]
        with sandbox_session("container", ["c.example"], place.endpoint) as (client, session_id):
            assert client.egress(session_id).rules == ["c.example"]


def test_creating_twice_with_different_policies_is_a_conflict(client: SandboxClient) -> None:
    request_id = f"policy-{time.time_ns()}"

    def create(*hosts: str) -> str:
        return client.create_session("container", hosts, request_id=request_id)

    first = create("a.example")
    assert create("a.example") == first
    with pytest.raises(errors.Conflict):
        create("open")
    client.destroy_session(first)


def test_changes_of_many_at_once_are_all_in_the_policy(client: SandboxClient) -> None:
    session_id = client.create_session("container", ["kept.example"])
    names = [f"host-{number}.example" for number in range(12)]

    def add(name: str) -> None:
        client.change_allowed_hosts(session_id, add=[name])

    def remove(name: str) -> None:
        client.change_allowed_hosts(session_id, remove=[name])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, names))
    assert set(client.get_session(session_id).allowed_hosts) == {"kept.example", *names}
    assert set(client.egress(session_id).rules) == {"kept.example", *names}, "the kernel agrees"
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(remove, names))
    assert client.get_session(session_id).allowed_hosts == ["kept.example"]
    with pytest.raises(errors.InvalidRequest, match=r"'host-1\.example' is none of the words"):
        client.change_allowed_hosts(session_id, remove=["host-1.example"])
    with pytest.raises(errors.InvalidRequest, match="is not a host name"):
        client.change_allowed_hosts(session_id, add=["bad host"])
    assert client.change_allowed_hosts(session_id, remove=["kept.example"]) == ["none"]
    client.destroy_session(session_id)
