"""The suite itself: ids, promises and the runner, without any sandbox."""

from __future__ import annotations

import pytest

from k8e import conformance, errors
from k8e.conformance.behaviours import Behaviour
from k8e.model import Limits, Rootfs, SandboxSpec
from k8e.runtimes.base import Guest, Support


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
