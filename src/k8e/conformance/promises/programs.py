"""Programs and code in each language: how they start, what they get, what comes back."""

from __future__ import annotations

import asyncio
import hashlib

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.sandbox import PYTHON, Sandbox
from k8e.conformance.stage import SHARED_ENV, Stage
from k8e.guest import wire
from k8e.model import MIB

PARALLEL = 200
MANY = 100
LARGE_INPUT = 8 * MIB
EVERY_BYTE = bytes(range(256))


@behaviour("exec.separate-streams")
async def separate_streams(stage: Stage) -> None:
    """Stdout and stderr arrive separately and byte for byte, NUL and invalid UTF-8 included."""
    script = (
        "import os; every = bytes(range(256)); os.write(1, every + b'\\xff\\xfe\\0out');"
        "os.write(2, every[::-1] + b'\\xc3(\\0err')"
    )
    done = await (await stage.shared()).python(script)
    equal(done.stdout, EVERY_BYTE + b"\xff\xfe\0out", "stdout")
    equal(done.stderr, EVERY_BYTE[::-1] + b"\xc3(\0err", "stderr")
    equal(done.code, 0, "exit code")


@behaviour("exec.exit-code")
async def exit_code(stage: Stage) -> None:
    """The exit code of a program is its own, from 0 to 255."""
    sandbox = await stage.shared()
    for code in (0, 1, 2, 42, 126, 127, 128, 130, 137, 200, 254, 255):
        done = await sandbox.run(["/bin/sh", "-c", f"exit {code}"])
        equal((done.code, done.status), (code, "completed"), f"exit {code}")


@behaviour("exec.signal-exit")
async def signal_exit(stage: Stage) -> None:
    """A program that a signal ended has exit code 128 plus the signal's number."""
    sandbox = await stage.shared()
    for number in (1, 2, 6, 9, 11, 13, 15):
        done = await sandbox.run(["/bin/sh", "-c", f"kill -{number} $$"])
        equal((done.code, done.exit["signal"]), (128 + number, number), f"signal {number}")


@behaviour("exec.plain-command")
async def plain_command(stage: Stage) -> None:
    """A line without shell syntax runs as the shell would run it, though none is started."""
    sandbox = await stage.shared()
    setup = (
        "mkdir -p real; ln -sfn real linked; printf 'echo ran' > linked/bare; chmod +x real/bare"
    )
    equal((await sandbox.run(["/bin/sh", "-c", setup])).code, 0, "setup")
    for line in ("env", "true", "false", "./bare", "no-such-program -x", "/workspace", "id -u"):
        plain = await sandbox.run(["/bin/sh", "-c", line], cwd="linked/../linked")
        shell = await sandbox.run(["/bin/sh", "-c", f"exec {line}"], cwd="linked/../linked")
        equal(sorted(plain.stdout.splitlines()), sorted(shell.stdout.splitlines()), line)
        equal(plain.code, shell.code, f"exit code of {line!r}")
        equal(bool(plain.stderr), bool(shell.stderr), f"stderr of {line!r}")


@behaviour("exec.stdin")
async def stdin(stage: Stage) -> None:
    """Input arrives unchanged, and closing stdin ends the program's input."""
    program = await (await stage.shared()).start(["cat"], stdin=True)
    await program.type(EVERY_BYTE)
    await program.until(EVERY_BYTE)
    await program.type(b"more")
    program.end_input()
    done = await program.finish()
    equal((done.stdout, done.code), (EVERY_BYTE + b"more", 0), "output of cat")


@behaviour("exec.empty-stdin")
async def empty_stdin(stage: Stage) -> None:
    """A piece of input that is empty is not the end of the input."""
    program = await (await stage.shared()).start(["cat"], stdin=True)
    program.send(wire.STDIN)
    await program.type(b"after nothing")
    program.end_input()
    equal((await program.finish()).stdout, b"after nothing", "output of cat")


@behaviour("exec.no-stdin")
async def no_stdin(stage: Stage) -> None:
    """Without stdin a program reads an end of file at once."""
    done = await (await stage.shared()).run(["cat"])
    equal((done.stdout, done.code), (b"", 0), "cat without input")


