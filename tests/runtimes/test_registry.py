"""Which runtime a session gets, and what a probe is remembered for."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path

import pytest

from k8e import errors, settings
from k8e.runtimes import gvisor, registry
from k8e.runtimes.base import Feature, Support
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes


class Probes:
    """Stands in for the real probes: says what a test wants, and counts."""

    def __init__(self, **usable: bool) -> None:
        self.usable = usable
        self.asked: list[str] = []

    def put_into(self, runtimes: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, runtime in runtimes.all.items():
            monkeypatch.setattr(runtime, "probe", lambda name=name: self.answer(name))

    async def answer(self, name: str) -> Support:
        self.asked.append(name)
        fine = self.usable[name]
        features = [Feature("memory limit", usable=True, detail="cgroup v1")]
        detail = "" if fine else f"{name} is broken here"
        return Support(name, fine, detail, "" if fine else f"mend {name}", features)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    for name in ("runsc", "runc"):
        tool = tmp_path / "home/bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.touch(mode=0o755)
    folders = {"K8E_DATA_DIR": tmp_path, "K8E_RUN_DIR": tmp_path, "K8E_HOME": tmp_path / "home"}
    return Host(settings.load({key: str(value) for key, value in folders.items()}))


def make(host: Host, monkeypatch: pytest.MonkeyPatch, **usable: bool) -> tuple[Runtimes, Probes]:
    runtimes, probes = Runtimes(host), Probes(**usable)
    probes.put_into(runtimes, monkeypatch)
    return runtimes, probes


async def test_gvisor_is_the_default_and_the_other_is_not_even_tried(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, probes = make(host, monkeypatch, gvisor=True, container=True)
    assert (await runtimes.choose("")).name == "gvisor"
    assert probes.asked == ["gvisor"]
    assert runtimes.warning() == ""


async def test_without_gvisor_the_container_runtime_is_used_with_a_warning(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=False, container=True)
    with caplog.at_level(logging.WARNING):
        assert (await runtimes.choose("")).name == "container"
    assert "gvisor is broken here" in caplog.text
    assert "kernel exploit" in runtimes.warning()


@pytest.mark.parametrize("asked", ["gvisor", "runsc"])
async def test_a_runtime_asked_for_by_name_never_falls_back(
    host: Host, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=False, container=True)
    with pytest.raises(errors.RuntimeUnusable, match="gvisor is broken here") as caught:
        await runtimes.choose(asked)
    assert caught.value.hint == "mend gvisor"


async def test_a_runtime_from_the_settings_never_falls_back_either(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=False, container=True)
    with pytest.raises(errors.RuntimeUnusable):
        await runtimes.choose("", "gvisor")
    assert (await runtimes.choose("container", "gvisor")).name == "container"


async def test_with_no_usable_runtime_the_error_explains_both(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=False, container=False)
    with pytest.raises(errors.RuntimeUnusable, match=r"gvisor is broken.*container is broken"):
        await runtimes.choose("")


@pytest.mark.parametrize("asked", ["docker", "GVISOR", "../x", " "])
async def test_an_unknown_runtime_is_refused_with_the_known_ones(
    host: Host, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    runtimes, probes = make(host, monkeypatch, gvisor=True, container=True)
    with pytest.raises(errors.InvalidRequest, match="unknown runtime") as caught:
        await runtimes.choose(asked)
    assert "gvisor and container" in caught.value.hint
    assert probes.asked == []


@pytest.mark.parametrize("asked", ["kata", "firecracker", "microvm"])
async def test_a_runtime_of_a_later_release_says_so(
    host: Host, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    with pytest.raises(errors.RuntimeUnusable, match="not part of this release"):
        await runtimes.choose(asked)


async def test_a_gateway_without_a_cluster_says_how_it_gets_one(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    with pytest.raises(errors.RuntimeUnusable, match="knows no cluster") as caught:
        await runtimes.choose("kubernetes")
    assert "K8E_KUBECONFIG" in caught.value.hint


async def test_a_probe_is_remembered_over_a_restart_with_its_features(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, probes = make(host, monkeypatch, gvisor=True, container=True)
    first = await runtimes.support()
    again, later = make(host, monkeypatch, gvisor=False, container=False)
    assert await again.support() == first
    assert (len(probes.asked), later.asked) == (2, [])
    assert first[0].has("memory limit")
    assert not first[0].has("disk limit")


async def test_a_runtime_that_failed_is_tried_again_by_the_next_gateway(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=False, container=True)
    await runtimes.support()
    again, later = make(host, monkeypatch, gvisor=True, container=True)
    assert [item.usable for item in await again.support()] == [True, True]
    assert later.asked == ["gvisor"]


async def test_a_fresh_probe_replaces_what_was_remembered(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, probes = make(host, monkeypatch, gvisor=False, container=True)
    await runtimes.support()
    probes.usable["gvisor"] = True
    assert [item.usable for item in await runtimes.support()] == [False, True]
    assert [item.usable for item in await runtimes.support(fresh=True)] == [True, True]


async def test_a_new_program_makes_an_old_probe_worthless(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    await runtimes.support()
    (host.settings.home / "bin/runsc").write_bytes(b"another version")
    again, probes = make(host, monkeypatch, gvisor=True, container=True)
    await again.support()
    assert probes.asked == ["gvisor"]


async def test_a_running_gateway_notices_a_program_that_was_replaced(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, probes = make(host, monkeypatch, gvisor=True, container=True)
    program = host.settings.home / "bin/runsc"
    program.write_bytes(b"one")
    before = program.stat()
    await runtimes.choose("")
    # As long as before, and as old: a package manager keeps times.
    program.write_bytes(b"two")
    os.utime(program, ns=(before.st_atime_ns, before.st_mtime_ns))
    await runtimes.choose("")
    await runtimes.choose("")
    assert probes.asked == ["gvisor", "gvisor"]


async def test_what_is_installed_later_is_used_by_the_next_session(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = host.settings.home / "bin/runsc"
    program.rename(program.with_name("elsewhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    real = GVisor(host)
    runtimes.all["gvisor"] = real
    assert (await runtimes.choose("")).name == "container"
    assert "runsc is not installed" in runtimes.warning()
    told: list[str] = []
    runtimes.on_change.append(lambda: told.append("changed"))

    async def works(*_: object) -> Support:
        return Support("gvisor", usable=True, detail="")

    monkeypatch.setattr(gvisor, "try_launch", works)
    monkeypatch.setattr(gvisor, "version_of", _text)
    program.with_name("elsewhere").rename(program)
    assert (await runtimes.choose("")) is real
    assert real.command("x")[0] == str(program)
    assert runtimes.warning() == ""
    assert told == ["changed"]


async def _text(program: str) -> str:
    return f"version of {program}"


async def test_an_old_failure_downgrades_no_session(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, probes = make(host, monkeypatch, gvisor=False, container=True)
    assert (await runtimes.choose("")).name == "container"
    assert (await runtimes.choose("")).name == "container"
    assert probes.asked == ["gvisor", "container"]  # it has only just failed
    probes.usable["gvisor"] = True
    monkeypatch.setattr(registry, "time", _Later(registry.FAILURE_SECONDS + 1))
    assert (await runtimes.choose("")).name == "gvisor"


class _Later:
    """A clock that is ahead."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._seconds


