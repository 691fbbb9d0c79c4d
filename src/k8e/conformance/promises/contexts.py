"""Contexts: code that keeps its variables between runs, with results beyond text."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, Outcome, Program, Sandbox
from k8e.conformance.stage import Stage

GRACE = 20.0  # seconds that code has to stop, on a busy machine too
AT_ONCE = 5  # times that code of each kind is interrupted just as it begins
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


class Context:
    """A context of a sandbox."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self.sandbox = sandbox
        self.id = name

    async def start(self, code: str, **call: Any) -> Program:
        call = {"timeout": PATIENCE, **call}
        return await self.sandbox.start(code=code.encode(), context=self.id, **call)

    async def run(self, code: str, **call: Any) -> Outcome:
        return await (await self.start(code, **call)).finish()

    async def text(self, code: str, **call: Any) -> str:
        """The text of the last expression of some code."""
        done = await self.run(code, **call)
        shown = [item["data"]["text/plain"] for item in done.shown if item["main"]]
        expect(len(shown) == 1 and not done.code, f"{code!r}: {done.story()}")
        return str(shown[0])

    async def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        return await self.sandbox.call(f"{op}_context", id=self.id, **arguments)

    async def state(self) -> str:
        for item in (await self.sandbox.call("list_contexts"))["contexts"]:
            if item["id"] == self.id:
                return str(item["state"])
        return "none"


@contextlib.asynccontextmanager
async def fresh(sandbox: Sandbox, **call: Any) -> AsyncGenerator[Context]:
    """A context for as long as the block runs."""
    made = await sandbox.call("create_context", **call)
    context = Context(sandbox, str(made["id"]))
    try:
        yield context
    finally:
        await context.call("remove")


def error_of(done: Outcome) -> dict[str, str]:
    error: Any = done.exit.get("error")
    expect(isinstance(error, dict), f"no error was told: {done.story()}")
    return error


@behaviour("context.keeping")
async def keeping(stage: Stage) -> None:
    """Variables, imports and the folder live from one run to the next, and in no other context."""
    sandbox = await stage.shared()
    async with fresh(sandbox) as one, fresh(sandbox, cwd="/home/user") as two:
        first = await one.run(
            "import os, math\nx = 40\ndef add(n):\n    return x + n\nprint('made')"
        )
        equal((first.text, first.code, first.shown), ("made\n", 0, []), "the first run")
        equal(await one.text("add(2)"), "42", "a function that was made before")
        equal(await one.text("_ + 1"), "43", "the last result")
        equal(await one.text("os.getcwd(), __name__"), "('/workspace', '__main__')", "its place")
        equal(error_of(await two.run("x"))["name"], "NameError", "another context")
        await two.run("import os; os.mkdir('/home/user/there'); os.chdir('/home/user/there')")
        equal(await two.text("os.getcwd()"), "'/home/user/there'", "a folder that was gone to")
        counts = [(await one.run("1")).exit["execution_count"] for _ in range(2)]
        equal(counts, [5, 6], "execution counts")
        equal(await one.text("os.getuid(), os.environ['GREETING'][:5]"), "(1000, 'hello')", "ids")
        set_once = "os.environ.get('ONCE')"
        equal(await one.text(set_once, env={"ONCE": "a'b\"$c"}), "'a\\'b\"$c'", "a variable")
        equal((await one.run(set_once)).shown, [], "that variable, one run later")


_RICH = """
class Rich:
    def __repr__(self): return 'rich'
    def _repr_html_(self): return '<b>rich</b>'
    def _repr_markdown_(self): return '**rich**'
    def _repr_svg_(self): return '<svg/>'
    def _repr_png_(self): return PICTURE
    def _repr_jpeg_(self): return b'jpeg'
    def _repr_latex_(self): return '$r$'
    def _repr_json_(self): return {'rich': [1, None]}
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {'text/plain': 'bundle', 'application/x-own': 'own'}, {}
class Half:
    def __repr__(self): return 'half'
    def _repr_html_(self): raise ValueError('no html')
class Broken:
    def __repr__(self): raise ValueError('no repr')
"""


