"""Warm interpreters: quicker, and otherwise not to be told from new ones.

Each prints what it sees of the interpreter, of the process, or of its own end. None prints what
differs between two runs of the same interpreter, such as process ids and times; addresses in hex
are taken out before two outputs are compared.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from k8e.conformance.behaviour import BrokenPromise, NotApplicable, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, Outcome, Sandbox, with_time
from k8e.conformance.stage import SHARED_ENV, Stage
from k8e.runtimes.base import Binding

SEPARATOR = "%%\n"


@dataclass(frozen=True)
class Snippet:
    """A program, and what it is started with."""

    code: str
    stdin: bytes | None = None
    env: dict[str, str] = field(default_factory=dict[str, str])
    cwd: str = ""


def _read(name: str) -> list[str]:
    """The programs of one file, which are parted by lines of two percent signs."""
    text = (Path(__file__).parents[1] / "programs" / f"{name}.txt").read_text("utf-8")
    return [part.removesuffix("\n") for part in text.split(SEPARATOR)]


def _plain(*codes: Iterable[str]) -> list[Snippet]:
    return [Snippet(code) for part in codes for code in part]


_EXIT_VALUES = [
    *("", "None", "0", "1", "3", "255", "256", "-1", "2**40", "True", "False", "'in words'", "''"),
    *("'\\u00fcn\\u00ef'", "'\\ud800'", "2.5", "(1, 'two')", "[]", "b'bytes'", "object"),
]
_BUFFERED_VALUES = ("", "0", "3", "256", "'in words'", "(1, 'two')")
_ERRORS = (
    "AttributeError FileNotFoundError ImportError KeyError MemoryError NameError OSError "
    "RuntimeError StopIteration GeneratorExit KeyboardInterrupt BaseException Warning"
).split()
_CHAINED_ERRORS = (
    "ArithmeticError AssertionError BufferError EOFError FloatingPointError IndexError LookupError "
    "ModuleNotFoundError NotImplementedError OverflowError PermissionError ReferenceError "
    "StopAsyncIteration TimeoutError TypeError UnboundLocalError ValueError ZeroDivisionError"
).split()
_SYS = (
    "argv orig_argv path flags warnoptions _xoptions executable _base_executable prefix "
    "exec_prefix base_prefix platlibdir pycache_prefix dont_write_bytecode meta_path path_hooks "
    "excepthook unraisablehook displayhook breakpointhook byteorder maxsize version "
    "implementation hash_info thread_info float_info int_info builtin_module_names "
    "stdin stdout stderr __stdin__ __stdout__ __stderr__"
).split()
_SYS_CALLS = (
    "getrecursionlimit getswitchinterval getfilesystemencoding getfilesystemencodeerrors "
    "getdefaultencoding gettrace getprofile exc_info is_finalizing "
    "get_asyncgen_hooks get_coroutine_origin_tracking_depth getdlopenflags"
).split()
_STREAM = (
    "encoding errors line_buffering write_through name mode newlines closed buffer buffer.raw "
    "buffer.raw.closefd buffer.raw.mode isatty() fileno() readable() writable() seekable() "
    "_CHUNK_SIZE buffer.raw._blksize"
).split()
_STOPPING = range(19, 23)  # SIGSTOP and those that stop, too, in gVisor: it would never end
_OWN_SIGNALS = (1, 2, 6, 9, 11, 13, 14, 15, 17, 18, 25)
"""Those that a program sends to itself: with a meaning to Python, or that are often sent."""
_SHOW = """
import sys
def show(text):
    try: print(text, eval(text))
    except Exception as error: print(text, repr(error))
