"""Sessions that begin with a git repository, fetched under their own egress policy."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from tests.client.repositories import HOSTS, PRIVATE, REPOSITORY, Served, served


@pytest.fixture(scope="module")
def git() -> Generator[Served]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def sdk(git: Served) -> Generator[SandboxClient]:
    with SandboxClient(git.place.endpoint) as client:
        yield client


def entry(repo: str = REPOSITORY, path: str = "repo", **fields: str) -> list[dict[str, Any]]:
    return [{"gitRepo": {"path": path, "repo": repo, **fields}}]


def test_branches_tags_and_commits_can_be_named(
    git: Served, sdk: SandboxClient, runtime: str
) -> None:
    first, main, feature = git.commits
    wanted = [
        ("head", "", main, "main"),
        ("main", "main", main, "main"),
        ("feature", "topic/feature", feature, "feature"),
        ("tag", "v1.0", first, "first"),
        ("full", "refs/heads/main", main, "main"),
        ("commit", first, first, "first"),
    ]
    manifest = [item for path, ref, _, _ in wanted for item in entry(path=f"r/{path}", ref=ref)]
    made = sdk.create_session(runtime, HOSTS, manifest=manifest)
    for path, _, commit, content in wanted:
        script = "git rev-parse HEAD; cat file; echo; ./run; git status --porcelain; id -un"
        done = sdk.exec(made, script, cwd=f"r/{path}")
        assert done.stdout == f"{commit}\n{content}\nran\nuser\n", (path, done.stderr)
    again = sdk.exec(
        made, "git log --oneline | wc -l; git fetch -q origin main && echo ok", cwd="r/tag"
    )
    assert again.stdout == "1\nok\n", "it is shallow, and origin is known"
    sdk.destroy_session(made)


def test_a_repository_can_be_the_workspace_itself(sdk: SandboxClient, runtime: str) -> None:
    made = sdk.create_session(runtime, HOSTS, manifest=entry(path="."))
    assert sdk.exec(made, "./run").stdout == "ran\n"
    sdk.destroy_session(made)


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        (entry(ref="nowhere"), "nowhere"),
        (entry("http://git.test/none.git"), "not found"),
        (entry(PRIVATE), "could not read Username"),
        (entry("http://git.test:81/x.git"), "git.test:81"),
    ],
    ids=["ref", "repository", "private", "port"],
)
def test_what_cannot_be_fetched_fails_the_creation_with_git_s_words(
    sdk: SandboxClient, runtime: str, manifest: list[dict[str, Any]], told: str
) -> None:
    before = len(sdk.list_sessions())
    with pytest.raises(errors.ToolFailed, match="could not be fetched") as caught:
        sdk.create_session(runtime, HOSTS, manifest=manifest, session_id="failed")
    assert told in caught.value.message
    assert len(sdk.list_sessions()) == before
    assert sdk.get_session("failed").ended_reason == f"creation failed: {caught.value.message}"


def test_the_session_s_own_policy_is_in_force_and_the_hint_says_what_to_allow(
    sdk: SandboxClient, runtime: str
) -> None:
    with pytest.raises(errors.ToolFailed, match=r"egress policy refused git\.test") as caught:
        sdk.create_session(runtime, ["other.test"], manifest=entry())
    assert "--allowed-hosts git.test" in caught.value.hint


def test_the_command_line_takes_a_repository(git: Served, runtime: str) -> None:
    flags = ["--runtime", runtime, "--allowed-hosts", HOSTS[0], "--git-repo", REPOSITORY]
    made = git.place.json("sandbox", "create", *flags, "--git-ref", "v1.0", "--git-path", "x/y")
    assert made["entries_materialized"] == 1
    read = git.place.cli("sandbox", "read", "--raw", made["session_id"], "x/y/file")
    assert read.stdout == b"first"
    git.place.json("sandbox", "destroy", made["session_id"])
    run = ["sandbox", "run", *flags, "--tenant", f"of-{runtime}", "cat repo/file"]
    first, again = git.place.json(*run), git.place.json(*run)
    assert (first["stdout"], again["session_id"]) == ("main", first["session_id"])
    git.place.json("sandbox", "destroy", first["session_id"])


@pytest.mark.anyio
async def test_the_asynchronous_client_does_the_same(git: Served, runtime: str) -> None:
    async with AsyncSandboxClient(git.place.endpoint) as client:
        made = await client.create_session(runtime, HOSTS, manifest=entry())
        assert await client.read_file(made, "repo/file") == "main"
        await client.destroy_session(made)
