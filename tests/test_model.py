"""The domain's own checks: ids, limits, environments, and what untrusted data may become."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e import errors, model

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy hosts

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "tenant",
        "runtime",
        "session_id",
        "request_id",
        "env",
        "labels",
        "limits",
        "lifetime",
        "idle_timeout",
    ]
)


def test_ids_are_random_dns_labels_of_one_length() -> None:
    ids = {model.new_id("sess") for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(name) for name in ids} == {25}
    for name in ids:
        assert model.check_id(name, "id") == name


@pytest.mark.parametrize("name", ["a", "a-b", "0", "x" * 50, "sess-abc234"])
def test_a_dns_label_is_a_valid_id(name: str) -> None:
    assert model.check_id(name, "session id") == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a_b", "a.b", "a/b", "../etc", "x" * 51, "ä", "a b", "a\n", "a\0"]
)
def test_anything_else_is_refused_with_advice(name: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="session id") as caught:
        model.check_id(name, "session id")
    assert "lowercase" in caught.value.hint


@pytest.mark.parametrize(
    "limits",
    [
        {"cpus": 0.0},
        {"cpus": math.nan},
        {"cpus": math.inf},
        {"memory": 1},
        {"memory": 1 << 50},
        {"pids": 0},
        {"disk": 1},
        {"disk": -1},
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(limits: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"limit {next(iter(limits))} must be"):
        model.Limits(**limits)


@pytest.mark.parametrize("value", [math.nan, -1.0, -math.inf])
@pytest.mark.parametrize("field", ["lifetime", "idle_timeout"])
def test_a_time_that_is_no_time_is_refused(field: str, value: float) -> None:
    with pytest.raises(errors.InvalidRequest, match="negative"):
        model.SessionSpec.from_json({field: value})


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        ({"": "x"}, errors.InvalidRequest),
        ({"A=B": "x"}, errors.InvalidRequest),
        ({"A": "x\0y"}, errors.InvalidRequest),
        ({"A\0": "x"}, errors.InvalidRequest),
        ({f"K{n}": "" for n in range(65)}, errors.InvalidRequest),
        ({"A": "x" * 40_000}, errors.InvalidRequest),
    ],
)
def test_an_environment_that_no_program_could_have_is_refused(
    env: dict[str, str], kind: type[errors.K8eError]
) -> None:
    with pytest.raises(kind):
        model.SessionSpec(env=env)


def test_a_spec_survives_being_written_down() -> None:
    spec = model.SessionSpec(
        tenant="team",
        runtime="gvisor",
        session_id="mine",
        request_id="once",
        env={"A": "ü\udcff"},
        labels={"x": "y"},
        limits=model.Limits(cpus=0.5, memory=64 * model.MIB, pids=10, disk=8 * model.MIB),
        lifetime=60,
        idle_timeout=30,
    )
    assert model.SessionSpec.from_json(spec.to_json(), stored=True) == spec


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"colour": "red"}, "unknown session field 'colour'"),
        ({"limits": {"gpus": 1}}, "unknown limit 'gpus'"),
        ({"limits": ["memory"]}, "malformed"),
        ({"limits": {"memory": "lots"}}, "malformed"),
        ({"limits": {"memory": math.inf}}, "malformed"),
        ({"env": 5}, "malformed"),
        ({"lifetime": "soon"}, "malformed"),
        ({"lifetime": math.nan}, "negative"),
    ],
)
def test_malformed_data_is_refused_with_the_reason(data: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=said):
        model.SessionSpec.from_json(data)


@patient
@given(st.dictionaries(FIELDS, ANYTHING, max_size=4))
def test_untrusted_data_becomes_a_spec_or_an_error_of_ours(data: dict[str, Any]) -> None:
    try:
        spec = model.SessionSpec.from_json(data)
    except errors.K8eError as error:
        assert error.message  # noqa: PT017 - either outcome is fine
    else:
        assert model.SessionSpec.from_json(spec.to_json(), stored=True) == spec


def test_an_error_crosses_the_wire_as_its_own_class() -> None:
    for error in (errors.Conflict("a", hint="b"), errors.SandboxDied("c")):
        again = errors.from_wire(dict(error.to_wire()))
        assert type(again) is type(error)
        assert str(again) == str(error)
    assert isinstance(errors.from_wire({"code": "ENOENT", "message": "x"}), FileNotFoundError)
    assert isinstance(errors.from_wire({"code": "EISDIR", "message": "x"}), IsADirectoryError)


@pytest.mark.parametrize("code", ["errorcode", "__name__", "os", "ENOSUCH", "", "X" * 1000])
def test_a_peer_chooses_a_code_and_never_a_class(code: str) -> None:
    found = errors.from_wire({"code": code, "message": "m"})
    assert type(found) is errors.K8eError
