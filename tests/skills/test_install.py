"""Installing into agents: every other byte stays, nothing is half done, all of it can be undone."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.skills import agents, files, install, jsonc, toml
from k8e.skills.agents import AGENTS, NAME, SKILL, SupportedAgent
from k8e.skills.install import digest
from tests.skills.world import ALL, TOKEN, URL, World, golden

each = pytest.mark.parametrize("agent", ALL, ids=lambda agent: agent.name)
CLAUDE, CODEX, CURSOR = AGENTS["claude"], AGENTS["codex"], AGENTS["cursor"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def entry(world: World, agent: SupportedAgent, *, project: bool = False) -> dict[str, Any] | None:
    text = world.config(agent, project=project).read_text("utf-8")
    return (toml if agent.toml else jsonc).read(text, agent.holder, NAME)


# What is written.


@each
@pytest.mark.parametrize("kind", ["after", "url"])
def test_file_with_comments_and_odd_format_becomes_the_golden_one(
    world: World, agent: SupportedAgent, kind: str
) -> None:
    config = world.write(agent, golden(agent, "before"))
    done = world.install(agent, **(URL if kind == "url" else {}))
    assert done.action == "installed"
    wanted = golden(agent, kind).replace(b"@K8E@", str(world.command).encode())
    assert config.read_bytes() == wanted


@each
@pytest.mark.parametrize("project", [False, True])
def test_uninstalling_leaves_everything_byte_for_byte(
    world: World, agent: SupportedAgent, project: bool
) -> None:
    world.write(agent, golden(agent, "before"), project=project)
    before = world.everything()
    world.install(agent, project=project)
    assert world.everything() != before
    assert world.uninstall(agent, project=project).action == "removed"
    assert world.everything() == before
    assert not (world.home / ".k8e" / "agents").exists()


@each
@pytest.mark.parametrize("project", [False, True])
def test_where_nothing_was_nothing_is_left(
    world: World, agent: SupportedAgent, project: bool
) -> None:
    before = world.everything()
    done = world.install(agent, project=project)
    assert Path(done.config).is_file()
    for part, content in install.texts().items():
        assert Path(done.skill, part).read_bytes() == content
    world.uninstall(agent, project=project)
    assert world.everything() == before


@each
def test_second_time_changes_nothing(world: World, agent: SupportedAgent) -> None:
    world.write(agent, golden(agent, "before"))
    world.install(agent)
    before = world.everything()
    inode = world.config(agent).stat().st_ino
    assert world.install(agent).action == "unchanged"
    assert world.everything() == before
    assert world.config(agent).stat().st_ino == inode


@each
def test_dry_run_tells_the_change_without_the_token_and_does_nothing(
    world: World, agent: SupportedAgent
) -> None:
    world.write(agent, golden(agent, "before"))
    before = world.everything()
    done = world.install(agent, dry=True, **URL)
    assert done.action == "installed"
    assert "+" in done.diff
    assert NAME in done.diff
    assert TOKEN not in done.diff
    assert world.everything() == before
    assert not (world.home / ".k8e").exists()


@each
def test_from_command_to_url_and_away_leaves_the_original(
    world: World, agent: SupportedAgent
) -> None:
    config = world.write(agent, golden(agent, "before"))
    world.install(agent)
    assert world.install(agent, **URL).action == "updated"
    assert config.read_bytes() == golden(agent, "url")
    world.uninstall(agent)
    assert config.read_bytes() == golden(agent, "before")


@each
def test_what_users_add_to_the_entry_and_to_the_file_stays(
    world: World, agent: SupportedAgent
) -> None:
    config = world.write(agent, golden(agent, "before"))
    world.install(agent)
    text = config.read_bytes().decode()
    if agent.toml:
        text += "startup_timeout_sec = 20\n\n[later]\nx = 1\n"
        added = "startup_timeout_sec"
    else:
        marked = json.dumps(NAME)
        at = text.index("{", text.index(marked)) + 1
        text = text[:at] + '"timeout": 20, ' + text[at:]
        added = "timeout"
    config.write_bytes(text.encode())
    assert world.install(agent, **URL).action == "updated"
    found = entry(world, agent)
    assert found is not None
    assert found[added] == 20
    assert "command" not in found
    assert found == {
        added: 20,
        **agent.entry(agents.ServerEntry(url="http://127.0.0.1:8811/mcp", token=TOKEN)),
    }
    world.uninstall(agent)
    assert entry(world, agent) is None
    if agent.toml:
        assert config.read_bytes() == golden(agent, "before") + b"\n\n[later]\nx = 1\n"
    else:
        assert config.read_bytes() == golden(agent, "before")


def test_entry_that_was_there_before_is_put_back(world: World) -> None:
    theirs = b'{"mcpServers": {"k8e-sandbox": {"url": "http://127.0.0.1:8811/mcp", "note": 1}}}'
    config = world.write(CURSOR, theirs)
    world.install(CURSOR)
    assert entry(world, CURSOR) == {
        "note": 1,
        "command": str(world.command),
        "args": ["sandbox-mcp"],
    }
    done = world.uninstall(CURSOR)
    assert config.read_bytes() == theirs
    assert any("is back" in note for note in done.notes)


def test_without_a_receipt_the_entry_of_our_name_goes(world: World) -> None:
    config = world.write(CURSOR, b'{"mcpServers": {"a": {}}}\n')
    world.install(CURSOR)
    (world.home / ".k8e" / "agents" / "receipts.json").write_text("not json")
    assert world.uninstall(CURSOR).action == "removed"
    assert config.read_bytes() == b'{"mcpServers": {"a": {}}}\n'
    assert not Path(world.scope().home, ".cursor", "skills", SKILL).exists()


@each
def test_uninstalling_what_is_not_there_changes_nothing(
    world: World, agent: SupportedAgent
) -> None:
    world.write(agent, golden(agent, "before"))
    before = world.everything()
    assert world.uninstall(agent).action == "absent"
    assert world.everything() == before


def test_a_project_names_the_command_and_the_variable_but_no_path_and_no_token(
    world: World,
) -> None:
    for agent in ALL:
        world.install(agent, project=True)
        text = world.config(agent, project=True).read_text("utf-8")
        assert str(world.command) not in text
        world.install(agent, project=True, **URL)
        text = world.config(agent, project=True).read_text("utf-8")
        assert TOKEN not in text
        assert "K8E_SANDBOX_MCP_TOKEN" in text


# Files.


def test_mode_and_owner_are_kept(world: World) -> None:
    config = world.write(CLAUDE, b"{}")
    config.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(config, 1234, 1235)
    before = config.stat()
    world.install(CLAUDE)
    after = config.stat()
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root in the home of another user")


@pytest.fixture
def foreign() -> Generator[World]:
    """A home and a project of another user, where that user can get in; outside, root's files."""
    with tempfile.TemporaryDirectory(prefix="k8e-test-") as folder:
        Path(folder).chmod(0o755)
        world = World(Path(folder))
        for item in (world.home, world.project):
            os.chown(item, 1234, 1235)
        yield world