"""

_LEAVING = [
    *(f"raise SystemExit({value})" for value in _EXIT_VALUES),
    *(f"import sys\nprint('out', end='')\nsys.exit({value})" for value in _BUFFERED_VALUES),
    *(f"import os\nprint('lost')\nos._exit({value})" for value in (0, 1, 77, 255)),
]
_RAISING = [
    *(f"raise {name}('what')" for name in _ERRORS),
    *(f"def f(n):\n    if n: f(n - 1)\n    raise {name}\nf(3)" for name in _ERRORS[:2]),
    # One program for all that are shown alike: a traceback shows what led to what.
    (
        f"last = None\nfor kind in {', '.join(_CHAINED_ERRORS)}:\n"
        "    try: raise kind('what') from last\n"
        "    except kind as error: last = error\nraise last"
    ),
]
_SYNTAX = [
    "  print(1)",
    "\ufeffprint(1)",
    "\r\nprint(1)\r\nprint(2)\r\n",
    "print(1)\rprint(2)",
    "\f\nprint(1)",
    "-" * 900 + "1",
    "if 1:\n" + "".join(f"{' ' * n}if 1:\n" for n in range(1, 101)) + " " * 101 + "pass",
    "\n" * 500 + "1 / 0",
    "x = " + "+".join(["1"] * 2000) + "\nprint(x)",
]
_SIGNALS = [
    *(f"import os\nos.kill(os.getpid(), {number})\nprint('alive')" for number in _OWN_SIGNALS),
    # What an interpreter does about a signal, its children inherit.
    (
        f"import os\nfor number in set(range(1, 32)) - set({[*_OWN_SIGNALS, *_STOPPING]}):\n"
        "    if pid := os.fork(): print(number, os.waitpid(pid, 0)[1] & 127, flush=True)\n"
        "    else: os.kill(os.getpid(), number); os._exit(0)"
    ),
]
_IDENTITY = [
    _SHOW + "\n".join(f"show('sys.{name}')" for name in _SYS),
    _SHOW + "\n".join(f"show('sys.{name}()')" for name in _SYS_CALLS),
    "import sys\nprint(sys._getframe())",
    *(
        _SHOW + "\n".join(f"show('sys.{stream}.{name}')" for name in _STREAM)
        for stream in ("stdin", "stdout", "stderr")
    ),
]
_INPUT = b"5\nsecond \xc3\xbc\r\nlast"
_WHERE = "import os\nprint(os.getcwd(), sorted(os.listdir()))"
_VARIABLES = "import os\nprint(os.environ, os.environb)\nos.system('env')"

FAMILIES: dict[str, list[Snippet]] = {
    "leaving": _plain(_LEAVING, _read("leaving")),
    "raising": _plain(_RAISING, _read("raising")),
    "syntax": _plain(_SYNTAX, _read("syntax")),
    "signals": _plain(_SIGNALS, _read("signals")),
    "identity": _plain(_IDENTITY, _read("identity")),
    "process": _plain(_read("process")),
    "ending": _plain(_read("ending")),
    "output": _plain(_read("output")),
    "reading": [Snippet(code, stdin=_INPUT) for code in _read("reading")],
    "places": [
        Snippet(_VARIABLES, env={"ADDED": "x", "USER": "other"}),
        Snippet(_VARIABLES, env={"ADDED": "\u00fc", "EMPTY": ""}),
        Snippet(_VARIABLES, env={"BYTES": "\udcff", "PWD": "/nowhere"}),
        Snippet(_VARIABLES, env={"COLUMNS": "30", "TERM": "dumb", "LINES": "5"}),
        Snippet("import shutil\nprint(shutil.get_terminal_size())", env={"COLUMNS": "33"}),
        Snippet("import tempfile\nprint(tempfile.gettempdir())", env={"TMPDIR": "/workspace"}),
        Snippet("import helper_of_snippets as h\nprint(h.VALUE, h.__file__)"),
        Snippet("import helper_of_snippets", cwd="/"),
        *(Snippet(_WHERE, cwd=cwd) for cwd in ("deep/er", "linked", "linked/../er", "/usr")),
    ],
}
"""What differs if anything does, by what it is about."""
NODE: list[Snippet] = _plain(_read("node"))
"""The same for Node.js."""


_LANES = 2  # sandboxes that run programs at the same time: much of a comparison is waiting
_TIMES = 20  # long enough for an interpreter to be started, if it were
_TRIES = 5
_PAUSE = 0.01  # seconds between two looks whether an interpreter is ready
_SETUP = (
    "mkdir -p deep/er; ln -sfn deep/er linked; echo VALUE = 5 > helper_of_snippets.py; "
    "touch deep/er/file"
)
_ADDRESS = re.compile(rb"0x[0-9a-f]+")
# What does not compile goes to a new interpreter, which has the words for it.
_NOT_COMPILED = (b"SyntaxError", b"IndentationError", b"TabError", b"RecursionError")
EVERY_SNIPPET = bool(os.environ.get("K8E_EVERY_SNIPPET"))
"""Whether all programs are compared on each runtime, which takes a minute more."""
Compare = Callable[[Sandbox, Snippet], Awaitable[str]]
_SITE = "import site, os\nprint(site.getusersitepackages())"


async def _run(sandbox: Sandbox, code: str, *, stdin: bytes | None = None, **call: Any) -> Outcome:
    data = code.encode("utf-8", "surrogateescape")
    program = await sandbox.start(
        code=data, language="python", stdin=stdin is not None, timeout=PATIENCE, **call
    )
    if stdin is not None:
        await program.type(stdin)
        program.end_input()
    return await program.finish()


async def ready(sandbox: Sandbox, language: str = "python") -> None:
    """Wait until an interpreter waits."""
    until = time.monotonic() + PATIENCE
    while not (await sandbox.call("execs"))["waiting"][language]:
        if time.monotonic() > until:
            raise BrokenPromise("no interpreter became ready")
        await asyncio.sleep(_PAUSE)


async def until_warm(
    sandbox: Sandbox, run: Callable[[], Awaitable[Outcome]], language: str = "python"
) -> Outcome:
    """Run something until an interpreter that waited runs it.

    One that does not answer at once is passed over, and on a busy machine that may be a good one.
    """
    for _ in range(_TRIES - 1):
        await ready(sandbox, language)
        done = await run()
        if done.exit["warm"]:
            return done
    await ready(sandbox, language)
    return await run()


async def _warmed(stage: Stage, **limits: Any) -> Sandbox:
    """A sandbox with an interpreter that waits."""
    sandbox = await stage.launch(**limits)
    equal((await _run(sandbox, "print(1)")).exit["warm"], False, "the first run is warm")
    await ready(sandbox)
    return sandbox


def seen(done: Outcome) -> tuple[bytes, bytes, int, Any, str]:
    """What a client gets to see, without addresses."""
    told = [_ADDRESS.sub(b"0x", stream) for stream in (done.stdout, done.stderr)]
    return (told[0], told[1], done.code, done.exit["signal"], done.status)


async def _compare(sandbox: Sandbox, snippet: Snippet) -> str:
    """Run one both ways; what differs, in words."""
    call: dict[str, Any] = {"stdin": snippet.stdin, "env": snippet.env, "cwd": snippet.cwd}
    new = await _run(sandbox, snippet.code, warm=False, **call)
    if any(word in new.stderr for word in _NOT_COMPILED):
        await ready(sandbox)
        warm = await _run(sandbox, snippet.code, **call)
    else:
        warm = await until_warm(sandbox, lambda: _run(sandbox, snippet.code, **call))
    if not warm.exit["warm"] and not any(word in new.stderr for word in _NOT_COMPILED):
        return f"{snippet} was not run by a warm interpreter"
    if seen(warm) == seen(new):
        return ""
    return f"{snippet}: {seen(warm)} instead of {seen(new)}"


async def compare_all(stage: Stage, snippets: list[Snippet], compare: Compare) -> None:
    """Compare them, in as many sandboxes at once as there are lanes."""

    async def make() -> Sandbox:
        sandbox = await stage.settle()
        await sandbox.guest.bind(Binding(env=SHARED_ENV))
        equal((await sandbox.shell(_SETUP)).code, 0, "setup")
        return sandbox

    async def work(lane: int) -> list[str]:
        sandbox = await stage.kept(f"warm {lane}", make)
        return [await compare(sandbox, snippet) for snippet in snippets[lane::_LANES]]

    lanes = await asyncio.gather(*map(work, range(_LANES)))
    found = [text for lane in lanes for text in lane if text]
    expect(not found, f"{len(found)} of {len(snippets)}: " + "\n".join(found))


async def _compare_family(stage: Stage, family: str) -> None:
    """Every second program: the other runtime has the others, and the guest is the same."""
    chosen = FAMILIES[family]
    if not EVERY_SNIPPET:
        chosen = chosen[int(stage.runtime.name == "container") :: 2]
    await compare_all(stage, chosen, _compare)


@behaviour("warm.leaving")
async def leaving(stage: Stage) -> None:
    """Exits of every kind are those of a new interpreter: codes, words, threads."""
    await _compare_family(stage, "leaving")


@behaviour("warm.raising")
async def raising(stage: Stage) -> None:
    """Uncaught exceptions have the traceback, the hooks and the exit code of a new interpreter."""
    await _compare_family(stage, "raising")


@behaviour("warm.syntax")
async def syntax(stage: Stage) -> None:
    """Code that does not compile, or only with warnings, is answered as by a new interpreter."""
    await _compare_family(stage, "syntax")


@behaviour("warm.signals")
async def signals(stage: Stage) -> None:
    """Signals do to a warm interpreter what they do to a new one, and so do handlers."""
    await _compare_family(stage, "signals")


@behaviour("warm.identity")
async def identity(stage: Stage) -> None:
    """What a program can ask Python about itself has the answers of a new interpreter."""
    await _compare_family(stage, "identity")


@behaviour("warm.process")
async def process(stage: Stage) -> None:
    """The process, its descriptors, limits and children are those of a new interpreter."""
    await _compare_family(stage, "process")


@behaviour("warm.ending")
async def ending(stage: Stage) -> None:
    """At the end, exit handlers, threads, finalizers and files do what they do in a new one."""
    await _compare_family(stage, "ending")


@behaviour("warm.output")
async def output(stage: Stage) -> None:
    """Output is buffered, encoded, flushed and lost as by a new interpreter."""
    await _compare_family(stage, "output")


@behaviour("warm.reading")
async def reading(stage: Stage) -> None:
    """Input is read as by a new interpreter."""
    await _compare_family(stage, "reading")


@behaviour("warm.places")
async def places(stage: Stage) -> None:
    """Environment and working folder are those of the call."""
    await _compare_family(stage, "places")


@behaviour("warm.off")
async def off(stage: Stage) -> None:
    """A call or an environment can ask for a new interpreter, and what must have one gets it."""
    sandbox = await _warmed(stage)
    calls: tuple[dict[str, Any], ...] = (
        {"warm": False},
        {"env": {"K8E_WARM": "0"}},
        {"env": {"PYTHONUNBUFFERED": "1"}},
        {"env": {"TZ": "Asia/Tokyo"}},
        {"env": {"LC_ALL": "C"}},
        {"env": {"HOME": "/tmp"}},  # noqa: S108 - a path in the sandbox
        {"env": {"LD_DEBUG_OUTPUT": "/dev/null"}},
        {"env": {"LD_LIBRARY_PATH": ""}},
        {"tty": [24, 80]},
    )
    for call in calls:
        done = await _run(sandbox, "print(1)", **call)
        equal((done.stdout.strip(), done.exit["warm"]), (b"1", False), f"{call}")
    equal((await sandbox.call("execs"))["warm"], 1, "interpreters that still wait")
    done = await until_warm(sandbox, lambda: _run(sandbox, "print(1)"))
    equal(done.exit["warm"], True, "without such a wish")


@behaviour("warm.packages")
async def packages(stage: Stage) -> None:
    """What was installed for the user since an interpreter started is there for the next run."""
    sandbox = await _warmed(stage)
    site = (await _run(sandbox, _SITE)).text.strip()
    for name, content, code in (
        ("brandnew.py", b"VALUE = 7", "import brandnew; print(brandnew.VALUE)"),
        ("start.pth", b"import sys; sys.from_pth = 7", "import sys; print(sys.from_pth)"),
        ("usercustomize.py", b"import sys; sys.custom = 7", "import sys; print(sys.custom)"),
        ("start.pth", b"import sys; sys.from_pth = 8 - 1 + 0", "import sys; print(sys.from_pth)"),
    ):
        await ready(sandbox)
        await sandbox.write(f"{site}/{name}", content)
        done = await _run(sandbox, code)
        equal((done.stdout, done.exit["warm"]), (b"7\n", False), f"{name}: {done.story()}")
        done = await until_warm(sandbox, partial(_run, sandbox, code))
        equal((done.stdout, done.exit["warm"]), (b"7\n", True), f"{name}, the second time")


@behaviour("warm.linked")
async def linked(stage: Stage) -> None:
    """Where a session's environment has variables for the linker, each program starts fresh."""
    sandbox = await stage.settle()
    await sandbox.guest.bind(Binding(env={**SHARED_ENV, "LD_LIBRARY_PATH": "/workspace"}))
    await _stays_cold(sandbox)