@behaviour("context.results")
async def results(stage: Stage) -> None:
    """Results come in every form that a value has, in their place among the output."""
    async with fresh(await stage.shared()) as context:
        await context.run(f"PICTURE = {PICTURE!r}\n{_RICH}")
        done = await context.run("print('one'); display(Bundle()); print('two')\nRich()")
        equal([item["main"] for item in done.shown], [False, True], "which one is the result")
        equal(done.shown[0]["data"], {"text/plain": "bundle", "application/x-own": "own"}, "bundle")
        wanted = {
            "text/html": "<b>rich</b>",
            "text/markdown": "**rich**",
            "image/svg+xml": "<svg/>",
            "image/png": PICTURE,
            "image/jpeg": b"jpeg",
            "text/latex": "$r$",
            "application/json": '{"rich": [1, null]}',
            "text/plain": "rich",
        }
        equal(done.shown[1]["data"], wanted, "a rich result")
        half = await context.run("Half()")
        equal(half.shown[0]["data"], {"text/plain": "half"}, "a way that fails")
        expect(b"no html" in half.stderr, "a failing way to look was not told")
        equal(error_of(await context.run("Broken()"))["value"], "no repr", "a failing __repr__")
        order = await context.start("print('A'); display(1); print('B'); display(2); print('C')")
        equal(await _order(order), "A1B2C", "what was printed and shown")
        equal((await context.run("5;")).shown, [], "a result with a semicolon")


async def _order(program: Program) -> str:
    seen = ""
    while await program.take():
        text = program.outcome.text.replace("\n", "")
        shown = "".join(item["data"]["text/plain"] for item in program.outcome.shown)
        new = [part for part in text + shown if part not in seen]
        seen += "".join(new)
    return seen


@behaviour("context.errors")
async def failing(stage: Stage) -> None:
    """Errors have name, value and the traceback that Python shows, and the context stays."""
    async with fresh(await stage.shared()) as context:
        await context.run("kept = 1\ndef divide(a):\n    return a / 0  # the line")
        done = await context.run("divide(1)")
        error = error_of(done)
        equal(
            (error["name"], error["value"], done.code),
            ("ZeroDivisionError", "division by zero", 1),
            "",
        )
        expect("return a / 0  # the line" in error["traceback"], f"no line: {error['traceback']}")
        expect("_run_cell" not in error["traceback"], f"our frames: {error['traceback']}")
        equal(error_of(await context.run("1 +"))["name"], "SyntaxError", "what is no code")
        left = await context.run("raise SystemExit(3)")
        equal((left.code, error_of(left)["name"]), (3, "SystemExit"), "leaving")
        equal((await context.run("import sys; sys.exit()")).exit.get("error"), None, "leaving well")
        expect("stdin" in error_of(await context.run("input('name? ')"))["value"], "input()")
        waited = (
            "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\nawait f()"
        )
        equal(await context.text(waited), "7", "await")
        equal(await context.text("kept"), "1", "a variable after all that")


@behaviour("context.output")
async def printing(stage: Stage) -> None:
    """What programs of a context print is its output, also between two runs and past a limit."""
    async with fresh(await stage.shared()) as context:
        done = await context.run(
            "import os, subprocess, sys\nsubprocess.run('echo sub; echo err >&2', shell=True)\n"
            "os.write(1, b'raw\\n'); print('py', file=sys.stderr)"
        )
        expect("sub\n" in done.text and "raw\n" in done.text, f"lost: {done.story()}")
        equal(sorted(done.stderr.split()), [b"err", b"py"], "stderr")
        await context.run(
            "import threading\ngo, gone = threading.Event(), threading.Event()\n"
            "def later():\n    go.wait(); print('from a thread'); gone.set()\n"
            "threading.Thread(target=later).start()\nthreading.Timer(0.1, go.set).start()"
        )
        after = await context.run("gone.wait(); print('next')")
        equal(sorted(after.text.splitlines()), ["from a thread", "next"], "between two runs")
        much = await context.run("print('x' * (1 << 20) * 64)", limit=1000)
        equal((len(much.stdout), much.exit["truncated"]), (1000, True), "output past the limit")
        await context.run("import io; sys.stdout = io.StringIO(); print('hidden')")
        equal(await context.text("sys.stdout.getvalue()"), "'hidden\\n'", "another stdout")
        await context.run("sys.stdout = None")
        await context.run("sys.stdout = sys.__stdout__")
        equal((await context.run("print('back')")).text, "back\n", "stdout")


