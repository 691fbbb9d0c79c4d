"""How source code in each language becomes a program to start. Code is data, never a shell line."""

from __future__ import annotations

import errno
import os

from k8e.guest.spawn import as_user, find_program

# Linux refuses a single argument above 128 KiB (MAX_ARG_STRLEN); longer code goes through a file.
ARGUMENT_LIMIT = 120 << 10
SCRIPT = ".k8e_run.py"
TSX_LOADER = "/opt/k8e/tools/node_modules/tsx/dist/loader.mjs"

ALIASES = {
    "bash": "bash",
    "sh": "bash",
    "shell": "bash",
    "python": "python",
    "python3": "python",
    "py": "python",
    "node": "node",
    "nodejs": "node",
    "js": "node",
    "javascript": "node",
    "ts": "ts",
    "typescript": "ts",
}

# What stands for "the code": an argument, or a program that runs the file named by its argument in
# the same scope, so that a long program sees what a short one does.
_INLINE = {"bash": ["bash", "-c"], "python": ["python3", "-c"], "node": ["node", "-e"]}
_FROM_FILE = {
    "bash": ["bash", "-c", '. "$0"'],
    "python": [
        "python3",
        "-c",
        "import sys;_=sys.argv.pop();_=open(_,'rb').read();exec(compile(_,'<string>','exec'))",
    ],
    "node": [
        "node",
        "-e",
        (
            "require('vm').runInThisContext("
            "require('fs').readFileSync(process.argv.pop(),'utf8'),{filename:'[eval]'})"
        ),
    ],
}


def language_command(
    language: str, code: bytes, exec_id: str, cwd: str
) -> tuple[list[str], str | None]:
    """The argv that runs ``code``, and the file to remove afterwards, if one had to be made."""
    name = ALIASES[language]
    if name == "python" and b"\n" in code:
        path = _save_script(code, exec_id, cwd)
        if path is not None:
            return ["python3", path], path
    if name == "ts":
        # Beside the user's files, because imports resolve relative to the file.
        path = _save(os.path.join(cwd, ".k8e-" + exec_id + ".ts"), code)
        return ["node", "--import", TSX_LOADER, path], path
    if len(code) <= ARGUMENT_LIMIT and b"\0" not in code:
        return _inline(name, code.decode("utf-8", "surrogateescape")), None
    path = _save("/tmp/.k8e-" + exec_id, code)
    return _FROM_FILE[name] + [path], path


def _inline(name: str, code: str) -> list[str]:
    """The argv that has the code in it, where it is not taken for an option."""
    if name == "bash" and code.startswith(("-", "+")):
        return ["bash", "-c", "--", code]
    if name == "node" and code.startswith(("-", "\\-")):
        # Not as ``--eval=``: Node looks for the code among its arguments when it starts children.
        code = " " + code
    return _INLINE[name] + [code]


def need_language(program: str, path: str, cwd: str) -> None:
    """Say in words that an image has no interpreter for a language."""
    try:
        find_program(program, path, cwd)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT,
            "the image has no " + program + " on its PATH, so code in this language cannot run",
            program,
        ) from error


def is_script(argv: list[str], scratch: str | None) -> bool:
    """Whether Python runs a file, and not its argument."""
    return scratch is not None and argv == ["python3", scratch]


def _save_script(code: bytes, exec_id: str, cwd: str) -> str | None:
    """Several lines of Python in a file, as K8E's own client runs them; None if there is no room.

    A script has a ``__file__``, lines in its tracebacks, and functions that other processes find.
    It is beside the user's files, because imports are looked for beside the script. The name is
    always the same, so that tracebacks are; but never that of somebody's file.
    """
    try:
        try:
            return _save(os.path.join(cwd, SCRIPT), code)
        except FileExistsError:  # of another run, perhaps in a sub-agent
            return _save(os.path.join(cwd, SCRIPT.replace("run", "run-" + exec_id)), code)
    except OSError:
        return None  # a folder that is read-only or full: the code itself can still be run


def _save(path: str, code: bytes) -> str:
    with as_user():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(code)
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
    return path
