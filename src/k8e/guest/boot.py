"""What a warm interpreter runs first, under the name ``sitecustomize``; Python runs the rest.

A program that ``exec`` runs from Python has our frames below it: in tracebacks, in warnings, in the
depth of recursion. So nothing of ours runs it. The interpreter is started on a file (a memfd) that
begins like a compiled module. Python opens it, asks ``SourcelessFileLoader`` for ``__loader__``,
and only then reads it and runs what is in it, from C. The loader is ours for that moment: it waits
for code, compiles it into the file, and leaves the interpreter as ``python3 -c`` would be, or as
``python3 FILE``.

It talks to ``warm.py`` by a socket: it says ``r`` (ready), takes a message and the one byte that
follows it, says ``b`` and begins; or says ``n`` (not me) and ends, and the guest starts another.
The end that takes that byte decides: the guest takes it back if the interpreter does not answer. An
interpreter of a version that this was not tested with says ``o``, and no other one is started.
"""

# Python's own insides have no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import posix
import sys
from typing import Any

TESTED = ((3, 9), (3, 12))  # later ones show lines of the code in tracebacks, by other means
FILE = 100  # the descriptor of the file that Python runs
CONTROL, STDIN = 101, 102  # where its standard streams go, to be closed with one call
HEADER_BYTES = 16
FAMILIAR = compile("for x in (1,):\n    print(x)\n", "<string>", "exec", 0, True)


def become_warm() -> None:
    """Act as the loader, then let the system's own ``sitecustomize`` do its work."""
    external: Any = sys.modules["_frozen_importlib_external"]
    folder, control, stdin, *modules = posix.environ[b"K8E_BOOT"].decode().split()
    if not TESTED[0] <= sys.version_info[:2] <= TESTED[1]:
        posix.write(int(control), b"o\n")
        posix._exit(3)
    fd = posix.memfd_create("code", 0)
    posix.dup2(fd, FILE)
    posix.close(fd)
    posix.write(FILE, external.MAGIC_NUMBER + bytes(HEADER_BYTES - 4))
    for given, place in ((int(control), CONTROL), (int(stdin), STDIN)):
        posix.dup2(given, place)
        posix.close(given)
    real = external.SourcelessFileLoader

    def stand_in(_: str, path: str) -> object:
        external.SourcelessFileLoader = real
        try:
            names, read = preload(modules)
            settle(sys.modules["__main__"].__dict__)
            posix.write(CONTROL, b"r" + read + b"\n")
            script = prepare(path, names)
        except BaseException:
            posix._exit(1)
        loader = sys.modules["_frozen_importlib"].BuiltinImporter
        if script:
            loader = external.SourceFileLoader("__main__", script)
        globals().clear()  # without this the two hold references to each other
        return loader

    external.SourcelessFileLoader = stand_in
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)
    del sys.modules["sitecustomize"]
    # If there is none, site asks for it by name.
    import sitecustomize  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]


def preload(modules: list[str]) -> tuple[set[str], bytes]:
    """Import modules; return the names they are bound to, and the variables that they read.

    A program's folder could have files of those names; and where those variables differ, a module
    might have done something else. A module that cannot be imported without output is reported to
    the guest, and another interpreter does without it.
    """
    if not modules:
        return set(), b""
    before, place = set(sys.modules), sys.path.pop(0)
    seen: set[bytes] = set()
    known: dict[bytes, bytes] = sys.modules["os"].environ._data

    class Watched(dict[bytes, bytes]):
        def __getitem__(self, name: bytes) -> bytes:
            seen.add(name)
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            seen.add(b"*")
            return super().__iter__()

    for name in (b"PYTHONPATH", b"K8E_BOOT"):  # ours, and of no concern to a module
        known.pop(name, None)
        posix.unsetenv(name)
    sys.modules["os"].environ._data = Watched(known)
    reasons = import_silently(modules)
    if reasons:
        posix.write(CONTROL, b"f" + b"\0".join(reasons) + b"\n")
        posix._exit(1)
    sys.modules["os"].environ._data = known
    sys.path.insert(0, place)
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    read = b"*" if b"*" in seen or b"\n" in b"".join(seen) else b"\0".join(seen)
    return loaded - set(sys.builtin_module_names), read


