"""The templates of a gateway: from files and by API, noticed when they change, kept over restarts.

No sandbox is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.model import MIB, Limits, Rootfs
from k8e.sessions.service import Sessions
from k8e.sessions.templates import Templates
from tests.sessions.fakes import ME, OTHER, World


class Files:
    """The folder of a world's templates."""

    def __init__(self, world: World) -> None:
        self.folder = world.settings.template_dir
        self.folder.mkdir()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path


@pytest.fixture
def files(world: World) -> Files:
    return Files(world)


def sources(templates: Templates) -> dict[str, str]:
    return {item.name: item.source for item in templates.listing()}


def heard(templates: Templates) -> list[str]:
    names: list[str] = []
    templates.on_change.append(names.append)
    return names


# Files.


async def test_without_anything_there_is_the_default_template(sessions: Sessions) -> None:
    assert sources(sessions.templates) == {"default": "built-in"}
    assert (await sessions.templates.find()).rootfs == Rootfs()
    with pytest.raises(errors.TemplateNotFound, match="'nothing' not found"):
        await sessions.templates.find("nothing")


async def test_files_are_read_at_the_start_and_again_when_they_change(
    world: World, files: Files
) -> None:
    files.write("a.yaml", "limits: {pids: 10}")
    files.write("b.toml", "limits = { pids = 20 }")
    files.write("notes.txt", "nothing for us")
    files.write(".hidden.yaml", "limits: {pids: 10}")
    async with world.running() as sessions:
        templates = sessions.templates
        names = heard(templates)
        assert sources(templates) == {"a": "file", "b": "file", "default": "built-in"}
        assert [templates.get(name).limits["pids"] for name in "ab"] == [10, 20]

        path = files.write("a.yaml", "limits: {pids: 30}")
        assert (await templates.find("a")).limits["pids"] == 30
        files.write("c.yml", "{}")
        (files.folder / "b.toml").unlink()
        await templates.refresh()
        assert sources(templates) == {"a": "file", "c": "file", "default": "built-in"}
        assert names == ["a", "b", "c"]

        os.utime(path)  # it is read again, and says the same
        await templates.refresh()
        assert names == ["a", "b", "c"]


