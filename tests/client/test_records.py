"""Records are what frozen dataclasses are, to those who use them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest

from k8e import ExecResult, Stdout
from k8e.client import records
from k8e.client.records import Record, field
from k8e.client.scripts import Copied


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
