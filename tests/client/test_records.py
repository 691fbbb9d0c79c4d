"""Records are what frozen dataclasses are, to those who use them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import secrets
import subprocess
import sys
import traceback
from typing import Any

import pytest

from k8e import ExecResult, SandboxClient, Stdout, errors
from k8e.access import HostPolicy
from k8e.auth.keys import Created
from k8e.auth.store import Key
from k8e.client import records
from k8e.client.endpoints import Endpoint
from k8e.client.exposures import Exposed
from k8e.client.operations import Copied
from k8e.client.records import Record, field
from k8e.client.templates import Template
from k8e.skills.agents import ServerEntry


class Point(Record):
    x: int
    y: int = 2
    secret: str = field(default="s", repr=False)
    tags: list[str] = field(default_factory=list[str])


@dataclasses.dataclass(frozen=True)
class Model:
    x: int
    y: int = 2
    secret: str = dataclasses.field(default="s", repr=False)
    tags: list[str] = dataclasses.field(default_factory=list[str])


def test_a_record_is_made_shown_and_compared_as_a_dataclass_is() -> None:
    makings: list[tuple[list[Any], dict[str, Any]]] = [
        ([1], {}),
        ([], {"x": 1, "y": 3}),
        ([1, 2, "t", ["a"]], {}),
    ]
    for values, named in makings:
        ours, theirs = Point(*values, **named), Model(*values, **named)
        assert repr(ours) == repr(theirs).replace("Model", "Point")
        assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
        assert ours == Point(*values, **named)
        assert ours != Point(9)
    assert Point(1) != Model(1)
    assert Point(1).tags is not Point(1).tags


def test_wrong_arguments_are_refused_as_a_dataclass_refuses_them() -> None:
    wrong: list[tuple[list[Any], dict[str, Any]]] = [
        ([], {}),
        ([1], {"x": 1}),
        ([1], {"z": 1}),
        ([1, 2, "", [""], 5], {}),
    ]
    for values, named in wrong:
        for kind in (Point, Model):
            with pytest.raises(TypeError):
                kind(*values, **named)


def test_a_record_does_not_change() -> None:
    point: Any = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
    assert records.replace(point, x=2) == Point(2)
    assert dataclasses.replace(point, x=2) == Point(2)
    assert hash(Stdout(b"a", 1)) == hash(Stdout(b"a", 1))
    with pytest.raises(TypeError):
        hash(point)  # which holds a list


def test_what_counts_can_change() -> None:
    copied = Copied()
    copied.files += 1
    assert copied == Copied(files=1)
    with pytest.raises(TypeError):
        hash(copied)


def test_records_match_and_travel() -> None:
    match Stdout(b"text", 7):
        case Stdout(data, seq=seq):
            assert (data, seq) == (b"text", 7)
    point = Point(1, tags=["a"])
    for again in (copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert again == point
        assert type(again) is Point


def test_dataclasses_know_the_fields_of_results() -> None:
    assert dataclasses.is_dataclass(ExecResult)
    assert [item.name for item in dataclasses.fields(ExecResult)][:3] == [
        "stdout_bytes",
        "stderr_bytes",
        "exit_code",
    ]


def test_the_client_is_imported_without_what_takes_long() -> None:
    code = (
        "import sys, k8e; k8e.SandboxClient; print([n for n in sys.argv[1:] if n in sys.modules])"
    )
    slow = ["asyncio", "dataclasses", "grpc", "inspect", "json.tool", "yaml"]
    found = subprocess.run(
        [sys.executable, "-c", code, *slow], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == "[]\n"


def result(stdout: bytes = b"", stderr: bytes = b"") -> ExecResult:
    return ExecResult(stdout, stderr, 3, "sess-1", 5, False, "completed", "e1")


def test_a_result_shows_its_output() -> None:
    shown = repr(result(b"hello\n", b"oh\xff"))
    assert shown.startswith("ExecResult(stdout='hello\\n', stderr='oh\ufffd', exit_code=3")
    assert "sess-1" in shown


def test_much_output_is_shown_shortened_with_its_beginning_and_end() -> None:
    done = result(b"first " + b"x" * (1 << 20) + b" last")
    shown = repr(done)
    assert len(shown) < 1000
    assert "stdout='first xxx" in shown
    assert f"...{(1 << 20) + 11 - 300} more..." in shown
    assert " last'" in shown
    assert len(repr(Stdout(b"y" * (1 << 20), 0))) < 500


def test_no_repr_has_a_token_in_it() -> None:
    token = secrets.token_hex(16)
    url = f"http://127.0.0.1:4000/?token={token}"
    exposed = Exposed(url, 80, "127.0.0.1", 1.0, "sess-1", token)
    key = Key(1, "k", frozenset(), 0.0, 0.0)
    shown = [
        exposed,
        [exposed],
        {"a": exposed},
        Endpoint(target="host:1", api_key=token),
        Template("t", "api", env={"KEY": token}),
        Created(key, token),
        ServerEntry(url="http://127.0.0.1:1/mcp", token=token),
        HostPolicy.of(token, "127.0.0.1"),
        SandboxClient("127.0.0.1:1", api_key=token),
    ]
    for item in shown:
        assert token not in repr(item), type(item)
    assert "http://127.0.0.1:4000/" in repr(exposed)
    assert dataclasses.asdict(exposed)["token"] == token


def test_a_traceback_shows_the_hint_and_the_text_of_an_error_does_not() -> None:
    error = errors.SessionNotFound("session x not found", hint="list them")
    assert str(error) == "session x not found"
    assert traceback.format_exception_only(error)[-1] == "hint: list them\n"
    error.hint = "look for them"
    error.add_note("seen on a Monday")
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        lines = "".join(traceback.format_exception_only(one)).splitlines()
        assert lines[1:] == ["hint: look for them", "seen on a Monday"]
    assert not hasattr(errors.K8eError("without"), "__notes__")
    told = errors.from_wire({"code": "denied", "message": "no", "hint": "ask"})
    assert traceback.format_exception_only(told)[-1] == "hint: ask\n"