async def _stays_cold(sandbox: Sandbox) -> None:
    for _ in range(_TIMES):
        equal((await _run(sandbox, "print(1)")).exit["warm"], False, "whether it was warm")
    equal((await sandbox.call("execs"))["waiting"]["python"], 0, "interpreters that wait")


@behaviour("warm.unnamed")
async def unnamed(stage: Stage) -> None:
    """No Python waits where only Node.js was asked for, or nothing."""
    for warm in ({"node": ()}, {}):
        sandbox = await stage.settle()
        await sandbox.guest.bind(Binding(env=SHARED_ENV, warm=warm))
        await _stays_cold(sandbox)


@behaviour("warm.virtual")
async def virtual(stage: Stage) -> None:
    """What changes in a virtual environment on the session's PATH is there for the next run."""
    sandbox = await stage.settle()
    path = "/workspace/env/bin:/usr/local/bin:/usr/bin:/bin"
    await sandbox.guest.bind(Binding(env={**SHARED_ENV, "PATH": path}))
    equal((await _run(sandbox, "print(1)")).code, 0, "before there is one")
    equal((await sandbox.shell("python3 -m venv --without-pip env")).code, 0, "making one")
    found = (await sandbox.shell("echo env/lib/python*/site-packages")).text.strip()
    for number in range(_TIMES):
        # Of the same size, and often of the same moment.
        text = f"import sys; sys.from_pth = {100 + number}"
        await sandbox.write(f"/workspace/{found}/start.pth", text.encode())
        done = await _run(sandbox, "import sys; print(sys.prefix, sys.from_pth)")
        equal(done.text, f"/workspace/env {100 + number}\n", f"what it finds: {done.story()}")
        equal(done.exit["warm"], False, "whether it was warm")


