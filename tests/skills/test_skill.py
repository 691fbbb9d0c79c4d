"""The skill itself: its name, who may call it, and what makes an agent take it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from k8e.skills import install
from k8e.skills.agents import SKILL

MOST = 1024  # characters that agents read of a description
TRIGGERS = (
    "run this",
    "execute",
    "test it",
    "install X",
    "install X and use it",
    "check if this works",
    "analyze this data",
    "帮我跑",
    "帮我跑一下",
    "运行",
    "运行这个",
    "试试",
    "试试这个",
    "执行",
    "执行一下",
    "跑一下",
    "跑一下看看",
    "测试",
    "测试这段代码",
    "安装并使用",
    "分析这个CSV",
    "帮我分析这个CSV",
    "处理这个文件",
    "帮我处理这个文件",
    "帮我跑这段代码",
    "帮我试试",
    "能不能跑",
    "看看输出",
    "帮我算",
    "帮我算一下",
)


@pytest.fixture
def head() -> dict[str, Any]:
    text = install.texts()["SKILL.md"].decode("utf-8")
    return yaml.safe_load(text.split("---\n")[1])


def test_skill_has_the_name_of_its_folder_and_users_may_call_it(head: dict[str, Any]) -> None:
    assert head["name"] == SKILL == "k8e-sandbox-skill"
    assert head["user-invocable"] is True


def test_description_has_every_trigger_as_a_word_of_its_own(head: dict[str, Any]) -> None:
    english = head["description"].split('"')[1::2]
    chinese = head["description"].partition("触发词")[2][1:].rstrip("。").split("、")
    said = {word.strip() for word in [*english, *chinese]}
    assert set(TRIGGERS) - said == set()


def test_description_is_short_enough_for_agents_to_read(head: dict[str, Any]) -> None:
    assert len(head["description"]) <= MOST
