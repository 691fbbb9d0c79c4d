"""The skill that agents are given tells the truth: its examples run, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8e.cli import completion, parser
from k8e.skills import agents, install
from tests.docs.conftest import Shell
from tests.docs.documents import ROOT, RUNNABLE, Step, blocks, links, steps

SKILL = ROOT / "src" / "k8e" / "skills" / "skill"
TEXTS = [SKILL / part for part in install.PARTS]
MAX_DESCRIPTION = 1024  # agents cut, or refuse, what is longer
MAX_LINES = 500
K8E_TOOLS = """run status create_session destroy_session exec exec_stream write_file read_file
    list_files pip_install run_subagent confirm_action""".split()
STRICT = Step(0, "set -eo pipefail\n", None)  # every line of a block counts, not only its last


def front() -> dict[str, Any]:
    return yaml.safe_load((SKILL / "SKILL.md").read_text("utf-8").split("---\n")[1])


@pytest.mark.parametrize("text", TEXTS[:2], ids=lambda path: path.name)
def test_examples_of_the_skill_work(text: Path, shell: Shell, tmp_path: Path) -> None:
    found = steps(text, tmp_path, port=shell.port)
    assert found
    problems = shell.follow([STRICT, *found], tmp_path)
    assert not problems, "\n".join(problems)


def test_nothing_is_in_the_skill_that_is_not_shipped() -> None:
    assert sorted(path for path in SKILL.rglob("*") if path.is_file()) == sorted(TEXTS)


def test_front_matter_is_what_agents_read() -> None:
    told = front()
    assert told["name"] == agents.SKILL
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", told["name"])
    assert 0 < len(told["description"]) <= MAX_DESCRIPTION
    assert len((SKILL / "SKILL.md").read_text("utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("word", ["sandbox", "run this code", "沙箱", "运行代码", "隔离"])
def test_triggers_are_there_in_both_languages(word: str) -> None:
    assert word in front()["description"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_links_of_the_skill_lead_to_its_files(text: Path) -> None:
    for _, link in links(text):
        assert (text.parent / link).resolve() in TEXTS


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_blocks_of_the_skill_are_all_run(text: Path) -> None:
    assert {block.language for block in blocks(text)} <= set(RUNNABLE)


def test_commands_and_flags_that_the_skill_names_exist() -> None:
    known = {item.path: item for item in completion.walk_parser(parser.build(), "k8e")}
    words = {flag for item in known.values() for flag in item.flags}
    for text in TEXTS:
        content = text.read_text("utf-8")
        for command in re.findall(r"(?:`|\(|^)k8e sandbox ([a-z][a-z-]+)", content, re.MULTILINE):
            assert f"k8e sandbox {command}" in known, command
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", content):
            assert flag in words, flag


def test_every_tool_of_k8e_is_told() -> None:
    content = (SKILL / "references" / "tools.md").read_text("utf-8")
    assert not [name for name in K8E_TOOLS if f"`sandbox_{name}`" not in content]


def test_tools_that_the_skill_names_exist() -> None:
    catalog = pytest.importorskip("k8e.mcp.catalog", reason="there is no MCP server here")
    known = set(catalog.TOOLS)
    for text in TEXTS:
        named = set(re.findall(r"\bsandbox_[a-z_]+\b", text.read_text("utf-8")))
        assert not named - known