@behaviour("warm.crowded")
async def crowded(stage: Stage) -> None:
    """Where a program made thousands of packages, code runs all the same."""
    sandbox = await _warmed(stage)
    site = (await _run(sandbox, _SITE)).text.strip()
    made = await sandbox.shell(f"cd {site} && seq 6000 | sed 's/$/.py/' | xargs touch")
    equal(made.code, 0, made.story())
    for _ in range(3):
        done = await _run(sandbox, "print(1)")
        equal((done.stdout, done.exit["warm"]), (b"1\n", False), done.story())
    equal((await sandbox.shell(f"cd {site} && rm -rf ../../* ; ln -s /proc ../..")).code, 0, "link")
    equal((await _run(sandbox, "print(1)")).stdout, b"1\n", "with a strange folder of packages")


@behaviour("warm.stopped")
async def stopped(stage: Stage) -> None:
    """An interpreter that a program stopped or killed swallows no run, and is replaced."""
    sandbox = await _warmed(stage)
    for number in (19, 9):
        await ready(sandbox)
        hit = await sandbox.shell(f"pkill -{number} -f fd/100")
        equal(hit.code, 0, "signalling those that wait")
        for _ in range(2):
            done = await _run(sandbox, "print(open('/workspace/runs', 'a').write('x'))")
            equal((done.stdout, done.code), (b"1\n", 0), done.story())
    equal(await sandbox.read("/workspace/runs"), b"xxxx", "each program ran once")
    await ready(sandbox)


