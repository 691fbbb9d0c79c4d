"""Contexts under attack by what runs in them, and contexts of other languages than Python."""

from __future__ import annotations

from k8e.conformance.behaviours import behaviour, equal, expect
from k8e.conformance.contexts import error_of, fresh
from k8e.conformance.stage import Stage

_FIND_CONTROL = """
import os
control = [int(fd) for fd in os.listdir('/proc/self/fd')
           if os.path.islink(f'/proc/self/fd/{fd}')
           and os.readlink(f'/proc/self/fd/{fd}').startswith('socket')][0]
"""


@behaviour("context.attacks")
async def attacking(stage: Stage) -> None:
    """Whatever a program does to its context, it harms only that, and the end is told."""
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
            equal((await context.call("interrupt"))["stopped"], True, code)
            equal((await program.finish()).code, 130, code)
        equal((await context.run("echo $x")).text, "5\n", "a variable after interrupts")
        gone = await context.run("exit 4")
        equal((gone.code, gone.exit["context_state"]), (4, "ended"), "leaving")


@behaviour("context.node")
async def in_node(stage: Stage) -> None:
    """A context of Node keeps what is declared, also if declared again; it awaits and stops."""
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
            equal((await context.call("interrupt"))["stopped"], True, code)
            equal((await program.finish()).code, 130, code)
        equal(await context.text("x", env={"ONCE": "1"}), "5", "a variable after interrupts")
        gone = await context.run("process.exit(6)")
        equal((gone.code, gone.exit["context_state"]), (6, "ended"), "leaving")
