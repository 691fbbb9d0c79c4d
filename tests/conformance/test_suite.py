"""The suite itself: ids, promises and the runner, without any sandbox."""

from __future__ import annotations

import re

import pytest

from k8e import conformance, errors
from k8e.conformance import checklist
from k8e.conformance.behaviour import Behaviour
from k8e.conformance.promises import warm
from k8e.model import Limits, Rootfs, SandboxSpec
from k8e.runtimes.base import Guest, Support
from tests.docs.documents import ROOT


class NoSandboxes:
    """A runtime that can do nothing."""

    name = "nothing"
    networked = False

    async def probe(self) -> Support:
        return Support(self.name, usable=False)

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        return False

    async def fetch(self, rootfs: Rootfs) -> None:
        pass

    async def launch(self, spec: SandboxSpec) -> Guest:
        raise errors.RuntimeUnusable("there is nothing here")

    async def adopt(self) -> list[Guest]:
        return []

    async def purge(self, sandbox_id: str) -> None:
        pass


@pytest.mark.parametrize("name", conformance.ALL)
def test_a_behaviour_has_a_dotted_id_and_a_promise_of_one_sentence(name: str) -> None:
    area, _, what = name.partition(".")
    assert area.isalpha()
    assert what.replace("-", "").isalpha()
    promise = conformance.ALL[name].promise
    assert promise.endswith(".")
    assert len(promise) > 20


async def test_a_runtime_that_cannot_launch_fails_with_its_reason() -> None:
    (result,) = await conformance.run(NoSandboxes(), ["exec.exit-code"])
    assert result.verdict is conformance.Verdict.FAIL
    assert "there is nothing here" in result.reason


async def test_an_unknown_behaviour_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"no behaviour 'exec\.nonsense'"):
        await conformance.run(NoSandboxes(), ["exec.nonsense"])


async def test_a_behaviour_that_does_not_apply_says_why() -> None:
    async def check(stage: conformance.Stage) -> None:
        raise conformance.NotApplicable(f"{stage.runtime.name} has no such thing")

    behaviour = Behaviour("some.thing", "It does something.", check)
    result = await conformance.check(behaviour, conformance.Stage(NoSandboxes()))
    assert result.verdict is conformance.Verdict.NOT_APPLICABLE
    assert result.reason == "nothing has no such thing"


# The documents.


def documented() -> list[str]:
    page = (ROOT / "docs/reference/conformance.md").read_text("utf-8")
    return re.findall(r"^\| `([a-z.-]+)` \| .* \| .* \| .* \|$", page, re.MULTILINE)


def test_every_id_is_documented_once_and_every_documented_id_exists() -> None:
    assert documented() == list(conformance.ALL)


def test_every_line_of_the_checklist_is_answered_by_behaviours_that_exist() -> None:
    lines = checklist.lines(conformance.ALL)
    assert len(lines) >= 39
    assert {line.key.split()[0] for line in lines} == set(
        "kernel resources files network control state".split()
    )
    for line in lines:
        assert line.checks, f"nothing answers {line.key}: {line.text}"
        assert set(line.checks) <= set(conformance.ALL), line.key


def test_as_many_programs_run_both_ways_as_the_documents_say() -> None:
    page = (ROOT / "docs/howto/warm.md").read_text("utf-8")
    told = [int(number) for number in re.findall(r"[Mm]ore than (\d+) programs", page)]
    programs = {snippet for family in warm.FAMILIES.values() for snippet in map(repr, family)}
    for number, there_are in zip(told, (len(programs), len(warm.NODE)), strict=True):
        assert number < there_are < number + 100


def test_a_known_gap_is_told_and_not_checked() -> None:
    async def check(stage: conformance.Stage) -> None:
        raise AssertionError("a known gap was checked")

    behaviour = Behaviour("some.thing", "It does something.", check, {"nothing": "it cannot"})
    result = conformance.known_gap(behaviour, NoSandboxes())
    assert result is not None
    assert (result.verdict, result.reason) == (conformance.Verdict.NOT_APPLICABLE, "it cannot")


def test_behaviours_are_chosen_by_id_and_by_the_word_before_the_dot() -> None:
    chosen = conformance.choose(["strict", "exec.exit-code", "strict.host"])
    assert "exec.exit-code" in chosen
    assert {name.partition(".")[0] for name in chosen} == {"exec", "strict"}
    assert len(chosen) == len(set(chosen)) > 5
