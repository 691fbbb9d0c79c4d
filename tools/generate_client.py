"""Writes the synchronous modules of the client from the asynchronous ones.

With --check it writes nothing, and fails if one of them is not current. The transformation is of
tokens, so comments stay: ``async`` and ``await`` go, names change by the table, and ruff formats
what is left. Whatever differs by more than that (threads and event loops, sockets) is in
``driver``, ``caller`` and their asynchronous twins, which are written by hand.
"""

from __future__ import annotations

import difflib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "src/k8e/client"
RUFF = [sys.executable, "-m", "ruff"]
MODULES = {
    "async_contexts": "contexts",
    "async_gateway": "gateway",
    "async_oneshot": "oneshot",
    "async_processes": "processes",
    "async_runs": "runs",
    "async_sandbox": "sandbox",
    "asynchronous": "blocking",
}
"""Asynchronous modules, and the synchronous ones that are made from them."""
NAMES = {
    **MODULES,
    "AsyncCaller": "Caller",
    "AsyncContent": "Content",
    "AsyncContext": "Context",
    "AsyncProgramDriver": "ProgramDriver",
    "AsyncGatewayClient": "GatewayClient",
    "AsyncGenerator": "Generator",
    "AsyncProcess": "Process",
    "AsyncRun": "Run",
    "AsyncExposedPort": "ExposedPort",
    "AsyncSandbox": "Sandbox",
    "AsyncSandboxClient": "SandboxClient",
    "AsyncSandboxFiles": "SandboxFiles",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "aclosing": "closing",
    "anext": "next",
    "arun": "run",
    "async_caller": "caller",
    "async_driver": "driver",
    "async_sandbox_session": "sandbox_session",
    "asynccontextmanager": "contextmanager",
    "tasks": "threads",
}
"""Names, in code and in text, and what they are in a synchronous module."""
WORDS = {**NAMES, "asynchronous": "synchronous"}
CALLS = {"asyncio.Lock": "threading.Lock", "asyncio.sleep": "time.sleep"}
AWAITED = re.compile(r"\(await ((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)(?=[.\[])")
HEADER = (
    "# Generated from {name}.py by tools/generate_client.py (`make gen`); changes belong there.\n"
)


def synchronous(name: str, text: str) -> str:
    """The synchronous twin of a module, not formatted yet."""
    for call, replacement in CALLS.items():
        text = text.replace(call, replacement)
    text = text.replace("import asyncio\n", "import threading\nimport time\n")
    text = AWAITED.sub(r"\1", text)
    text = re.sub(r"\bAwaitable\[([^\[\]]+)\]", r"\1", text)
    text = re.sub(r"import Async(\w+), Awaitable\b|, Awaitable\b", _without_awaitable, text)
    pieces: list[str] = []
    row, column = 1, 0
    lines = text.splitlines(keepends=True)
    skip_space = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        between = _between(lines, (row, column), token.start)
        row, column = token.end
        pieces.append(between.lstrip(" ") if skip_space else between)
        skip_space = token.type == tokenize.NAME and token.string in ("async", "await")
        if skip_space:
            continue
        if token.type == tokenize.NAME:
            pieces.append(NAMES.get(token.string, token.string))
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            pieces.append(_text(token.string))
        else:
            pieces.append(token.string)
    return HEADER.format(name=name) + "".join(pieces)


def _without_awaitable(found: re.Match[str]) -> str:
    return f"import Async{found[1]}" if found[1] else ""


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """What stands between two tokens: spaces, and the ends of continued lines."""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    rest = [lines[start[0] - 1][start[1] :], *lines[start[0] : end[0] - 1]]
    return "".join(rest) + lines[end[0] - 1][: end[1]]


def _text(text: str) -> str:
    """A string or comment, with the names of the synchronous module in it."""
    text = re.sub(r"\basync (with|for|def)\b", r"\1", text)
    text = re.sub(r"\bawait (?=[\w(])", "", text)
    return re.sub(r"\b\w+\b", lambda word: WORDS.get(word[0], word[0]), text)


def formatted(text: str, target: Path) -> str:
    """The text as ``make format`` would leave it."""
    fixes = ["check", "--quiet", "--fix-only", "--unsafe-fixes", "--select", "F401,I,UP028,RUF100"]
    for command in (fixes, ["format", "--quiet"]):
        done = subprocess.run(
            [*RUFF, *command, "--stdin-filename", str(target), "-"],
            input=text,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        text = done.stdout
    return text


def generate() -> dict[Path, str]:
    """The text of each synchronous module by its path."""
    made: dict[Path, str] = {}
    for name, target in MODULES.items():
        path = CLIENT / f"{target}.py"
        made[path] = formatted(synchronous(name, (CLIENT / f"{name}.py").read_text("utf-8")), path)
    return made


def main() -> None:
    """Write what changed; with --check, say what would."""
    made = generate()
    stale = [
        path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    if "--check" not in sys.argv:
        for path in stale:
            path.write_text(made[path], "utf-8")
        return
    for path in stale:
        before = path.read_text("utf-8").splitlines() if path.exists() else []
        for line in difflib.unified_diff(
            before, made[path].splitlines(), str(path), "current", "", "", 1
        ):
            print(line)  # noqa: T201
    if stale:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"{names}: not what the asynchronous modules give; run `make gen`")


if __name__ == "__main__":
    main()
