"""Code in each language: sent as data, so no quoting can hurt it."""

from __future__ import annotations

from k8e.conformance.behaviours import behaviour, equal, expect
from k8e.conformance.sandbox import Sandbox
from k8e.conformance.stage import Stage
from k8e.model import MIB

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
    """What runs have left of their code."""
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
async def stdin(stage: Stage) -> None:
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