@behaviour("context.interrupting")
async def interrupting(stage: Stage) -> None:
    """An interrupt stops what runs and leaves the variables; code that goes on is reported."""
    async with fresh(await stage.shared()) as context:
        await context.run("import time, subprocess, asyncio\nkept = 5")
        for code in (
            "print('on'); time.sleep(60)",
            "print('on')\nwhile True: pass",
            "print('on'); subprocess.run(['sleep', '60'])",
            "print('on'); await asyncio.sleep(60)",
        ):
            program = await context.start(code)
            await program.until(b"on\n")
            told = await context.call("interrupt", grace=GRACE)
            equal((told["interrupted"], told["stopped"]), (True, True), f"interrupting {code!r}")
            done = await program.finish()
            equal((error_of(done)["name"], done.code), ("KeyboardInterrupt", 130), code)
        equal(await context.text("kept"), "5", "a variable after interrupts")
        equal((await context.call("interrupt"))["interrupted"], False, "interrupting nothing")
        left = await context.start("print('on'); time.sleep(60)", kill_on_disconnect=True)
        await left.until(b"on\n")
        left.cancel()
        equal(await context.text("kept + 1"), "6", "after the caller had left")
        deaf = (
            "while True:\n    try:\n        print('on')\n        time.sleep(60)\n"
            "    except KeyboardInterrupt: pass"
        )
        program = await context.start(deaf)
        await program.until(b"on\n")
        equal((await context.call("interrupt", grace=0.3))["stopped"], False, "deaf code")
        equal(await context.state(), "busy", "its context")
        await context.call("restart")
        equal((await program.finish()).status, "killed", "the run that was ended by a restart")
        equal(error_of(await context.run("kept"))["name"], "NameError", "after a restart")
        await context.call("restart")
        early = await context.start("while True: pass")
        next_ = await context.start("7")
        told = await context.call("interrupt", grace=GRACE)
        equal((told["interrupted"], told["stopped"]), (True, True), "while it starts")
        equal((await early.finish()).code, 130, "code that was interrupted before it began")
        equal((await next_.finish()).code, 0, "what was behind it in the line")
        await interrupt_at_once(context, "while True: pass", "import time; time.sleep(60)")


async def interrupt_at_once(context: Context, *codes: str) -> None:
    """Interrupt code just as it begins, which must not be lost; often, for it is a short moment."""
    for code in codes * AT_ONCE:
        early = await context.start(code)
        told = await context.call("interrupt", grace=GRACE)
        equal(told["stopped"], True, f"interrupting {code!r} as it begins")
        equal((await early.finish()).code, 130, f"{code!r}, interrupted as it began")


@behaviour("context.timeouts")
async def timing_out(stage: Stage) -> None:
    """A time-out interrupts, and ends the context only if that does not help; both are reported."""
    async with fresh(await stage.shared()) as context:
        await context.run("import time; kept = 5")
        done = await context.run("time.sleep(60)", timeout=0.3)
        equal((done.status, done.exit["context_state"]), ("timed_out", "ready"), "a time-out")
        equal(await context.text("kept"), "5", "a variable after a time-out")
        unread = await context.start(
            "while True: print('x' * 100_000)", timeout=2.0, generous=False
        )
        await unread.until(b"x\n", times=5)
        equal(await context.text("kept"), "5", "after a time-out of what nobody reads")
        deaf = "while True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass"
        done = await context.run(deaf, timeout=0.3)
        equal((done.status, done.exit["context_state"]), ("timed_out", "ended"), "deaf code")
        await _says_ended(context, "did not stop")
        equal((await context.call("restart"))["execution_count"], 0, "counts after a restart")
        equal(await context.text("6 * 7"), "42", "after a restart")


async def _says_ended(context: Context, why: str) -> None:
    try:
        await context.run("1")
    except errors.ContextEnded as error:
        expect(why in error.message, f"{error.message!r} does not say {why!r}")
        return
    raise BrokenPromise("code ran in a context that had ended")