async def test_whoever_names_a_runtime_waits_for_no_probe_of_another(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    await runtimes.support()
    hangs = asyncio.Event()

    async def hang() -> Support:
        await hangs.wait()
        return Support("gvisor", usable=False, detail="it hung")

    monkeypatch.setattr(runtimes.all["gvisor"], "probe", hang)
    asked = asyncio.create_task(runtimes.support(fresh=True))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert (await runtimes.choose("container")).name == "container"
    hangs.set()
    await asked


def test_a_half_made_installation_of_a_user_hides_nothing_of_the_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, user = tmp_path / "system", tmp_path / "user"
    for name in ("runsc", "runc"):
        (system / "bin").mkdir(parents=True, exist_ok=True)
        (system / "bin" / name).touch(mode=0o755)
    (system / "tools/node_modules/tsx").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.setattr(settings, "SYSTEM_HOME", system)
    monkeypatch.setattr(settings, "_is_root", lambda: False)
    own = settings.own_home()
    folders = {"K8E_DATA_DIR": str(tmp_path), "K8E_RUN_DIR": str(tmp_path)}
    # Nothing yet, then what an install.sh leaves that was killed, then one of two programs.
    assert settings.load(folders).home == system
    (own / "bin").mkdir(parents=True)
    (own / "tools").mkdir()
    (own / "bin/runsc").symlink_to("/nowhere/runsc")
    assert settings.load(folders).home == system
    (own / "bin/runc").touch(mode=0o755)
    found = settings.load(folders)
    assert found.home == own
    host = Host(found)
    assert host.tool("runc") == str(own / "bin/runc")
    assert host.tool("runsc") == str(system / "bin/runsc")
    # Whoever names a folder means that one alone.
    named = Host(settings.load({**folders, "K8E_HOME": str(tmp_path / "named")}))
    assert named.tool("runsc") != str(system / "bin/runsc")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"keys": 1}', '{"key": "x", "support": []}', '{"keys": {}, "support": [{}]}'],
)
async def test_a_damaged_cache_is_ignored(
    host: Host, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (host.settings.data_dir / "probe.json").write_text(text)
    runtimes, probes = make(host, monkeypatch, gvisor=True, container=True)
    await runtimes.choose("")
    assert probes.asked == ["gvisor"]


async def test_a_cache_with_the_right_key_and_wrong_content_is_ignored(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    await runtimes.support()
    cache = host.settings.data_dir / "probe.json"
    data = json.loads(cache.read_text())
    data["support"] = [{"runtime": "unheard-of", "usable": True, "features": []}]
    cache.write_text(json.dumps(data))
    again, probes = make(host, monkeypatch, gvisor=True, container=True)
    await again.choose("")
    assert probes.asked == ["gvisor"]