@behaviour("warm.parallel")
async def parallel(stage: Stage) -> None:
    """Of many programs at once each runs exactly once, warm or not, with its own output."""
    sandbox = await _warmed(stage)
    code = "import os\nos.write(os.open('runs', os.O_CREAT | os.O_APPEND | os.O_WRONLY), b'x')"
    for _ in range(3):
        await ready(sandbox)
        runs = [_run(sandbox, f"{code}\nprint({number})") for number in range(12)]
        for number, done in enumerate(await asyncio.gather(*runs)):
            equal(done.stdout, b"%d\n" % number, done.story())
    equal(len(await sandbox.read("/workspace/runs")), 36, "programs that ran")


@behaviour("warm.alone")
async def alone(stage: Stage) -> None:
    """A warm interpreter runs one program: nothing of it reaches the next."""
    sandbox = await _warmed(stage)
    code = "import sys, os\nprint(hasattr(sys, 'mark'), hash('x'), os.getpid())\nsys.mark = 1"
    told: list[list[bytes]] = []
    for _ in range(3):
        done = await until_warm(sandbox, lambda: _run(sandbox, code))
        equal(done.exit["warm"], True, done.story())
        told.append(done.stdout.split())
    for item in zip(*told, strict=True):
        wanted = 1 if item[0] == b"False" else 3
        equal(len(set(item)), wanted, f"different values among {item}")