@behaviour("context.deaths")
async def dying(stage: Stage) -> None:
    """A context that dies says how, the next run says so too, and a restart gives a new one."""
    sandbox = await stage.shared()
    async with fresh(sandbox) as context:
        for code, said, status in (
            ("import os; os._exit(7)", "code 7", 7),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", 139),
            ("import os, time\nif os.fork(): os._exit(3)\ntime.sleep(60)", "code 3", 3),
        ):
            done = await context.run(f"print('before', flush=True)\n{code}")
            equal((done.code, done.text), (status, "before\n"), code)
            expect(said in error_of(done)["value"], f"{error_of(done)} does not say {said!r}")
            equal(done.exit["context_state"], "ended", "its state")
            await _says_ended(context, said)
            await context.call("restart")
        equal(await context.text("2 + 2"), "4", "after three restarts")
        pid = await context.text("import os; os.getpid()")
    gone = f"for n in $(seq 100); do kill -0 {pid} 2>&- || exit 0; sleep 0.05; done; exit 1"
    equal((await sandbox.shell(gone)).code, 0, "the end of the program of a removed context")
    try:
        await context.run("1")
    except errors.ContextNotFound:
        return
    raise BrokenPromise("code ran in a context that was removed")


@behaviour("context.line")
async def lining_up(stage: Stage) -> None:
    """A context runs one thing at a time, in the order of calls; who leaves the line is not run."""
    async with fresh(await stage.shared()) as context:
        await context.run("import time, threading; seen = []; go = threading.Event()")
        first = await context.start("print('on', flush=True); go.wait(); seen.append(1)")
        await first.until(b"on\n")
        second = await context.start("seen.append(2)")
        third = await context.start("seen.append(3)", kill_on_disconnect=True)
        fourth = await context.start("seen.append(4)", timeout=0.1)
        third.cancel()
        equal((await fourth.finish()).status, "timed_out", "time in the line counts")
        equal((await context.call("interrupt", grace=GRACE))["stopped"], True, "the first one")
        await first.finish()
        await second.finish()
        equal(await context.text("seen"), "[2]", "what ran")
        one = await context.start("seen.append(5)")
        equal(one.info["execution_count"], 7, "its number is known at once")
        await one.finish()


@behaviour("context.attaching")
async def attaching(stage: Stage) -> None:
    """A run in a context outlives the link, and is read again from its first byte."""
    sandbox = await stage.shared()
    async with fresh(sandbox) as context:
        program = await context.start(
            "print('begun', flush=True)\nimport time; time.sleep(0.4)\n'value'"
        )
        await program.until(b"begun\n")
        link = await sandbox.guest.connect()
        link.close()
        await program.lost.wait()
        again = await sandbox.attach(program.id)
        done = await again.finish()
        equal((done.text, done.shown[0]["data"]), ("begun\n", {"text/plain": "'value'"}), "again")
        big = await context.run("b = b'p' * 3_000_000\ndisplay({'image/png': b}, raw=True)")
        equal(big.shown[0]["data"]["image/png"], b"p" * 3_000_000, "a large picture")


_FIND_CONTROL = """
import os
control = [int(fd) for fd in os.listdir('/proc/self/fd')
           if os.path.islink(f'/proc/self/fd/{fd}')
           and os.readlink(f'/proc/self/fd/{fd}').startswith('socket')][0]
"""


@behaviour("context.attacks")
async def attacking(stage: Stage) -> None:
    """Whatever a program does to its context, it harms only that, and its end is reported."""
    sandbox = await stage.shared()
    async with fresh(sandbox) as victim, fresh(sandbox) as context:
        await victim.run("kept = 1")
        for code in (
            "os.write(control, b'\\xff' * 4096)",
            "os.close(control)",
            "os.write(control, bytes([0, 128, 0, 1, 21, 0, 0, 0, 9]) + b'x' * 100)",
            "os.write(control, bytes([0, 0, 0, 5, 21, 0, 0, 0, 1]) + b'd\\xff\\xff\\xff\\xff')",
        ):
            done = await context.run(f"{_FIND_CONTROL}\n{code}\nimport time; time.sleep(60)")
            equal(done.exit["context_state"], "ended", code)
            await context.call("restart")
        forged = "bytes([0, 0, 0, 15, 20, 0, 0, 0, 1]) + b'd' + bytes([0, 0, 0, 1]) + b's'"
        forged += " + bytes([0, 0, 0, 4]) + b'code' + b'N'"
        done = await context.run(f"{_FIND_CONTROL}\nos.write(control, {forged})")
        equal(done.code, 1, "an end that says nonsense")
        await context.call("restart")
        huge = await context.run("display({'image/png': b'x' * (64 << 20)}, raw=True); 1")
        equal(huge.shown[0], {"data": {}, "main": False, "left_out": ["image/png"]}, "too large")
        flood = await context.run("for n in range(500): display(n)", window=4 << 20)
        equal(len(flood.shown), 500, "many results")
        endless = "class E:\n    def __repr__(self):\n        while True: pass\nE()"
        equal((await context.run(endless, timeout=0.5)).status, "timed_out", "an endless repr")
        equal(await victim.text("kept"), "1", "the other context")


