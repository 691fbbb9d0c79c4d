"""Programs in Python by which one could tell a warm interpreter from a new one, if one could.

Each prints what it sees of the interpreter, of the process, or of its own end. None prints what
differs between two runs of the same interpreter, such as process ids and times; addresses in hex
are taken out before two outputs are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

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
    text = (Path(__file__).parent / "programs" / f"{name}.txt").read_text("utf-8")
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
    # One program for all that are told alike: a traceback shows what led to what.
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
