"""What the command line says of egress: policies, denials, metrics."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Generator
from typing import Any

import pytest

from k8e import Denial, Egress, errors
from k8e.cli import egress, fast, parser
from k8e.egress import denials as reasons
from k8e.egress import policy
from k8e.guest import wire
from tests.gateway import worlds
from tests.gateway.worlds import CONNECT, NOWHERE
from tests.places import COMMAND, NewPlace, Place

NOT_LISTED = "not in the allow-list"


def denial(name: str = "", address: str = "", port: int = 443, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "address": address,
        "port": port,
        "protocol": "tcp",
        "rule": NOT_LISTED,
        "count": 1,
        **fields,
    }


# What is printed.


@pytest.mark.parametrize(
    ("refused", "told", "advice"),
    [
        (denial("evil.example"), "evil.example:443 was refused", "evil.example:443"),
        (
            denial("evil.example", port=53, protocol="dns", count=2),
            "evil.example was refused",
            "evil.example",
        ),
        (
            denial("evil.example", port=22, count=3),
            "evil.example:22 was refused (3 times)",
            "evil.example:22",
        ),
        (
            denial(address="2606:4700::5"),
            "[2606:4700::5]:443 was refused",
            "'[2606:4700::5]:443'",
        ),
        (denial(address="8.8.8.8", port=0, protocol="icmp"), "8.8.8.8 was refused", "8.8.8.8"),
        (denial(address="10.0.0.1"), "10.0.0.1:443 was refused", ""),
    ],
)
def test_a_denial_is_one_line_with_what_would_allow_it(
    refused: dict[str, Any], told: str, advice: str
) -> None:
    line = f"k8e: egress to {told}: {NOT_LISTED}"
    if advice:
        line += f" (k8e sandbox allow-hosts s1 --add {advice})"
    assert egress.lines([refused], "s1") == f"{line}\n"


@pytest.mark.parametrize("name", ["a;reboot", "$(id).example", "\033[31mred", "two\nlines", "a b"])
def test_a_hostile_name_reaches_neither_terminal_nor_advice(name: str) -> None:
    told = egress.lines([denial(name)], "s1")
    assert told.count("\n") == 1
    assert "\033" not in told
    assert "allow-hosts" not in told


def test_advice_is_given_where_a_longer_list_would_help() -> None:
    helped = {"NAME", "NO_NETWORK", "PORT", "ADDRESS"}
    for key, value in vars(reasons).items():
        if key.isupper() and isinstance(value, tuple):
            told = egress.lines([denial("a.example", rule=value[1])], "s1")
            assert ("--add" in told) == (key in helped), key


def test_denials_in_json_have_sorted_keys_and_no_time() -> None:
    told = egress.encode([denial("<a>.example", at=0)])
    assert told == (
        '[{"address":"","count":1,"name":"\\u003ca\\u003e.example","port":443,"protocol":"tcp",'
        '"rule":"not in the allow-list"}]'
    )


def test_the_table_shows_the_policy_and_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    refused = [
        Denial("evil.example", "", 0, "dns", NOT_LISTED, 12, at=1_700_000_000),
        Denial("", "10.0.0.1", 80, "tcp", "private\033", 1, at=1_700_000_060),
    ]
    found = Egress("s1", ["default"], ["a.example", "b.example"], True, "", 13, refused)
    assert list(egress.egress_report(found)) == [
        "session   s1",
        "asked     default",
        "in effect a.example b.example",
        "network   yes",
        "denied    13",
        "",
        "LAST      TIMES  PROTOCOL  TO            ADDRESS   WHY",
        "22:13:20  12     dns       evil.example            not in the allow-list",
        "22:14:20  1      tcp       10.0.0.1:80   10.0.0.1  private\ufffd",
    ]
    nothing = Egress("s1", ["none"], ["none"], False, "no nftables here", 0, [])
    assert list(egress.egress_report(nothing))[3:] == [
        "network   no: no nftables here",
        "denied    0",
    ]


# What is asked for.


@pytest.mark.parametrize(
    ("before", "add", "remove", "after"),
    [
        (["default"], ["a.example"], [], ["default", "a.example"]),
        (["none"], ["a.example:443"], [], ["a.example:443"]),
        (["A.example", "b.example"], ["a.example"], ["B.EXAMPLE"], ["A.example"]),
        (["a.example"], [], ["a.example"], []),
        (["a.example"], ["b.example"], ["a.example"], ["b.example"]),
    ],
)
def test_words_are_added_and_removed(
    before: list[str], add: list[str], remove: list[str], after: list[str]
) -> None:
    assert policy.changed(before, add=add, remove=remove) == after


def test_a_word_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"'github\.com' is none of the words") as told:
        policy.changed(["default"], add=[], remove=["github.com"])
    assert "'default'" in told.value.hint


@pytest.mark.parametrize(
    ("values", "words"),
    [(["a, b ,", "c"], ["a", "b", "c"]), ([""], []), ([",,"], []), (["a,a"], ["a", "a"])],
)
def test_hosts_are_comma_lists(values: list[str], words: list[str]) -> None:
    assert parser.hosts(values) == words
    assert parser.hosts(None) is None


def test_a_run_asks_for_a_policy_only_if_it_was_given_one() -> None:
    for hosts in (None, [], ["a.example"]):
        options = fast.defaults() | {"session_id": "", "allowed_hosts": hosts}
        spec = wire.unpack_dict(fast.call(options, "e"))["session"]["spec"]
        assert spec == ({} if hosts is None else {"allowed_hosts": hosts})


# Against a gateway.


@pytest.fixture(scope="module")
def place() -> Generator[Place]:
    with worlds.networked() as place:
        yield place


@pytest.fixture(scope="module")
def closed(place: Place, runtime: str) -> Generator[str]:
    """A session that may reach nothing."""
    flags = ["--runtime", runtime, "--allowed-hosts", ""]
    session_id = place.json("sandbox", "create", *flags)["session_id"]
    yield session_id
    place.json("sandbox", "destroy", session_id)


def test_a_refused_connection_is_quick_and_part_of_the_result(place: Place, closed: str) -> None:
    done = place.cli("sandbox", "run", "--session-id", closed, "--lang", "python", CONNECT)
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 3, found
    assert found["duration_ms"] < 5000
    (refused,) = found["denials"]
    assert (refused["address"], refused["port"], refused["protocol"]) == (NOWHERE, 443, "tcp")
    assert "allow-list" in refused["rule"]


def test_raw_runs_tell_denials_after_the_output(place: Place, closed: str) -> None:
    code = f"import sys; print('said', file=sys.stderr)\n{CONNECT}"
    flags = ["--raw", "--session-id", closed, "--lang", "python"]
    done = place.cli("sandbox", "run", *flags, code)
    assert done.returncode == 3
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "said"
    assert lines[1].startswith(f"k8e: egress to {NOWHERE}:443 was refused: ")
    assert len(lines) == 2


def test_egress_shows_the_policy_and_the_denials(place: Place, closed: str) -> None:
    place.cli("sandbox", "run", "--session-id", closed, "--lang", "python", CONNECT)
    found = place.json("sandbox", "egress", closed)
    assert found["session_id"] == closed
    assert found["allowed_hosts"] == found["rules"] == ["none"]
    assert found["network"] is True, found["reason"]
    assert found["denied"] >= 1
    newest = found["denials"][-1]
    assert (newest["address"], newest["port"]) == (NOWHERE, 443)
    assert newest["at"] > 1_700_000_000
    assert place.json("sandbox", "egress", "--json", closed)["rules"] == ["none"]


def test_egress_is_a_table_on_a_terminal(place: Place, closed: str) -> None:
    place.cli("sandbox", "run", "--session-id", closed, "--lang", "python", CONNECT)
    ours, theirs = pty.openpty()
    command = [*COMMAND, "sandbox", "egress", closed]
    subprocess.run(command, env=place.environ, stdout=theirs, timeout=30, check=True)
    os.close(theirs)
    printed = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "in effect none" in printed
    assert f"{NOWHERE}:443" in printed


def test_a_policy_is_asked_for_shown_and_changed(place: Place) -> None:
    flags = ["--runtime", "container", "--allowed-hosts", "Web.example.org:443, *.example.net"]
    session_id = place.json("sandbox", "create", *flags, "--allowed-hosts=strict")["session_id"]
    asked = ["Web.example.org:443", "*.example.net", "strict"]
    assert place.json("sandbox", "get", session_id)["allowed_hosts"] == asked
    rules = place.json("sandbox", "egress", session_id)["rules"]
    assert sorted(rules) == ["*.example.net", "strict", "web.example.org:443"]

    def allow(*arguments: str) -> list[str]:
        told = place.json("sandbox", "allow-hosts", session_id, *arguments)
        assert set(told) == {"allowed_hosts", "session_id"}
        assert told["session_id"] == session_id
        return told["allowed_hosts"]

    assert allow("--add", "8.8.8.0/24", "--remove", "strict") == [*asked[:2], "8.8.8.0/24"]
    assert allow("a.example,b.example:80") == ["a.example", "b.example:80"]
    assert allow("--hosts", "c.example") == ["c.example"]
    assert allow("--clear") == ["none"]
    assert place.json("sandbox", "egress", session_id)["rules"] == ["none"]
    assert allow("open") == ["open"]
    place.json("sandbox", "destroy", session_id)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no hosts are named"),
        (["a.example", "--clear"], "use one of the three"),
        (["a.example", "--add", "b.example"], "use one of the three"),
        (["--add", "b.example", "--clear"], "use one of the three"),
        (["--remove", "z.example"], "'z.example' is none of the words"),
        (["good.example", "bad host"], "'bad host' is not a host name"),
        (["a.example:http"], "'a.example:http' has no valid port"),
        (["*.com"], "'*.com' would allow a whole top-level domain"),
        (["2130706433"], "'2130706433' is not a host name"),
        (["none", "a.example"], "'none' allows nothing"),
        (["open", "strict"], "'strict'"),
    ],
)
def test_bad_policies_are_refused_by_word_and_reason_and_change_nothing(
    place: Place, closed: str, arguments: list[str], expected: str
) -> None:
    assert expected in place.error("sandbox", "allow-hosts", closed, *arguments)
    assert place.json("sandbox", "get", closed)["allowed_hosts"] == ["none"]


@pytest.mark.parametrize("command", [["create"], ["run", "--tenant", "bad-words", "true"]])
def test_a_session_with_a_bad_policy_is_not_made(place: Place, command: list[str]) -> None:
    before = place.json("sandbox", "sessions")
    told = place.error("sandbox", *command, "--allowed-hosts", "good.example,b@d.example")
    assert "'b@d.example' is not a host name" in told
    assert place.json("sandbox", "sessions") == before


def test_the_standing_session_keeps_its_policy(place: Place) -> None:
    run = ["sandbox", "run", "--tenant", "policies", "--runtime", "container", "true"]
    first = place.json(*run, "--allowed-hosts", "a.example")["session_id"]
    assert place.json("sandbox", "get", first)["allowed_hosts"] == ["a.example"]
    assert place.json(*run)["session_id"] == first, "who asks for nothing takes what is there"
    assert place.json(*run, "--allowed-hosts=a.example")["session_id"] == first
    told = place.error(*run, "--allowed-hosts", "b.example")
    assert "k8e sandbox" in told
    assert first in told
    assert place.json("sandbox", "get", first)["allowed_hosts"] == ["a.example"]
    place.json("sandbox", "destroy", first)


def test_a_run_in_a_session_that_exists_cannot_ask_for_a_policy(place: Place, closed: str) -> None:
    command = ["sandbox", "run", "--allowed-hosts", "a.example", "true"]
    for told in (
        place.error(*command, "--session-id", closed),
        place.error(*command, K8E_SANDBOX_SESSION_ID=closed),
        place.error(*command, "-i", "--session-id", closed),
    ):
        assert f"k8e sandbox allow-hosts {closed} HOST" in told


def test_metrics_are_text_for_prometheus(place: Place, closed: str) -> None:
    place.cli("sandbox", "run", "--session-id", closed, "--lang", "python", CONNECT)
    done = place.cli("gateway", "metrics")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert any(line.startswith("# TYPE k8e_") for line in lines)
    counted = [line for line in lines if "denial" in line and not line.startswith("#")]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) >= 1


def test_metrics_without_a_gateway_say_so_and_start_none(new_place: NewPlace) -> None:
    place = new_place()
    assert "no gateway listens" in place.error("gateway", "metrics", code=2)
    assert not place.socket.exists()
