"""Which runtime a session gets, and what a probe is remembered for."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from k8e import errors, settings
from k8e.runtimes.base import Feature, Support
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


@pytest.mark.parametrize("asked", ["kata", "firecracker", "microvm", "kubernetes"])
async def test_a_runtime_of_a_later_release_says_so(
    host: Host, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    runtimes, _ = make(host, monkeypatch, gvisor=True, container=True)
    with pytest.raises(errors.RuntimeUnusable, match="not part of this release"):
        await runtimes.choose(asked)


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
    assert probes.asked == ["gvisor", "container"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', '{"key": "x", "support": [{}]}'])
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
