"""``run`` of code by a warm and by a new interpreter, against a command that starts one for it.

All in the same sandbox, by the same client. A warm one is waited for before it is used: what is
measured is a run, not how quickly the next interpreter starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.stage import Stage
from benchmarks.subjects.execs import one_exec
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, Skipped, TableRow
from k8e.client import local
from k8e.guest import wire

ROUNDS = 60
WARM = {"python": Goal("ratio", 0.25)}
COLD = {"python": Goal("ratio", 1.1)}
READY_SECONDS = 30.0
LOOK = 0.01  # seconds between two looks whether one is ready
SETTLE = 0.05  # seconds for a new interpreter's start to be over
OFF = {"K8E_WARM": "0"}
ATTEMPTS = 5  # an interpreter that does not answer in time, on a busy machine, is not used


class Language(NamedTuple):
    """What is run, and the command that does the same."""

    code: str
    command: list[str]


LANGUAGES = {
    "python": Language("print(1)", ["python3", "-c", "print(1)"]),
    "node": Language("console.log(1)", ["node", "-e", "console.log(1)"]),
    "bash": Language("echo 1", ["bash", "-c", "echo 1"]),
}


class NeverReady(Exception):
    """No interpreter was kept warm."""


def measure(stage: Stage) -> Iterator[TableRow | Skipped]:
    for runtime in stage.runtimes:
        client = stage.local_client()
        session_id = client.create_session(runtime)
        guest = local.Connection(local.dial(str(stage.settings.socket)))
        try:
            for name in LANGUAGES:
                yield from _measure(stage, runtime, _Runs(client, guest, session_id, name))
        finally:
            guest.close()
            client.destroy_session(session_id)


class _Runs(NamedTuple):
    """The three ways to run code of a language in one session."""

    client: SandboxClient
    guest: local.Connection
    session_id: str
    language: str

    def warm(self) -> float:
        for _ in range(ATTEMPTS):
            wait_until_ready(self.guest, self.session_id, self.language)
            began = time.perf_counter()
            exec_id = self._run({})
            took = time.perf_counter() - began
            if _was_warm(self.guest, self.session_id, exec_id):
                return took
        raise NeverReady(f"{ATTEMPTS} runs that should have been warm used no warm interpreter")

    def new(self) -> float:
        self._settle()
        return timing.timed(lambda: self._run(OFF))()

    def command(self) -> float:
        self._settle()
        argv = LANGUAGES[self.language].command
        return timing.timed(one_exec(self.client, self.session_id, argv))()

    def _run(self, env: dict[str, str]) -> str:
        code = LANGUAGES[self.language].code
        done = self.client.run(code, self.language, session_id=self.session_id, env=env)
        if done.stdout != "1\n":
            raise timing.ProgramFailed(f"{self.language} printed {done}")
        return done.exec_id

    def _settle(self) -> None:
        """Nothing may be starting while something else is measured."""
        if ready(self.guest, self.session_id, self.language) == 0:
            wait_until_ready(self.guest, self.session_id, self.language)


def _measure(stage: Stage, runtime: str, runs: _Runs) -> Iterator[TableRow | Skipped]:
    name = runs.language
    argv = LANGUAGES[name].command
    probe = runs.client.exec(runs.session_id, [*argv])
    if probe.exit_code:
        yield Skipped("warm", runtime, name, f"{argv[0]} is not in the sandbox")
        return
    runs.client.run(LANGUAGES[name].code, name, session_id=runs.session_id)
    warm, new, peer = f"run({name}), warm", f"run({name}), new", " ".join(argv[:2])
    contenders: dict[str, timing.Timed] = {new: runs.new, peer: runs.command}
    if ready(runs.guest, runs.session_id, name) is None:
        yield Skipped("warm", runtime, warm, "not in this build: no interpreter is kept warm")
    else:
        contenders[warm] = runs.warm
    took = timing.interleave(stage.rounds(ROUNDS), contenders, warm_up=2)
    series = {each: Series(each, "ms", timing.milliseconds(took[each])) for each in took}
    for each, bars in ((warm, WARM), (new, COLD)):
        if each in series:
            yield TableRow("warm", runtime, series[each], series[peer], bars.get(name))


def wait_until_ready(guest: local.Connection, session_id: str, language: str) -> int:
    """Wait until an interpreter waits and nothing is being started; how many there are."""
    until = time.monotonic() + READY_SECONDS
    while not (count := ready(guest, session_id, language)):
        if time.monotonic() > until:
            raise NeverReady(f"no {language} was ready within {READY_SECONDS:g} s")
        time.sleep(LOOK)
    time.sleep(SETTLE)
    return count


def ready(guest: local.Connection, session_id: str, language: str) -> int | None:
    """How many interpreters wait; None where this build keeps none of that language."""
    return count_ready(_listed(guest, session_id), language)


def _was_warm(guest: local.Connection, session_id: str, exec_id: str) -> bool:
    execs = _listed(guest, session_id)["execs"]
    return any(each["warm"] for each in execs if each["id"] == exec_id)


def _listed(guest: local.Connection, session_id: str) -> dict[str, Any]:
    guest.begin()
    guest.send(wire.CALL, wire.pack({"op": "execs", "session": {"id": session_id}}))
    kind, body = guest.receive()
    if kind != wire.RESULT:
        raise NeverReady(str(wire.unpack(body)))
    return wire.unpack_dict(body)


def count_ready(told: dict[str, Any], language: str) -> int | None:
    """A guest tells a number for each language, or one number, which is that of Python."""
    counts: dict[str, int] = told.get("waiting", {"python": told["warm"]})
    return counts.get(language)
