"""What templates say, how it is read, and how it becomes a session's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e import errors, templates
from k8e.model import MIB, Limits, Rootfs, SessionSpec
from k8e.templates import BUILT_IN, Template

patient = settings(  # busy hosts
    deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
FULL = b"""
description: Python for data
runtime: gvisor
rootfs: image:registry.example/data:1
limits: {cpus: 0.5, memory: 512M, pids: 100, disk: 2G}
env: {TZ: UTC, EMPTY: ""}
labels: {team: data}
allowed_hosts: [default, "api.example:443"]
lifetime: 3600
idle_timeout: 600
warm:
  node: []
  python: [numpy, os.path]
pool: {min: 1, max: 8}
"""
SAME_IN_TOML = b"""
description = "Python for data"
runtime = "gvisor"
rootfs = "image:registry.example/data:1"
allowed_hosts = ["default", "api.example:443"]
lifetime = 3600
idle_timeout = 600.0
limits = { cpus = 0.5, memory = "512M", pids = 100, disk = "2G" }
env = { TZ = "UTC", EMPTY = "" }
labels = { team = "data" }
pool = { min = 1, max = 8 }
[warm]
python = ["numpy", "os.path"]
node = []
"""


def parse(data: Any, name: str = "data") -> Template:
    return templates.parse(data, name, f"{name}.yaml")


def of_text(text: bytes, file: str = "data.yaml") -> Template:
    return templates.parse(templates.load(text, file), "data", file)


# Reading.


def test_a_file_says_all_there_is_to_say_in_yaml_and_in_toml() -> None:
    found = of_text(FULL)
    assert found == Template(
        name="data",
        description="Python for data",
        runtime="gvisor",
        rootfs=Rootfs("image", "registry.example/data:1"),
        limits={"cpus": 0.5, "memory": 512 * MIB, "pids": 100, "disk": 2048 * MIB},
        env={"TZ": "UTC", "EMPTY": ""},
        labels={"team": "data"},
        allowed_hosts=("default", "api.example:443"),
        lifetime=3600,
        idle_timeout=600,
        warm=(
            ("python", ("numpy", "os.path")),
            ("node", ()),
        ),
        pool_min=1,
        pool_max=8,
    )
    assert of_text(SAME_IN_TOML, "data.toml") == found


def test_what_a_template_does_not_say_is_left_open() -> None:
    found = parse({})
    assert found == Template("data")
    assert found.allowed_hosts is None
    assert found.full_limits == Limits()
    assert dict(found.warm) == {"python": ()}
    assert parse({"allowed_hosts": [], "warm": {}, "limits": None}) == Template(
        "data", allowed_hosts=(), warm=()
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "data.yaml: a template is a mapping; known keys are name, description"),
        (None, "a template is a mapping"),
        ({"image": "x"}, "data.yaml: image is no key"),
        ({5: "x"}, "5 is no key"),
        ({"name": "other"}, "name is 'other', and the file's name says 'data'"),
        ({"description": 5}, "description must be text, not a number"),
        ({"description": "x" * 2000}, "description is longer than 1000"),
        ({"rootfs": "docker"}, "rootfs is 'docker'; known are host, dir:/PATH, tar:/PATH or image"),
        ({"rootfs": "dir:relative"}, "no absolute path: write dir:/PATH"),
        ({"rootfs": "dir:/"}, "all of this machine: write host"),
        ({"rootfs": "dir://../.."}, "all of this machine"),
        ({"rootfs": "tar:"}, "no absolute path: write tar:/PATH"),
        ({"rootfs": "image:"}, "names no image"),
        ({"rootfs": "image:a b"}, "names no image"),
        ({"rootfs": "host:/etc"}, "rootfs is 'host:/etc'"),
        ({"rootfs": ["host"]}, "rootfs must be text, not a list"),
        ({"limits": {"gpus": 1}}, "limits.gpus is no key"),
        ({"limits": {"memory": "lots"}}, "limits.memory is refused"),
        ({"limits": {"memory": 1}}, "limits.memory is refused: limit memory must be 32 MiB"),
        ({"limits": {"memory": 0}}, "limits.memory is refused"),
        ({"limits": {"memory": True}}, "limits.memory must be a number, not yes or no"),
        ({"limits": {"cpus": math.nan}}, "limits.cpus is refused"),
        ({"limits": {"pids": math.inf}}, "limits.pids is inf"),
        ({"limits": []}, "limits must be a mapping, not a list"),
        ({"env": {"PORT": 8080}}, "env.PORT must be text, not a number"),
        ({"env": {"A=B": "x"}}, "env is refused"),
        ({"env": {"A": "\udcff"}}, "env.A is not UTF-8"),
        ({"env": {1: "x"}}, "env must be a mapping"),
        ({"labels": {str(n): "" for n in range(65)}}, "labels are more than 64"),
        ({"allowed_hosts": "default"}, "allowed_hosts must be a list, not a text"),
        ({"allowed_hosts": [1]}, "allowed_hosts must be text"),
        ({"allowed_hosts": ["a.example"] * 257}, "more than 256"),
        ({"lifetime": "1h"}, "lifetime must be a number of seconds, not a text"),
        ({"lifetime": 0}, "lifetime is 0"),
        ({"lifetime": math.inf}, "lifetime is inf"),
        ({"idle_timeout": -1}, "idle_timeout is -1"),
        ({"warm": ["python"]}, "warm must be a mapping, not a list"),
        ({"warm": {"cobol": []}}, "warm.cobol is no key"),
        ({"warm": {"python": ["os; print(1)"]}}, "not the name of a module"),
        ({"warm": {"python": ["-c"]}}, "not the name of a module"),
        ({"warm": {"node": ["fs"]}}, "warm.node must be []: modules are loaded ahead only for py"),
        ({"warm": {"bash": []}}, "warm.bash is refused: no bash is kept waiting"),
        ({"warm": {"python": ["m"] * 65}}, "more than 64"),
        ({"pool": {"min": -1}}, "pool.min must be a number from 0"),
        ({"pool": {"max": 1.5}}, "pool.max must be a number"),
        ({"pool": {"size": 1}}, "pool.size is no key"),
        ({"pool": {"min": 3, "max": 2}}, "min that is above its max"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_key(data: Any, said: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse(data)
    assert said in caught.value.message
    assert caught.value.message.startswith("data.yaml: ")
    assert caught.value.hint


@pytest.mark.parametrize("name", ["", "Data", "a_b", "-a", "a" * 51, "a/b", ".."])
def test_a_name_must_fit_a_host_and_a_file(name: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="not a valid name"):
        templates.parse({}, name)


@pytest.mark.parametrize(
    ("text", "file", "said"),
    [
        (b"a: [", "data.yaml", "data.yaml: it is not YAML"),
        (b"!!python/object/apply:os.getcwd []", "data.yaml", "not YAML"),
        (b"limits: {}\nenv: {}\nlimits: {}", "data.yaml", "'limits' is there twice, line 3"),
        (b"env: {A: x, A: y}", "data.yaml", "'A' is there twice"),
        (b"\xff\xfe\x00", "data.yaml", "not YAML"),
        (b"[" * 1200, "data.yaml", "not YAML"),
        (b"a = ", "data.toml", "data.toml: it is not TOML"),
        (b"\xff", "data.toml", "not TOML"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: bytes, file: str, said: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        templates.load(text, file)
    assert said in caught.value.message


@pytest.mark.parametrize(
    "text", [b"? [a]\n: 1", b"{}: 1", b"env: {[a]: b}", b'lifetime: !!int ""', b"!!timestamp x"]
)
def test_yaml_that_python_cannot_hold_is_an_error_like_any_other(text: bytes) -> None:
    with pytest.raises(errors.InvalidRequest):
        templates.parse(templates.load(text, "data.yaml"), "data")


@pytest.mark.parametrize("seconds", [10**400, float("nan"), float("inf"), -1, 0])
def test_a_lifetime_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(errors.InvalidRequest, match="lifetime"):
        templates.parse({"lifetime": seconds}, "data")


def test_a_file_is_no_larger_than_anybody_needs() -> None:
    with pytest.raises(errors.LimitExceeded, match="longer than"):
        templates.load(b"#" * (templates.MAX_FILE + 1), "data.yaml")


def test_a_file_of_aliases_costs_no_more_than_its_bytes() -> None:
    layers = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30)]
    text = "\n".join(["l0: &l0 [x]", *layers]).encode()
    with pytest.raises(errors.InvalidRequest, match="l0 is no key"):
        of_text(text)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    "name description runtime rootfs limits env labels allowed_hosts lifetime idle_timeout warm "
    "pool other".split()
)


@patient
@given(st.dictionaries(KEYS, ANYTHING, max_size=4) | ANYTHING)
def test_untrusted_data_becomes_a_template_that_survives_being_written_down_or_an_error(
    data: Any,
) -> None:
    try:
        found = parse(data)
    except errors.K8eError as error:
        assert error.message  # noqa: PT017 - either outcome is fine
    else:
        assert parse(found.to_json()) == found
        assert len(found.digest) == 16


# What a ready sandbox is made of.


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        ({"rootfs": Rootfs("image", "a:2")}, True),
        ({"limits": {"memory": 64 * MIB}}, True),
        ({"runtime": "container"}, True),
        ({"warm": ()}, True),
        ({"warm": (("python", ("json",)),)}, True),
        ({"limits": {"memory": Limits().memory}}, False),
        ({"env": {"A": "1"}}, False),
        ({"allowed_hosts": ()}, False),
        ({"description": "other"}, False),
        ({"lifetime": 5.0}, False),
        ({"pool_max": 5}, False),
        ({"name": "other"}, False),
    ],
)
def test_the_digest_changes_with_what_a_ready_sandbox_is_made_of(
    change: dict[str, Any], changes: bool
) -> None:
    assert (replace(BUILT_IN, **change).digest != BUILT_IN.digest) is changes


# Filling.

RECIPE = of_text(FULL)


def test_a_session_that_says_nothing_gets_what_its_template_says() -> None:
    spec = templates.specify(RECIPE, {"tenant": "t"})
    assert spec == SessionSpec(
        tenant="t",
        runtime="gvisor",
        env=dict(RECIPE.env),
        labels=dict(RECIPE.labels),
        limits=RECIPE.full_limits,
        lifetime=3600,
        idle_timeout=600,
        allowed_hosts=("default", "api.example:443"),
        template="data",
        rootfs=RECIPE.rootfs,
        warm=RECIPE.warm,
    )
    assert SessionSpec.from_json(spec.to_json(), stored=True) == spec


def test_what_a_client_says_wins_key_by_key() -> None:
    asked = {
        "runtime": "container",
        "limits": {"memory": 64 * MIB, "pids": 0, "cpus": None},
        "env": {"TZ": "CET", "EMPTY": "", "MORE": "1"},
        "labels": {"team": "web"},
        "lifetime": 5,
        "idle_timeout": 0,
    }
    spec = templates.specify(RECIPE, asked)
    assert spec.runtime == "container"
    assert spec.limits == Limits(cpus=0.5, memory=64 * MIB, pids=100, disk=2048 * MIB)
    assert spec.env == {"TZ": "CET", "EMPTY": "", "MORE": "1"}
    assert spec.labels == {"team": "web"}
    assert (spec.lifetime, spec.idle_timeout) == (5, 600)


@pytest.mark.parametrize(
    ("asked", "filled"),
    [(None, ("default", "api.example:443")), ([], ()), (["a.example"], ("a.example",))],
)
def test_hosts_are_the_clients_or_the_templates_and_never_both(
    asked: list[str] | None, filled: tuple[str, ...]
) -> None:
    assert templates.specify(RECIPE, {"allowed_hosts": asked}).allowed_hosts == filled


@pytest.mark.parametrize("key", ["rootfs", "warm"])
def test_a_client_cannot_choose_a_path_of_the_host(key: str) -> None:
    asked = {key: {"kind": "dir", "source": "/etc"}}
    with pytest.raises(errors.InvalidRequest, match=f"unknown session field '{key}'"):
        templates.specify(BUILT_IN, asked)
    with pytest.raises(errors.InvalidRequest, match=f"unknown session field '{key}'"):
        SessionSpec.from_json(asked)


@pytest.mark.parametrize("key", ["env", "labels", "limits"])
def test_malformed_parts_of_a_request_are_refused(key: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="malformed"):
        templates.specify(RECIPE, {key: ["x"]})


@patient
@given(st.dictionaries(st.sampled_from(sorted(SessionSpec().to_json())), ANYTHING, max_size=4))
def test_a_client_never_changes_what_only_templates_decide(asked: dict[str, Any]) -> None:
    try:
        spec = templates.specify(RECIPE, asked)
    except errors.K8eError as error:
        assert error.message  # noqa: PT017 - either outcome is fine
    else:
        assert (spec.template, spec.rootfs, spec.warm) == ("data", RECIPE.rootfs, RECIPE.warm)