@behaviour("context.bash")
async def in_bash(stage: Stage) -> None:
    """A context of bash keeps variables, functions and its folder, and survives an interrupt."""
    async with fresh(await stage.shared(), language="bash") as context:
        done = await context.run(
            'x=5; f() { echo "f $1 $x"; }; mkdir -p deep; cd deep; declare -A m=([k]=v)'
        )
        equal((done.stdout, done.stderr, done.code), (b"", b"", 0), "the first run")
        equal(
            (await context.run("f a; pwd; echo ${m[k]}")).text,
            "f a 5\n/workspace/deep\nv\n",
            "kept",
        )
        equal((await context.run("false")).code, 1, "an exit code")
        bad = await context.run("if then")
        expect(bad.code and b"syntax error" in bad.stderr, f"no code: {bad.story()}")
        equal((await context.run('cat; read -r y; echo "<$y>"')).text, "<>\n", "stdin")
        equal((await context.run("echo $ONCE", env={"ONCE": "a'b"})).text, "a'b\n", "a variable")
        equal((await context.run("echo $ONCE")).text, "\n", "that variable, one run later")
        for code in ("echo on; sleep 60", "echo on; while :; do :; done"):
            program = await context.start(code)
            await program.until(b"on\n")
            equal((await context.call("interrupt", grace=GRACE))["stopped"], True, code)
            equal((await program.finish()).code, 130, code)
        await interrupt_at_once(context, "sleep 60", "while :; do :; done")
        equal((await context.run("echo $x")).text, "5\n", "a variable after interrupts")
        gone = await context.run("exit 4")
        equal((gone.code, gone.exit["context_state"]), (4, "ended"), "leaving")


@behaviour("context.node")
async def in_node(stage: Stage) -> None:
    """A context of Node keeps declarations, also repeated ones; it awaits and stops."""
    async with fresh(await stage.shared(), language="javascript") as context:
        equal((await context.run("const x = 1; let y = 2; console.log('made')")).text, "made\n", "")
        equal(await context.text("x + y"), "3", "what was declared before")
        equal(await context.text("const x = 5; x"), "5", "what is declared again")
        waited = "await new Promise((done) => setTimeout(() => done({a: [1]}), 5))"
        done = await context.run(waited)
        wanted = {"application/json": '{"a":[1]}', "text/plain": "{ a: [ 1 ] }"}
        equal(done.shown[0]["data"], wanted, "await")
        error = error_of(await context.run("function f() {\n  null.z\n}\nf()"))
        equal(error["name"], "TypeError", "an error")
        expect("at f (cell-5.js:2" in error["traceback"], f"no line: {error['traceback']}")
        expect("node:" not in error["traceback"], f"our frames: {error['traceback']}")
        for code in (
            "console.log('on'); while (true) {}",
            "console.log('on'); await new Promise((done) => setTimeout(done, 60000))",
        ):
            program = await context.start(code)
            await program.until(b"on\n")
            equal((await context.call("interrupt", grace=GRACE))["stopped"], True, code)
            equal((await program.finish()).code, 130, code)
        equal(await context.text("x", env={"ONCE": "1"}), "5", "a variable after interrupts")
        gone = await context.run("process.exit(6)")
        equal((gone.code, gone.exit["context_state"]), (6, "ended"), "leaving")
