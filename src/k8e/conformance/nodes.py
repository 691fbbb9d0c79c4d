"""Warm Nodes: quicker, and otherwise not to be told from new ones."""

from __future__ import annotations

import re
from typing import Any

from k8e.conformance.behaviours import NotApplicable, behaviour, equal
from k8e.conformance.sandbox import PATIENCE, Outcome, Sandbox
from k8e.conformance.snippets import NODE, Snippet
from k8e.conformance.stage import Stage
from k8e.conformance.warmth import EVERY_SNIPPET, compare_all, ready, seen, until_warm

_STEP = 1 if EVERY_SNIPPET else 7
"""Nodes start slowly, and all programs are tried without a sandbox: here, one of so many."""
_PID = re.compile(rb"\(node:\d+\)")
# What cannot be run as a script goes to a new one, which has the words for it.
_NO_SCRIPT = ("export ", "await ", "foo bar", "return ")


async def _run(sandbox: Sandbox, code: str, *, stdin: bytes | None = None, **call: Any) -> Outcome:
    program = await sandbox.start(
        code=code.encode(), language="node", stdin=stdin is not None, timeout=PATIENCE, **call
    )
    if stdin is not None:
        await program.type(stdin)
        program.end_input()
    done = await program.finish()
    done.stdout, done.stderr = (_PID.sub(b"", stream) for stream in (done.stdout, done.stderr))
    return done


async def _first(sandbox: Sandbox) -> None:
    """A new one runs, unless there is none; then one waits."""
    version = await sandbox.shell("node --version")
    if not version.text.startswith("v20."):
        raise NotApplicable(f"no Node.js that could be kept warm: {version.text or version.stderr}")
    if not (await sandbox.call("execs"))["waiting"]["node"]:
        await _run(sandbox, "1")
        await ready(sandbox, "node")


async def _compare(sandbox: Sandbox, snippet: Snippet) -> str:
    await _first(sandbox)
    new = await _run(sandbox, snippet.code, warm=False)
    await ready(sandbox, "node")
    usual = not snippet.code.startswith(_NO_SCRIPT) and "crypto" not in snippet.code
    usual = usual and b"SyntaxError" not in new.stderr
    if usual:
        warm = await until_warm(sandbox, lambda: _run(sandbox, snippet.code), "node")
    else:
        warm = await _run(sandbox, snippet.code)
    if usual and not warm.exit["warm"]:
        return f"{snippet} was not run by a warm Node"
    return "" if seen(warm) == seen(new) else f"{snippet}: {seen(warm)} instead of {seen(new)}"


@behaviour("warm.node")
async def node(stage: Stage) -> None:
    """After the first code in Node.js, one that waits does what a new one would."""
    await compare_all(stage, NODE[::_STEP], _compare)


@behaviour("warm.node-off")
async def node_off(stage: Stage) -> None:
    """A call or an environment can ask for a new Node, and what must have one gets it."""
    sandbox = await stage.launch()
    await _first(sandbox)
    calls: tuple[dict[str, Any], ...] = (
        {"warm": False},
        {"env": {"K8E_WARM": "0"}},
        {"env": {"NODE_OPTIONS": "--no-warnings"}},
        {"env": {"TZ": "Asia/Tokyo"}},
        {"stdin": b"input"},
    )
    for call in calls:
        done = await _run(sandbox, "console.log(require('fs').readFileSync(0).length)", **call)
        size = len(call.get("stdin", b""))
        equal((done.stdout, done.exit["warm"]), (b"%d\n" % size, False), f"{call}")
    done = await until_warm(sandbox, lambda: _run(sandbox, "console.log(1)"), "node")
    equal(done.exit["warm"], True, "without such a wish")