async def test_an_untouched_folder_is_not_read_again(
    world: World, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("a.yaml", "{}")
    async with world.running() as sessions:

        def fail(*_: object) -> None:
            raise AssertionError("nothing has changed")

        monkeypatch.setattr("k8e.sessions.templates.read_template", fail)
        for _ in range(3):
            await sessions.templates.find("a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits: {memory: 12Q}", "bad.yaml: limits.memory is refused"),
        ("limits: [", "bad.yaml: it is not YAML"),
        ("runtime: vmware", "bad.yaml: unknown runtime 'vmware'"),
        ("allowed_hosts: ['not a host']", "bad.yaml: "),
        ("lifetime: 999999999", "bad.yaml: its lifetime of 1e+09 s is above the limit"),
        ("name: good", "bad.yaml: name is 'good', and the file's name says 'bad'"),
    ],
)
async def test_a_broken_file_is_told_and_breaks_no_other(
    world: World, files: Files, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    files.write("bad.yaml", text)
    files.write("good.yaml", "{}")
    with caplog.at_level(logging.WARNING):
        async with world.running() as sessions:
            assert sessions.templates.get("good")
            with pytest.raises(errors.InvalidRequest, match="template 'bad' cannot be used") as no:
                await sessions.templates.specify({"template": "bad"})
            assert said in no.value.message
            assert said in sessions.templates.entry("bad").error
            files.write("bad.yaml", "description: mended")
            assert (await sessions.templates.find("bad")).description == "mended"
    assert caplog.text.count("template bad cannot be used") == 1


async def test_a_broken_default_is_never_replaced_by_a_weaker_one(
    world: World, files: Files
) -> None:
    files.write("default.yaml", "allowed_hosts: none")
    async with world.running() as sessions:
        with pytest.raises(errors.InvalidRequest, match="'default' cannot be used"):
            await sessions.standing(ME, {"tenant": "t"})
        files.write("default.yaml", "limits: {pids: 12}")
        assert (await sessions.standing(ME, {"tenant": "t"})).spec.limits.pids == 12


async def test_two_files_of_one_name_are_refused_until_one_goes(world: World, files: Files) -> None:
    files.write("a.yaml", "{}")
    files.write("a.toml", "")
    async with world.running() as sessions:
        with pytest.raises(errors.InvalidRequest, match=r"a\.toml and a\.yaml have the same name"):
            await sessions.templates.find("a")
        (files.folder / "a.toml").unlink()
        assert await sessions.templates.find("a")


@pytest.mark.parametrize("mode", [0o622, 0o666, 0o620])
async def test_a_file_that_others_can_write_to_is_not_used(
    world: World, files: Files, mode: int
) -> None:
    path = files.write("a.yaml", "rootfs: dir:/srv")
    path.chmod(mode)
    async with world.running() as sessions:
        with pytest.raises(errors.InvalidRequest, match="others can write to it"):
            await sessions.templates.find("a")
        path.chmod(0o644)
        assert (await sessions.templates.find("a")).rootfs == Rootfs("dir", "/srv")


async def test_what_is_no_file_makes_nobody_wait(world: World, files: Files) -> None:
    os.mkfifo(files.folder / "pipe.yaml")
    (files.folder / "folder.yaml").mkdir()
    (files.folder / "nowhere.yaml").symlink_to("/nowhere/at/all")
    (files.folder / "link.yaml").symlink_to(files.write("real.yaml", "description: linked"))
    async with world.running() as sessions:
        errors_ = {item.name: item.error for item in sessions.templates.listing()}
        assert "not a file" in errors_["pipe"]
        assert "not a file" in errors_["folder"]
        assert "cannot be read" in errors_["nowhere"]
        assert sessions.templates.get("link").description == "linked"


async def test_a_folder_that_cannot_be_read_lets_what_was_read_go_on(
    world: World, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("a.yaml", "{}")

    def fail(_: Path) -> Any:
        raise PermissionError(13, "not for us")

    async with world.running() as sessions:
        with monkeypatch.context() as patch:
            patch.setattr("k8e.sessions.templates.scan_templates", fail)
            assert await sessions.templates.find("a")
    monkeypatch.setattr("k8e.sessions.templates.scan_templates", fail)
    with pytest.raises(errors.InvalidRequest, match="cannot be read: not for us"):
        async with world.running():
            pass


async def test_another_folder_can_be_named(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "a.yaml").write_text("{}")
    (folder / "a.yaml").chmod(0o600)
    async with World(tmp_path, templates=str(folder)).running() as sessions:
        assert sources(sessions.templates)["a"] == "file"


# By API.


async def test_what_is_applied_is_there_at_once_and_after_a_restart(world: World) -> None:
    recipe: dict[str, Any] = {"name": "a", "limits": {"memory": "64M"}, "allowed_hosts": []}
    async with world.running() as sessions:
        names = heard(sessions.templates)
        applied = await sessions.templates.apply(recipe, "me")
        assert (applied.source, names) == ("api", ["a"])
        await sessions.templates.apply(recipe, "me")
        assert names == ["a"], "nothing has changed"
        await sessions.templates.apply({"name": "default", "env": {"A": "1"}}, "me")
        assert sessions.templates.get().env == {"A": "1"}
    async with world.running() as sessions:
        assert sources(sessions.templates) == {"a": "api", "default": "api"}
        assert sessions.templates.get("a").limits == {"memory": 64 * MIB}
        assert sessions.templates.get("a").allowed_hosts == ()
        await sessions.templates.delete("a", "me")
        await sessions.templates.delete("default", "me")
        assert sources(sessions.templates) == {"default": "built-in"}
    async with world.running() as sessions:
        assert sources(sessions.templates) == {"default": "built-in"}


@pytest.mark.parametrize("recipe", [None, [], {}, {"name": "A"}, {"name": "a", "x": 1}, "a"])
async def test_what_is_no_template_is_not_kept(sessions: Sessions, recipe: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="the template"):
        await sessions.templates.apply(recipe, "me")
    assert sources(sessions.templates) == {"default": "built-in"}


async def test_an_image_that_nobody_could_find_is_refused_when_it_is_applied(
    sessions: Sessions,
) -> None:
    for rootfs, said in (("image:tools:1", "in which registry"), ("image:r.example/A", "a name")):
        with pytest.raises(errors.InvalidRequest, match=said):
            await sessions.templates.apply({"name": "a", "rootfs": rootfs}, "me")
    assert sources(sessions.templates) == {"default": "built-in"}


async def test_a_file_wins_and_is_not_changed_by_api(world: World, files: Files) -> None:
    async with world.running() as sessions:
        templates = sessions.templates
        await templates.apply({"name": "a", "description": "applied"}, "me")
        path = files.write("a.yaml", "description: of a file")
        for change in (templates.apply({"name": "a"}, "me"), templates.delete("a", "me")):
            with pytest.raises(errors.Conflict, match=r"kept in the file a\.yaml"):
                await change
        assert templates.get("a").description == "of a file"
        path.unlink()
        assert (await templates.find("a")).description == "applied"


async def test_only_what_was_applied_can_be_deleted(sessions: Sessions) -> None:
    with pytest.raises(errors.InvalidRequest, match="built in"):
        await sessions.templates.delete("default", "me")
    with pytest.raises(errors.TemplateNotFound):
        await sessions.templates.delete("nothing", "me")


async def test_of_two_that_apply_at_once_one_wins_as_a_whole(
    world: World, sessions: Sessions
) -> None:
    recipes = [
        {"name": "a", "env": {"N": str(n)}, "labels": {"n": str(n)}, "description": str(n)}
        for n in range(20)
    ]
    await asyncio.gather(*(sessions.templates.apply(recipe, "me") for recipe in recipes))
    found = sessions.templates.get("a")
    assert found.env["N"] == found.labels["n"] == found.description
    again = Templates(Path("/nowhere"), world.settings.data_dir / "templates.db", lambda _: None)
    await again.start()
    assert again.get("a") == found
    again.close()


async def test_there_is_a_limit_to_what_is_applied(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.sessions.templates.MAX_APPLIED", 1)
    await sessions.templates.apply({"name": "a"}, "me")
    await sessions.templates.apply({"name": "a", "description": "again"}, "me")
    with pytest.raises(errors.LimitExceeded, match="1 templates"):
        await sessions.templates.apply({"name": "b"}, "me")


# Sessions.


async def test_a_session_keeps_what_it_was_made_of_whatever_becomes_of_the_template(
    world: World,
) -> None:
    recipe: dict[str, Any] = {
        "name": "a",
        "rootfs": "image:r.example/x:1",
        "limits": {"pids": 10},
        "warm": {"node": []},
    }
    async with world.running() as sessions:
        await sessions.templates.apply(recipe, "me")
        spec = await sessions.templates.specify({"template": "a"})
        made = await sessions.create(ME, spec)
        assert world.runtime.specs[-1].rootfs == Rootfs("image", "r.example/x:1")
        await sessions.templates.delete("a", "me")
        child = await sessions.run_subagent(ME, made.session_id)
        assert child.spec.template == "a"
        assert world.runtime.specs[-1].rootfs == Rootfs("image", "r.example/x:1")
        assert world.runtime.specs[-1].limits == Limits(pids=10)
        assert child.spec.warm == (("node", ()),)
        assert made.to_json()["template"] == "a"
    world.runtime.survivors = world.runtime.launched
    async with world.running() as sessions:
        assert sessions.get(ME, made.session_id).spec == made.spec


async def test_a_standing_session_must_be_of_the_template_that_is_named(
    sessions: Sessions,
) -> None:
    await sessions.templates.apply({"name": "a", "allowed_hosts": []}, "me")
    made = await sessions.standing(ME, {"tenant": "t", "template": "a"})
    assert made.spec.template == "a"
    for fields in ({"tenant": "t"}, {"tenant": "t", "template": "a"}):
        assert await sessions.standing(ME, fields) == made
    with pytest.raises(errors.Conflict, match="was made from template 'a', not from 'default'"):
        await sessions.standing(ME, {"tenant": "t", "template": "default"})
    await sessions.templates.delete("a", "me")
    assert await sessions.standing(ME, {"tenant": "t", "template": "a"}) == made
    other = await sessions.standing(OTHER, {"tenant": "t"})
    assert other.to_json()["template"] == "default"


async def test_of_two_that_want_different_templates_at_once_one_is_told(
    sessions: Sessions,
) -> None:
    await sessions.templates.apply({"name": "a"}, "me")
    wanted = ({"tenant": "t", "template": name} for name in ("a", "default"))
    made = await asyncio.gather(
        *(sessions.standing(ME, fields) for fields in wanted), return_exceptions=True
    )
    assert sorted(type(item).__name__ for item in made) == ["Conflict", "Session"]


async def test_a_repeated_request_is_the_same_only_with_the_same_template(
    sessions: Sessions,
) -> None:
    await sessions.templates.apply({"name": "a"}, "me")
    asked = {"request_id": "once", "template": "a"}
    specs = [await sessions.templates.specify(asked) for _ in range(2)]
    first, second = [await sessions.create(ME, spec) for spec in specs]
    assert first == second
    other = await sessions.templates.specify({"request_id": "once"})
    with pytest.raises(errors.Conflict, match="different session"):
        await sessions.create(ME, other)