def plant(world: World, path: Path, target: Path) -> None:
    """A link of the home's owner, with folders of theirs around it."""
    missing = [item for item in (*reversed(path.parents),) if not item.exists()]
    for folder in missing:
        folder.mkdir()
        os.chown(folder, 1234, 1235)
    path.symlink_to(target)
    os.chown(path, 1234, 1235, follow_symlinks=False)


@needs_root
def test_root_gives_new_files_to_the_owner_of_the_home(foreign: World) -> None:
    done = foreign.install(CODEX)
    receipts = foreign.home / ".k8e" / "agents" / "receipts.json"
    for path in (
        Path(done.config),
        Path(done.config).parent,
        Path(done.skill, "SKILL.md"),
        receipts,
    ):
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)
    assert foreign.uninstall(CODEX).action == "removed"
    assert list(foreign.home.rglob("*")) == [foreign.home / ".k8e"]
    assert (os.getuid(), os.geteuid()) == (0, 0)
    assert os.access("/root", os.W_OK), "root is root again"


PLACES = (
    *(".claude", ".claude/skills", ".claude/skills/k8e-sandbox"),
    *(".claude/skills/k8e-sandbox/references", ".claude/skills/k8e-sandbox/SKILL.md"),
    *(".claude.json", ".k8e", ".k8e/agents", ".k8e/agents/backups", ".k8e/agents/receipts.json"),
)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "file", "missing"])
@pytest.mark.parametrize("place", PLACES)
def test_no_link_of_the_homes_owner_leads_root_out_of_it(
    foreign: World, place: str, kind: str
) -> None:
    outside = foreign.command.parent / "outside"
    if kind == "folder":
        outside.mkdir()
    elif kind == "file":
        outside.write_text("{}")
        outside.chmod(0o600)
    config = foreign.home / ".claude.json"
    if place != config.name:
        config.write_text('{"theirs": 1}')
        os.chown(config, 1234, 1235)
    plant(foreign, foreign.home / place, outside)
    for act in (foreign.install, foreign.uninstall):
        with contextlib.suppress(errors.K8eError, OSError):
            act(CLAUDE)
        assert outside.exists() == (kind != "missing")
        if kind == "folder":
            assert list(outside.iterdir()) == []
        elif kind == "file":
            assert (outside.read_text(), outside.stat().st_uid) == ("{}", 0)
    assert not [path for path in foreign.home.rglob("*") if path.lstat().st_uid == 0]