def import_silently(modules: list[str]) -> list[bytes]:
    """Import modules; return why some must not be imported ahead: ``NAME: reason`` each."""
    heard = posix.memfd_create("heard")
    streams = [posix.dup(1), posix.dup(2)]
    reasons: list[bytes] = []
    for fd in (1, 2):
        posix.dup2(heard, fd)
    for name in modules:
        reason = ""
        try:
            __import__(name)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if posix.fstat(heard).st_size:
            reason = reason or "it prints something when it is imported"
            posix.ftruncate(heard, 0)
        if len(sys._current_frames()) > 1:
            reason = reason or "it starts a thread when it is imported"
        if reason:
            text = f"{name}: {reason}"[:200]
            reasons.append(" ".join(text.replace("\0", " ").split()).encode("utf-8", "replace"))
    for fd, stream in zip((1, 2), streams):
        posix.dup2(stream, fd)
        posix.close(stream)
    posix.close(heard)
    return reasons


def settle(main: dict[str, Any]) -> None:
    """Do slow work in advance, and keep the garbage collector away from what never changes.

    The names of the program stay where the collector sees them: at the end it finds cycles there.
    An empty dict is not tracked by it.
    """
    import marshal

    import_was_known = "gc" in sys.modules
    import gc

    marshal.loads(marshal.dumps(FAMILIAR))  # noqa: S302 - of our own making
    kept = dict(main)
    main.clear()
    gc.collect()
    gc.freeze()
    main.update(kept)
    if not import_was_known:
        del sys.modules["gc"]


def prepare(path: str, names: set[str]) -> str:
    """Take a program, put it where Python will look for it, and look like a new interpreter.

    Returns the file that it is a script of; empty if it stands for an argument of Python.
    """
    import marshal

    size = int.from_bytes(read_exactly(CONTROL, 4), "big")
    message = read_exactly(CONTROL, size)
    code, script, cwd, environment, wants_input = marshal.loads(message)  # noqa: S302 - the guest's
    try:
        text = code.decode("utf-8")
        # Only a file can declare its encoding.
        source = code if script else text + "\n"
        program = marshal.dumps(compile(source, script or "<string>", "exec", 0, True))
        posix.chdir(cwd)
        if names and not names.isdisjoint([file.partition(".")[0] for file in posix.listdir()]):
            raise ImportError("the program may mean a module in its folder")
        set_environment(environment)
    except BaseException:
        # A new interpreter prints the right message.
        posix.write(CONTROL, b"n")
        posix._exit(1)
    posix.pwrite(FILE, program, HEADER_BYTES)
    if wants_input:
        open_stdin(STDIN)
    main = sys.modules["__main__"].__dict__
    sys.path_importer_cache.pop(path, None)
    if script:
        main["__file__"] = script
        sys.path_importer_cache[script] = None  # Python has checked whether it is a folder
    else:
        del main["__file__"], main["__cached__"]
    sys.argv[:] = [script or "-c"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[1:] = [script] if script else ["-c", text]
    sys.path[0] = posix.getcwd() if script else ""
    read_exactly(CONTROL, 1)
    try:
        posix.write(CONTROL, b"b")
    except OSError:
        # The guest waited too long, found the byte taken, and hung up: the program is ours to run.
        pass
    posix.closerange(FILE, STDIN + 1)
    return script


def read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = posix.read(fd, size - len(data))
        if not more:
            posix._exit(1)
        data += more
    return data


def set_environment(pairs: list[tuple[bytes, bytes]]) -> None:
    """Set exactly these variables, in this order, for this process and its children."""
    known: dict[bytes, bytes] = sys.modules["os"].environ._data
    for name in list(known):
        posix.unsetenv(name)
    known.clear()
    for name, value in pairs:
        posix.putenv(name, value)
        known[name] = value


def open_stdin(fd: int) -> None:
    """Read from ``fd`` through the same objects that Python makes when it starts."""
    io = sys.modules["io"]
    posix.dup2(fd, 0)
    raw = io.open(0, "rb", -1, None, None, None, False)
    raw.raw.name = "<stdin>"
    old: Any = sys.stdin
    text = io.TextIOWrapper(raw, old.encoding, old.errors, "\n", False, old.write_through)
    text.mode = "r"
    sys.stdin = sys.__stdin__ = text


if __name__ == "sitecustomize":
    become_warm()