@behaviour("exec.large-stdin")
async def large_stdin(stage: Stage) -> None:
    """Megabytes of stdin reach a program that reads late and slowly, under flow control."""
    sandbox = await stage.shared()
    script = (
        "import hashlib, os, sys; print('ready', flush=True); digest = hashlib.sha256()\n"
        "while data := os.read(0, 10000): digest.update(data)\n"
        "print(digest.hexdigest())"
    )
    program = await sandbox.start([PYTHON, "-c", script], stdin=True)
    data = bytes(1000) + EVERY_BYTE * (LARGE_INPUT // 256)
    async with asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(program.type(data))
        await program.until(b"ready")
        await feeding
        program.end_input()
    done = await program.finish()
    equal(done.text.split()[-1], hashlib.sha256(data).hexdigest(), "digest of stdin")


@behaviour("exec.stdin-unread")
async def stdin_unread(stage: Stage) -> None:
    """A program that ends without reading its stdin ends all the same, and so does the feeding."""
    program = await (await stage.shared()).start(["/bin/sh", "-c", "exit 7"], stdin=True)
    await program.type(bytes(4 * MIB))
    program.end_input()
    equal((await program.finish()).code, 7, "exit code")


@behaviour("exec.parallel")
async def parallel(stage: Stage) -> None:
    """Two hundred programs run at once over one link, each with its own input and output."""
    sandbox = await stage.shared()
    programs = [await sandbox.start(["cat"], stdin=True) for _ in range(PARALLEL)]
    for number, program in enumerate(programs):
        await program.type(b"program %d\n" % number)
    for number, program in enumerate(programs):  # every one has answered, none has ended
        await program.until(b"program %d\n" % number)
    for program in programs:
        program.end_input()
    for number, program in enumerate(programs):
        done = await program.finish()
        equal((done.stdout, done.code), (b"program %d\n" % number, 0), f"program {number}")


@behaviour("exec.many-listed")
async def many_listed(stage: Stage) -> None:
    """Any number of programs with any arguments can be listed; the newest are."""
    sandbox = await stage.shared()
    argv = ["/bin/sh", "-c", "read x", *["🦊" * 250] * 16]
    programs = [await sandbox.start(argv, stdin=True) for _ in range(MANY)]
    link = await sandbox.guest.connect()
    listed = (await sandbox.call("execs"))["execs"]
    newest = [program.id for program in programs[-50:]]
    equal([item["id"] for item in listed][-50:], newest, "the newest programs")
    equal(listed[-1]["argv"][:3], argv[:3], "arguments")
    for program in programs:
        program.end_input()
    for program in programs:
        equal((await program.finish()).code, 1, "exit code")
    expect(await sandbox.guest.connect() is link, "the guest lost its link")


@behaviour("exec.environment")
async def environment(stage: Stage) -> None:
    """A program gets the session's environment and its own, nothing of the guest's or host's."""
    sandbox = await stage.shared()
    done = await sandbox.run(["/usr/bin/env", "-0"], env={"COLOUR": "red\nblue", "EMPTY": ""})
    seen = dict(item.split("=", 1) for item in done.text.split("\0") if item)
    equal(seen.pop("COLOUR", None), "red\nblue", "variable of the call")
    equal(seen.pop("EMPTY", None), "", "empty variable of the call")
    for name, value in SHARED_ENV.items():
        equal(seen.pop(name, None), value, "variable of the session")
    usual = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "SHELL"}
    seen = {name: value for name, value in seen.items() if not name.startswith("PIP_")}
    expect(set(seen) <= usual, f"unexpected variables {sorted(set(seen) - usual)}")


@behaviour("exec.working-directory")
async def working_directory(stage: Stage) -> None:
    """A program starts in /workspace, or where the call says, relative to it or not."""
    sandbox = await stage.shared()
    await sandbox.call("mkdir", path="/workspace/inner")
    for cwd, wanted in ((None, "/workspace"), ("inner", "/workspace/inner"), ("/tmp", "/tmp")):  # noqa: S108 - a path in the sandbox
        call = {"cwd": cwd} if cwd else {}
        equal((await sandbox.run(["pwd"], **call)).text.strip(), wanted, f"cwd {cwd!r}")