@behaviour("warm.timeout")
async def timeout(stage: Stage) -> None:
    """A warm run is an exec: it is listed, it is timed out, and its children end with it."""
    sandbox = await _warmed(stage)
    code = b"import os, time\nprint(os.fork() > 0, flush=True)\ntime.sleep(600)"

    async def check(seconds: float) -> None:
        await ready(sandbox)
        program = await sandbox.start(code=code, language="python", timeout=seconds)
        await program.until(b"True")
        listed = await sandbox.describe(program.id)
        equal((listed["warm"], listed["argv"][0]), (True, "python3"), "its description")
        done = await program.finish()
        equal((done.status, done.exit["warm"]), ("timed_out", True), done.story())

    await with_time(check)


@behaviour("warm.small-session")
async def small_session(stage: Stage) -> None:
    """A session with few processes keeps no interpreters: it needs what it has."""
    sandbox = await stage.launch(pids=20)
    for _ in range(3):
        done = await _run(sandbox, "print(1)")
        equal((done.stdout, done.exit["warm"]), (b"1\n", False), done.story())
    equal((await sandbox.call("execs"))["warm"], 0, "interpreters that wait")


@behaviour("warm.room")
async def room(stage: Stage) -> None:
    """Where no more processes are allowed, interpreters that wait make room for a program."""
    sandbox = await _warmed(stage, pids=40)
    filler = (
        "import os, time\nn = 0\n"
        "try:\n    while True:\n        if os.fork() == 0: time.sleep(600)\n        n += 1\n"
        "except OSError: print('full', flush=True)\ntime.sleep(600)"
    )
    full = await sandbox.start(["/usr/bin/python3", "-c", filler])
    await full.until(b"full")
    done = await sandbox.run(["/bin/true"])
    equal(done.code, 0, "a program beside a full sandbox")
    await sandbox.call("signal", id=full.id, terminate=True)
    await full.finish()


_STEP = 1 if EVERY_SNIPPET else 7
"""Nodes start slowly, and all programs are tried without a sandbox: here, one of so many."""
_PID = re.compile(rb"\(node:\d+\)")
# What cannot be run as a script goes to a new one, which has the words for it.
_NO_SCRIPT = ("export ", "await ", "foo bar", "return ")


async def _run_node(
    sandbox: Sandbox, code: str, *, stdin: bytes | None = None, **call: Any
) -> Outcome:
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
        await _run_node(sandbox, "1")
        await ready(sandbox, "node")


async def _compare_node(sandbox: Sandbox, snippet: Snippet) -> str:
    await _first(sandbox)
    new = await _run_node(sandbox, snippet.code, warm=False)
    await ready(sandbox, "node")
    usual = not snippet.code.startswith(_NO_SCRIPT) and "crypto" not in snippet.code
    usual = usual and b"SyntaxError" not in new.stderr
    if usual:
        warm = await until_warm(sandbox, lambda: _run_node(sandbox, snippet.code), "node")
    else:
        warm = await _run_node(sandbox, snippet.code)
    if usual and not warm.exit["warm"]:
        return f"{snippet} was not run by a warm Node"
    return "" if seen(warm) == seen(new) else f"{snippet}: {seen(warm)} instead of {seen(new)}"


@behaviour("warm.node")
async def node(stage: Stage) -> None:
    """After the first code in Node.js, one that waits does what a new one would."""
    await compare_all(stage, NODE[::_STEP], _compare_node)


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
        done = await _run_node(sandbox, "console.log(require('fs').readFileSync(0).length)", **call)
        size = len(call.get("stdin", b""))
        equal((done.stdout, done.exit["warm"]), (b"%d\n" % size, False), f"{call}")
    done = await until_warm(sandbox, lambda: _run_node(sandbox, "console.log(1)"), "node")
    equal(done.exit["warm"], True, "without such a wish")