@needs_root
def test_receipts_of_the_homes_owner_remove_nothing_of_others(foreign: World) -> None:
    """What is in their home, they may have written: paths anywhere, with digests that fit."""
    done = foreign.install(CLAUDE)
    secret = foreign.command.parent / "secret"
    secret.write_text("of root")
    folder = foreign.command.parent / "empty"
    folder.mkdir()
    file = foreign.home / ".k8e" / "agents" / "receipts.json"
    told = json.loads(file.read_text())
    for receipt in told["receipts"].values():
        receipt["backup"] = str(secret)
        receipt["folders"] = [str(folder)]
        receipt["skill"][str(secret)] = digest(b"of root")
    file.write_text(json.dumps(told))
    with contextlib.suppress(errors.K8eError, OSError):
        foreign.uninstall(CLAUDE)
    assert secret.read_text() == "of root"
    assert folder.is_dir()
    assert done.action == "installed"


@needs_root
def test_links_that_are_swapped_while_root_works_lead_nowhere(foreign: World) -> None:
    """The owner of the home swaps a folder and a link to root's folder, as fast as can be."""
    outside = foreign.command.parent / "outside"
    outside.mkdir()
    folder = foreign.home / ".cursor"
    swapping = (
        "import os, sys\n"
        "os.setgroups([]); os.setgid(1235); os.setuid(1234)\n"
        "folder, outside = sys.argv[1:]\n"
        "os.symlink(outside, folder + '.link')\n"
        "print('on', flush=True)\n"
        "while True:\n"
        "    for step in ((folder + '.link', folder), (folder, folder + '.link')):\n"
        "        try: os.rename(*step)\n"
        "        except OSError: pass\n"
        "    try: os.rename(folder, folder + '.real')\n"
        "    except OSError: pass\n"
        "    try: os.rename(folder + '.real', folder)\n"
        "    except OSError: pass\n"
    )
    argv = ["/usr/bin/python3", "-I", "-c", swapping, str(folder), str(outside)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as racing:
        assert racing.stdout is not None
        assert racing.stdout.readline() == b"on\n"
        try:
            for _ in range(60):
                for act in (foreign.install, foreign.uninstall):
                    with contextlib.suppress(errors.K8eError, OSError):
                        act(CURSOR)
        finally:
            racing.kill()
    assert list(outside.iterdir()) == []
    assert outside.stat().st_uid == 0
    assert not [path for path in foreign.home.rglob("*") if path.lstat().st_uid == 0]


@needs_root
def test_root_in_a_project_of_another_user_works_with_that_users_rights(foreign: World) -> None:
    os.chown(foreign.home, 0, 0)
    outside = foreign.command.parent / "outside"
    outside.mkdir()
    done = foreign.install(CURSOR, project=True)
    assert Path(done.config).stat().st_uid == 1234
    assert (foreign.home / ".k8e").stat().st_uid == 0
    foreign.uninstall(CURSOR, project=True)
    plant(foreign, foreign.project / ".cursor", outside)
    with pytest.raises(errors.InvalidRequest, match="leads out of the project"):
        foreign.install(CURSOR, project=True)
    assert list(outside.iterdir()) == []


def test_file_with_a_token_is_private(world: World) -> None:
    done = world.install(CURSOR, **URL)
    assert stat.S_IMODE(Path(done.config).stat().st_mode) == 0o600
    receipts = world.home / ".k8e" / "agents" / "receipts.json"
    assert stat.S_IMODE(receipts.stat().st_mode) == 0o600


def test_token_in_a_file_that_others_read_is_told(world: World) -> None:
    config = world.write(CURSOR, b"{}")
    config.chmod(0o644)
    assert any("others can read it" in note for note in world.install(CURSOR, **URL).notes)


def test_link_into_dotfiles_stays_a_link_and_its_target_is_edited(world: World) -> None:
    dotfiles = world.home / "dotfiles"
    dotfiles.mkdir()
    target = dotfiles / "claude.json"
    target.write_bytes(golden(CLAUDE, "before"))
    link = world.config(CLAUDE)
    link.symlink_to(target)
    before = world.everything()
    world.install(CLAUDE)
    assert link.is_symlink()
    assert NAME in target.read_text("utf-8")
    world.uninstall(CLAUDE)
    assert world.everything() == before


def test_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(world: World) -> None:
    os.mkfifo(world.config(CLAUDE))
    with pytest.raises(errors.InvalidRequest, match="is not a file"):
        world.install(CLAUDE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_file_that_is_read_only_is_left_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="k8e-test-") as folder:
        Path(folder).chmod(0o755)  # somebody else must get in
        world = World(Path(folder))
        config = world.write(CLAUDE, b"{}")
        for path in (world.home, config):
            os.chown(path, 1234, 1234)
        config.chmod(0o444)
        os.seteuid(1234)
        try:
            with pytest.raises(errors.InvalidRequest, match="is read-only"):
                world.install(CLAUDE)
        finally:
            os.seteuid(0)
        assert config.read_bytes() == b"{}"


@pytest.mark.parametrize("kind", ["dangling", "foreign", "folder", "loop"])
def test_link_to_what_should_not_be_edited_is_refused(world: World, kind: str) -> None:
    target = world.home / "target"
    link = world.config(CLAUDE)
    link.symlink_to(link if kind == "loop" else target)
    if kind == "folder":
        target.mkdir()
    if kind == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can make a file of somebody else")
        target.write_text("{}")
        os.chown(target, 1234, 1234)
    before = world.everything() if kind != "loop" else {}
    with pytest.raises((errors.InvalidRequest, OSError)):
        world.install(CLAUDE)
    assert kind == "loop" or world.everything() == before


def test_project_file_that_leads_out_of_the_project_is_refused(world: World) -> None:
    """A repository that somebody cloned must not make us edit the user's own files."""
    own = world.write(CURSOR, b"{}")
    link = world.config(CURSOR, project=True)
    link.parent.mkdir()
    link.symlink_to(own)
    with pytest.raises(errors.InvalidRequest, match="leads out of the project"):
        world.install(CURSOR, project=True)
    assert own.read_bytes() == b"{}"
    link.unlink()
    link.parent.rmdir()
    link.parent.symlink_to(own.parent)
    with pytest.raises(errors.InvalidRequest, match="leads out of the project"):
        world.install(CURSOR, project=True)


def test_backup_has_what_was_there(world: World) -> None:
    world.write(CLAUDE, golden(CLAUDE, "before"))
    done = world.install(CLAUDE)
    assert Path(done.backup).read_bytes() == golden(CLAUDE, "before")
    assert stat.S_IMODE(Path(done.backup).stat().st_mode) == 0o600


def test_file_that_changes_in_the_last_moment_is_not_overwritten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.write(CLAUDE, b"{}")
    keep = files._keep  # pyright: ignore[reportPrivateUsage]

    def meanwhile(*arguments: Any, **more: Any) -> None:
        keep(*arguments, **more)
        config.write_bytes(f'{{"agent": "was here {len(count)} times"}}'.encode())
        count.append(1)

    count: list[int] = []
    monkeypatch.setattr(files, "_keep", meanwhile)
    with pytest.raises(errors.Conflict, match="changed by another program"):
        world.install(CLAUDE)
    assert len(count) == install.ATTEMPTS
    assert config.read_bytes() == f'{{"agent": "was here {len(count) - 1} times"}}'.encode()
    assert [item.name for item in world.home.glob(".claude.json*")] == [".claude.json"]


# All or nothing.


@each
@pytest.mark.parametrize("project", [False, True])
def test_skill_that_cannot_be_written_undoes_the_configuration(
    world: World, agent: SupportedAgent, project: bool
) -> None:
    world.write(agent, golden(agent, "before"), project=project)
    folder = agent.skills(world.scope(project=project))
    (folder / SKILL).mkdir(parents=True)
    (folder / SKILL / "references").write_text("a file where a folder should be")
    before = world.everything()
    with pytest.raises((errors.K8eError, OSError)):
        world.install(agent, project=project)
    assert world.everything() == before


@each
def test_write_that_fails_half_way_is_undone(
    world: World, agent: SupportedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write(agent, golden(agent, "before"))
    before = world.everything()
    real = files.replace
    count = 0

    def failing(found: files.FoundFile, data: bytes, *, private: bool = False) -> list[Path]:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        return real(found, data, private=private)

    monkeypatch.setattr(files, "replace", failing)
    with pytest.raises(OSError, match="No space"):
        world.install(agent)
    assert world.everything() == before


BROKEN = {
    "comma": (b'{\n  "a": 1\n  "mcpServers": {}\n}', 3, "a comma or }"),
    "end": (b'{\n  "mcpServers": {', 2, "the file ends"),
    "string": (b'{\n\n  "a": "b\n}', 3, "has no end"),
    "comment": (b'{\n  /* "a": 1\n}', 2, "has no end"),
    "unquoted": (b"{\n  mcpServers: {}\n}", 2, "a key in quotes"),
    "twice": (b'{"mcpServers": {},\n\n "mcpServers": {}}', 3, "at line 1"),
    "rest": (b"{}\n{}", 2, "behind the end"),
    "holder": (b'{\n "mcpServers": []\n}', 2, "is not an object"),
    "entry": (b'{\n "mcpServers": {\n "k8e-sandbox": 3}\n}', 3, "is not an object"),
    "root": (b"\n[]", 2, "is not an object"),
    "value": (b'{\n"a": nul}', 2, "should be"),
    "escape": (b'{\n"a": "\\q"}', 2, "string"),
    "bytes": (b'{\n"a": "\xff"}', 2, "UTF-8"),
    "deep": (b'{"a":\n' + b"[" * 300 + b"]" * 300 + b"}", 2, "deep"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_json_is_refused_with_its_line_and_left_alone(world: World, kind: str) -> None:
    data, line, words = BROKEN[kind]
    config = world.write(CURSOR, data)
    before = world.everything()
    with pytest.raises(errors.InvalidRequest) as caught:
        world.install(CURSOR)
    assert f"line {line}" in caught.value.message
    assert str(config) in caught.value.message
    assert words in caught.value.message
    assert caught.value.hint
    assert world.everything() == before


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b'model = "x"\nbad =\n', 2),
        (b"\n\nmcp_servers = { a = { command = 'x' } }\n", 3),
        (b"[mcp_servers]\nk8e-sandbox = { command = 'x' }\n", 2),
        (b"mcp_servers.k8e-sandbox.command = 'x'\n", 1),
        (b"a = 1\n[[mcp_servers]]\n", 2),
        (b"a = 1\n[mcp_servers]\nk8e-sandbox = 5\n", 3),
        (b"a = 1\na = 2\n", 2),
    ],
)
def test_toml_that_cannot_be_extended_is_refused_with_its_line(
    world: World, data: bytes, line: int
) -> None:
    world.write(CODEX, data)
    before = world.everything()
    with pytest.raises(errors.InvalidRequest) as caught:
        world.install(CODEX)
    assert f"line {line}" in caught.value.message
    assert caught.value.hint
    assert world.everything() == before


# The skill.


def test_skill_that_was_changed_by_hand_is_kept_aside_and_not_removed(world: World) -> None:
    done = world.install(CLAUDE)
    file = Path(done.skill, "SKILL.md")
    file.write_text("mine")
    again = world.install(CLAUDE)
    assert again.action == "updated"
    kept = again.notes[0].rpartition(" ")[2]
    assert Path(kept).read_text() == "mine"
    assert file.read_bytes() == install.texts()["SKILL.md"]
    file.write_text("mine again")
    gone = world.uninstall(CLAUDE)
    assert file.read_text() == "mine again"
    assert any("so it stays" in note for note in gone.notes)
    assert not Path(done.skill, "references").exists()


def test_file_of_the_skill_that_is_shipped_no_more_goes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {**install.texts(), "references/old.md": b"old"}
    with monkeypatch.context() as patch:
        patch.setattr(install, "texts", lambda: more)
        done = world.install(CLAUDE)
    old = Path(done.skill, "references", "old.md")
    assert old.exists()
    world.install(CLAUDE)
    assert not old.exists()


def installed_by_an_older_release(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(install, "SKILL", "k8e-sandbox")
        old = Path(world.install(CLAUDE).skill)
    assert old.name == "k8e-sandbox"
    assert (old / "SKILL.md").exists()
    return old


def test_skill_of_an_older_release_is_moved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.everything()
    old = installed_by_an_older_release(world, monkeypatch)
    done = world.install(CLAUDE)
    assert done.action == "updated"
    assert not old.exists()
    assert sorted(path.name for path in old.parent.iterdir()) == [SKILL]
    assert (old.parent / SKILL / "references" / "cli.md").exists()
    assert world.install(CLAUDE).action == "unchanged"
    world.uninstall(CLAUDE)
    assert world.everything() == before


def test_folder_of_the_old_name_that_is_not_ours_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = installed_by_an_older_release(world, monkeypatch)
    (old / "SKILL.md").write_text("mine")
    (old / "notes.md").write_text("mine too")
    done = world.install(CLAUDE)
    assert [note for note in done.notes if "changed by hand" in note]
    assert sorted(path.name for path in old.iterdir()) == ["SKILL.md", "notes.md"]
    assert (old / "SKILL.md").read_text() == "mine"
    other = world.home / ".gemini" / "skills" / "k8e-sandbox"
    other.mkdir(parents=True)
    (other / "SKILL.md").write_text("somebody's")
    world.install(AGENTS["gemini"])
    assert (other / "SKILL.md").read_text() == "somebody's"


# Which agents, and which server.


def test_all_means_the_agents_that_are_used_here(world: World) -> None:
    assert install.choose(["all"], world.scope(), everything=False) == []
    (world.home / ".cursor").mkdir()
    (world.home / ".claude.json").write_text("{}")
    found = install.choose([], world.scope(), everything=False)
    assert [agent.name for agent in found] == ["claude", "cursor"]
    found = install.choose(["all", "codex"], world.scope(), everything=False)
    assert [agent.name for agent in found] == ["claude", "codex", "cursor"]
    assert install.choose(["all"], world.scope(), everything=True) == ALL


def test_places_follow_the_agents_own_variables(world: World, tmp_path: Path) -> None:
    moved = str(tmp_path / "moved")
    asked = world.scope(CLAUDE_CONFIG_DIR=moved, CODEX_HOME=moved, XDG_CONFIG_HOME=moved)
    assert CLAUDE.config(asked) == Path(moved, ".claude.json")
    assert CLAUDE.skills(asked) == Path(moved, "skills")
    assert CODEX.config(asked) == Path(moved, "config.toml")
    assert AGENTS["vscode"].config(asked) == Path(moved, "Code", "User", "mcp.json")