@behaviour("exec.missing-directory")
async def missing_directory(stage: Stage) -> None:
    """A working directory that does not exist is an error that says so."""
    sandbox = await stage.shared()
    await _refused(stage, FileNotFoundError, ["pwd"], cwd="/nowhere")
    await sandbox.write("/workspace/file", b"")
    await _refused(stage, NotADirectoryError, ["pwd"], cwd="/workspace/file")


@behaviour("exec.command-not-found")
async def command_not_found(stage: Stage) -> None:
    """A command that does not exist, or may not be run, is an error that says so."""
    sandbox = await stage.shared()
    await _refused(stage, FileNotFoundError, ["no-such-command"])
    await _refused(stage, FileNotFoundError, ["/usr/bin/no-such-command"])
    await sandbox.write("/workspace/plain", b"#!/bin/sh\n", mode=0o644)
    await _refused(stage, PermissionError, ["/workspace/plain"])
    await sandbox.write("/workspace/not-on-path", b"#!/bin/sh\n", mode=0o755)
    await _refused(stage, FileNotFoundError, ["not-on-path"], cwd="/workspace")


async def _refused(stage: Stage, kind: type[OSError], argv: list[str], cwd: str = "") -> None:
    sandbox = await stage.shared()
    try:
        await sandbox.start(argv, cwd=cwd)
    except kind:
        return
    except (errors.K8eError, OSError) as error:
        equal(type(error).__name__, kind.__name__, f"starting {argv} in {cwd!r}: {error}")
    raise BrokenPromise(f"{argv} in {cwd!r} started")


@behaviour("exec.own-programs")
async def own_programs(stage: Stage) -> None:
    """Programs that the session wrote itself run: scripts by path, by cwd and by PATH."""
    sandbox = await stage.shared()
    await sandbox.write("/workspace/bin/greet", b"#!/bin/sh\necho hi $1\n", mode=0o755)
    for argv, call in (
        (["/workspace/bin/greet", "a"], {}),
        (["./greet", "a"], {"cwd": "/workspace/bin"}),
        (["greet", "a"], {"env": {"PATH": "/workspace/bin:/usr/bin:/bin"}}),
    ):
        equal((await sandbox.run(argv, **call)).stdout, b"hi a\n", f"{argv} with {call}")


@behaviour("exec.clean-start")
async def clean_start(stage: Stage) -> None:
    """A program starts with default signals, an empty mask and no descriptors beyond 0 to 2."""
    sandbox = await stage.shared()
    listing = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    equal((await sandbox.python(listing)).text.strip(), "[0, 1, 2]", "descriptors")
    other = await sandbox.start(["cat"], stdin=True)
    seen = (await sandbox.python(listing)).text.strip()
    equal(seen, "[0, 1, 2]", "descriptors while another program has pipes")
    other.end_input()
    mask = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    equal((await sandbox.python(mask)).text.strip(), "set()", "signal mask")
    # A shell lists what it was told to ignore; yes must die of a closed pipe, quietly.
    done = await sandbox.shell("trap; yes | head -1; echo ${PIPESTATUS[0]}")
    equal((done.stdout, done.stderr), (b"y\n141\n", b""), "signals of a shell")


@behaviour("exec.session-leader")
async def session_leader(stage: Stage) -> None:
    """Every program leads a session and a process group of its own."""
    # The parent is the guest, which may be outside of the programs' namespace.
    script = "import os; print(os.getpid() == os.getpgid(0) == os.getsid(0), os.getppid() < 2)"
    leads = (await (await stage.shared()).python(script)).text.split()
    equal(leads, ["True", "True"], "leadership")


@behaviour("exec.orphans-reaped")
async def orphans_reaped(stage: Stage) -> None:
    """Orphans are reaped by the guest; no zombies stay."""
    sandbox = await stage.shared()
    # Each inner shell leaves a child behind that ends after its parent.
    orphan = "( (read x < /workspace/pipe; exit 3) & ) ; "
    done = await sandbox.shell(
        "rm -f pipe; mkfifo pipe; " + orphan * 20 + "exec 9<>pipe; sleep 0.1"
    )
    equal(done.code, 0, done.story())
    states = (
        "import glob, time\n"
        "def zombies():\n"
        "    for name in glob.glob('/proc/[0-9]*/stat'):\n"
        "        try: text = open(name).read()\n"
        "        except OSError: continue\n"
        "        if text.rpartition(')')[2].split()[0] == 'Z': yield name\n"
        "end = time.monotonic() + 10\n"
        "while list(zombies()) and time.monotonic() < end: time.sleep(0.02)\n"
        "print(list(zombies()))"
    )
    equal((await sandbox.python(states)).text.strip(), "[]", "zombies")


AWKWARD = 'it\'s "quoted" `ticked` $HOME ${x} \\back\\ %s {} !! \t # ü ✓'
LONG = 2 * MIB
_ABOUT_ITSELF = b"""
import multiprocessing, os, sys
import beside_the_script

def square(x):
    return x * x

if __name__ == "__main__":
    whole = "def square" in open(__file__).read()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(square, [2, 3])
    here = os.path.dirname(__file__)
    print(here, sys.argv == [__file__], whole, beside_the_script.VALUE, found)
"""


def _python(text: str) -> str:
    return f"import sys\nif True:\n    print({text!r})\nsys.stderr.write('e')\nsys.exit(3)"


def _bash(text: str) -> str:
    quoted = "'" + text.replace("'", "'\\''") + "'"
    return f"f() {{\n  printf '%s\\n' {quoted}\n}}\nf\nprintf e >&2\nexit 3"


def _node(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return (
        f"const f = () => {{\n  console.log('{quoted}')\n}}\nf()\n"
        "process.stderr.write('e')\nprocess.exit(3)"
    )


def _ts(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return (
        "import { exit } from 'node:process'\n"
        "interface Said { text: string }\nenum Code { Three = 3 }\n"
        f"const said: Said = {{ text: '{quoted}' }}\nconsole.log(said.text)\n"
        "process.stderr.write('e')\nexit(Code.Three as number)"
    )


_PROGRAMS = {
    "python": (_python, "#"),
    "bash": (_bash, "#"),
    "node": (_node, "//"),
    "ts": (_ts, "//"),
}


async def _check(stage: Stage, language: str) -> None:
    make, comment = _PROGRAMS[language]
    sandbox = await stage.shared()
    padding = "\n".join([f"{comment} {'x' * 1000}"] * (LONG // 1003))
    source = make(AWKWARD)
    for code in (source, f"{padding}\n{source}"):
        done = await sandbox.run(code=code.encode(), language=language)
        seen = (done.stdout, done.stderr, done.code)
        equal(seen, (AWKWARD.encode() + b"\n", b"e", 3), f"{language}, {len(code)} bytes")
    equal(await _left(sandbox), [], "files left in the workspace")


async def _left(sandbox: Sandbox) -> list[str]:
    """The files that runs have left of their code."""
    return [entry["path"] for entry in await sandbox.list("/workspace") if ".k8e" in entry["path"]]


@behaviour("languages.python")
async def python(stage: Stage) -> None:
    """Python code runs as it is: many lines, any quoting, two megabytes, its own exit code."""
    await _check(stage, "python")


@behaviour("languages.python-file")
async def python_file(stage: Stage) -> None:
    """Several lines of Python are a script: with a ``__file__`` beside what they can import."""
    sandbox = await stage.shared()
    await sandbox.shell("echo VALUE = 5 > beside_the_script.py; mkdir -p sub; : > sub/own.py")
    same = await sandbox.run(code=_ABOUT_ITSELF, language="python")
    equal(same.stdout, b"/workspace True True 5 [4, 9]\n", f"a script ({same.stderr!r})")
    failed = await sandbox.run(code=b"def f():\n    return 1 / 0\nf()\n", language="python")
    expect(b"    return 1 / 0\n" in failed.stderr, f"no line in {failed.stderr!r}")
    below = await sandbox.run(
        code=b"import os, own\nprint(os.path.dirname(__file__))", language="python", cwd="sub"
    )
    equal(below.stdout, b"/workspace/sub\n", "another folder")
    elsewhere = await sandbox.run(code=b"x = 1\nprint(x)", language="python", cwd="/usr")
    equal(elsewhere.stdout, b"1\n", "in a folder that is read-only")
    name = b"import sys\nprint(__file__, flush=True)\nsys.stdin.read()"
    slow = await sandbox.start(code=name, language="python", stdin=True)
    await slow.until(b"\n")
    second = await sandbox.run(code=name, language="python")
    slow.end_input()
    first = await slow.finish()
    expect(first.stdout != second.stdout, f"two runs at once have one file, {first.stdout!r}")
    equal(await _left(sandbox), [], "files left in the workspace")


@behaviour("languages.bash")
async def bash(stage: Stage) -> None:
    """Bash code runs as it is: many lines, any quoting, two megabytes, its own exit code."""
    await _check(stage, "bash")


@behaviour("languages.node")
async def node(stage: Stage) -> None:
    """JavaScript runs as it is: many lines, any quoting, two megabytes, its own exit code."""
    await _check(stage, "node")


@behaviour("languages.ts")
async def ts(stage: Stage) -> None:
    """TypeScript runs as it is, with imports, types and enums, also two megabytes of it."""
    await _check(stage, "ts")


@behaviour("languages.tsx")
async def tsx(stage: Stage) -> None:
    """Every sandbox has the command tsx, as K8E's clients call it, and can change nothing of it."""
    sandbox = await stage.shared()
    await sandbox.write("_k8e_run.ts", _ts("said").encode())
    inline = 'const n: number = 3; console.log("said"); process.stderr.write("e"); process.exit(n)'
    for command in (
        "TMPDIR=/workspace tsx /workspace/_k8e_run.ts",
        "cd /workspace && tsx _k8e_run.ts",
        f"tsx -e '{inline}'",
    ):
        done = await sandbox.run(argv=["/bin/sh", "-c", command])
        equal((done.stdout, done.stderr, done.code), (b"said\n", b"e", 3), command)
    script = 'echo "console.log(process.argv[2] as string)" > args.ts; tsx args.ts "a b"'
    equal((await sandbox.run(argv=["/bin/sh", "-c", script])).stdout, b"a b\n", "its arguments")
    done = await sandbox.run(argv=["/bin/sh", "-c", 'echo x > "$(command -v tsx)"'])
    expect(done.code != 0, "the command tsx can be changed")
    none = (
        "mkdir -p bare; ln -sf /bin/sh bare/sh; tool=$(command -v tsx); PATH=$PWD/bare $tool x.ts"
    )
    done = await sandbox.run(argv=["/bin/sh", "-c", none])
    equal(done.code, 127, "exit code of tsx without node")
    expect(b"no node on PATH" in done.stderr, f"tsx without node says {done.stderr!r}")


@behaviour("languages.stdin")
async def code_on_stdin(stage: Stage) -> None:
    """Code can read stdin: the code itself does not come that way."""
    sandbox = await stage.shared()
    for language, code in (
        ("python", "print(input()[::-1])"),
        ("bash", "read x; echo $x | rev"),
        (
            "node",
            "process.stdin.on('data', d => console.log(`${d}`.trim().replace('abc', 'cba')))",
        ),
    ):
        program = await sandbox.start(code=code.encode(), language=language, stdin=True)
        await program.type(b"abc\n")
        program.end_input()
        equal((await program.finish()).stdout, b"cba\n", language)


@behaviour("languages.binary")
async def binary(stage: Stage) -> None:
    """Code may be bytes that are no text, where its language takes them."""
    sandbox = await stage.shared()
    done = await sandbox.run(code=b"printf '%s' '\xff\xfe'", language="bash")
    equal(done.stdout, b"\xff\xfe", "bash")
    done = await sandbox.run(code=b"print('\xff')", language="python")
    expect(done.code == 1 and done.stderr, f"python: {done.story()}")


@behaviour("code.hyphen")
async def hyphen(stage: Stage) -> None:
    """Code that begins like an option is code."""
    sandbox = await stage.shared()
    programs = {
        "python": ("-1; print(3)", b"3\n", 0),
        "bash": ("-l; echo 3", b"3\n", 0),
        "node": ("-1; console.log(process.execArgv[1] === process._eval)", b"true\n", 0),
    }
    for language, (code, *wanted) in programs.items():
        done = await sandbox.run(code=code.encode(), language=language)
        equal([done.stdout, done.code], wanted, f"{language}: {done.story()}")
