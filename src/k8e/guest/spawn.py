"""Starting programs as the sandbox's unprivileged user.

Nothing here forks: vfork costs a third of that in gVisor. A vforked child can only inherit its ids,
or drop to the *real* ones (``posix_spawn`` with RESETIDS), so the guest lends its ids for the
moment of the spawn. That is safe: the saved id stays root's, so no process of the user's uid may
trace the guest, and the kernel delivers no signal to a PID 1 that has no handler for it (in gVisor,
isolation.py sees to that). At exec the saved id follows the effective one, and with
no-new-privileges the program cannot get anything back.

Text goes to ``sh -c``, but most of it is only a program and its arguments, and then the shell does
nothing but read the line and become that program: in gVisor a third of the command's whole time.
As make does, such a line is started directly. Whatever a shell could read in another way, and
whatever cannot be started (the shell has the words for why), goes to the shell.

Each is a system call, which in gVisor takes as long as ten of Linux's, and a program needs five.
They are never shared: what one program does to its own is not seen by the next.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from typing import Any, Callable

from k8e.guest.isolation import first_process, name_of, proc_folder

SHELL = ["/bin/sh", "-c"]
# No quote, no expansion, no operator, no pattern.
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _./+-:,@%=")
# What a shell does itself, in dash, bash and busybox; a program of that name may differ.
_SHELLS_OWN = frozenset(
    ". : alias bg bind break builtin caller case cd chdir command compgen complete compopt "
    "continue coproc declare dirs disown do done echo elif else enable esac eval exec exit "
    "export false fc fg fi for function getopts hash help history if in jobs kill let local "
    "logout mapfile popd printf pushd pwd read readarray readonly return select set shift shopt "
    "source suspend test then time times trap true type typeset ulimit umask unalias unset "
    "until wait while".split()
)
# Without arguments, these two programs do what the shell does.
_ALIKE = (["true"], ["false"])


def plain_words(argv: list[str]) -> list[str] | None:
    """The program and arguments of a command line, if it is plain enough to run without a shell."""
    if len(argv) != 3 or argv[:2] != SHELL:
        return None
    words = argv[2].split() if _PLAIN.issuperset(argv[2]) else []
    if not words or "=" in words[0]:  # nothing, or an assignment
        return None
    return None if words[0] in _SHELLS_OWN and words not in _ALIKE else words


def _make_null() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _make_pipe() -> tuple[int, int]:
    return os.pipe2(os.O_CLOEXEC)


def _make_output() -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ends[0], False)
    return ends


class DescriptorStock:
    """Descriptors opened ahead, as many as one program needs; more are opened on demand."""

    def __init__(self) -> None:
        self._nulls: list[int] = []
        self._outputs: list[tuple[int, int]] = []
        self._reports: list[tuple[int, int]] = []

    def take_null(self) -> int:
        """An input that is at its end."""
        return self._nulls.pop() if self._nulls else _make_null()

    def take_output(self) -> tuple[int, int]:
        """A pipe that we read without waiting."""
        return self._outputs.pop() if self._outputs else _make_output()

    def take_report(self) -> tuple[int, int]:
        """A pipe that we wait for."""
        return self._reports.pop() if self._reports else _make_pipe()

    def refill(self) -> None:
        """Replace those that were taken; if that fails, the next program that needs one fails."""
        try:
            self._add(self._nulls, 1, _make_null)
            self._add(self._outputs, 2, _make_output)
            self._add(self._reports, 1, _make_pipe)
        except OSError:
            pass

    def _add(self, kept: list[Any], wanted: int, make: Callable[[], object]) -> None:
        while len(kept) < wanted:
            kept.append(make())


STOCK = DescriptorStock()


UID = 1000
GID = 1000
HOME = "/home/user"
WORKSPACE = "/workspace"
# Our own programs, which a root file system need not have: last, so that its own are found first.
TOOLS = "/run/k8e/guest/bin"
# Packages that pip installs come late: looking into a folder of the user's costs every start before
# it.
PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:" + HOME + "/.local/bin:" + TOOLS
)
BASE_ENV = {
    "PATH": PATH,
    "HOME": HOME,
    "USER": "user",
    "LOGNAME": "user",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",
    # The system's packages are read-only here, so pip cannot break them; its cache would be memory.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_CACHE_DIR": "1",
}
# Looking through PATH costs a tenth of a start in gVisor. No program in the sandbox can change
# these.
STEADY = ("/usr/", "/bin/", "/sbin/")
_REMEMBERED = 5.0  # seconds
_LOOKING = 1.0  # seconds of CPU time; PATH may have thousands of folders, each behind links
_MOST_PROGRAMS = 1000
_programs: dict[str, tuple[bool, float]] = {}
# The same as os.fsencode's.
_ENCODING = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
_KILL_ROUNDS = 50
# Python ignores these two signals; the programs that it starts must not inherit that.
_DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ]
# fork_exec is private to Python: its last arguments where we know them (whether to use vfork).
_FORK_EXEC_EXTRA = {(3, 11): (True,), (3, 12): (True,), (3, 13): (True,), (3, 14): ()}


class as_user:  # noqa: N801 - read as a statement: `with as_user():`
    """A context in which file access is checked as the sandbox's user."""

    def __enter__(self) -> None:
        os.setresgid(-1, GID, 0)
        os.setresuid(-1, UID, 0)

    def __exit__(self, *_: object) -> None:
        os.setresuid(-1, 0, 0)
        os.setresgid(-1, 0, 0)


def find_program(name: str, path: str, cwd: str, *, lent: bool = False) -> str:
    """The path where ``execvp`` would find ``name``; ``lent`` if we have the user's ids now."""
    if "/" in name:
        return os.path.join(cwd, name)
    now = time.monotonic()
    candidates = [os.path.join(cwd, folder, name) for folder in path.split(":")]
    for number, candidate in enumerate(candidates):
        known, until = _programs.get(candidate, (False, 0.0))
        if now >= until:
            if lent:
                return _look_for(name, candidates[number:], now)
            with as_user():
                return _look_for(name, candidates[number:], now)
        if known:
            return candidate
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _look_for(name: str, candidates: list[str], now: float) -> str:
    """The first candidate that the user may execute; those in the host's folders are remembered."""
    until = time.process_time() + _LOOKING
    for path in candidates:
        if time.process_time() > until:
            raise OSError(errno.ETIMEDOUT, "looking through PATH takes too long", name)
        found = os.access(path, os.X_OK, effective_ids=True) and not os.path.isdir(path)
        if path.startswith(STEADY):
            if len(_programs) >= _MOST_PROGRAMS:
                _programs.clear()
            _programs[path] = (found, now + _REMEMBERED)
        if found:
            return path
    # Where no more files can be opened, no program is found: then this error says so.
    os.close(os.open("/usr", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def spawn(argv: list[str], env: dict[str, str], cwd: str, stdio: list[int]) -> int:
    """Start a program in a session of its own and return its pid; OSError when it cannot start."""
    words = plain_words(argv)
    if words and "PWD" not in env:
        try:
            return _spawn(words, dict(env, PWD=_real_folder(cwd)), cwd, stdio)
        except OSError:
            pass  # let the shell say why
    return _spawn(argv, env, cwd, stdio)


def _real_folder(cwd: str) -> str:
    """The folder as a shell would set PWD."""
    if cwd.rstrip("/") == WORKSPACE:
        return WORKSPACE
    with as_user():
        fd = os.open(cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return name_of(fd)
    finally:
        os.close(fd)


def _spawn(argv: list[str], env: dict[str, str], cwd: str, stdio: list[int]) -> int:
    """Start exactly this program.

    With the function below ``subprocess``: glibc's ``posix_spawn`` sets 63 signal handlers with two
    calls each, which in gVisor takes as long as a quarter of everything else.
    """
    extra = _FORK_EXEC_EXTRA.get(sys.version_info[:2])
    if extra is None:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
        return spawn_by_actions(argv, env, cwd, actions)
    from _posixsubprocess import fork_exec

    environment = [(name + "=" + value).encode(*_ENCODING) for name, value in env.items()]
    streams = (stdio[0], -1, -1, stdio[1], -1, stdio[2])
    error, report = STOCK.take_report()
    try:
        os.setresgid(GID, GID, 0)
        os.setresuid(UID, UID, 0)
        try:
            program = find_program(argv[0], env.get("PATH", PATH), cwd, lent=True)
            # No descriptors need closing, since all of ours are close-on-exec; then: restore
            # signals, new session, and no process group, ids, umask or function of its own.
            options: tuple[Any, ...] = (True, True, -1, None, None, None, -1, None, *extra)
            programs = (os.fsencode(program),)
            pid: int = fork_exec(
                argv, programs, False, (), cwd, environment, *streams, error, report, *options
            )
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        os.close(report)
        report = -1
        told = os.read(error, 256)
    finally:
        os.close(error)
        if report >= 0:
            os.close(report)
    if told:
        # As in subprocess.py: a class, a number in hexadecimal, and where it happened.
        _, number, where = told.split(b":", 2)
        code = int(number, 16)
        raise OSError(code, os.strerror(code), cwd if where.startswith(b"noexec") else program)
    return pid


def spawn_by_actions(argv: list[str], env: dict[str, str], cwd: str, actions: list[Any]) -> int:
    """``spawn`` for Pythons that we do not know, and for starts that need file actions."""
    program = find_program(argv[0], env.get("PATH", PATH), cwd)
    os.setresgid(GID, GID, 0)
    os.setresuid(UID, UID, 0)
    try:
        os.chdir(cwd)
        os.setresuid(UID, 0, 0)
        os.setresgid(GID, 0, 0)
        return os.posix_spawn(
            program,
            argv,
            env,
            file_actions=actions,
            setsid=True,
            resetids=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.chdir("/")


def session_members(pid: int) -> list[int]:
    """All processes of the session that ``pid`` leads, in any process group."""
    return [number for number in _all_processes() if _session_of(number) == pid]


def _all_processes() -> list[int]:
    """All processes but the guest."""
    numbers = [int(name) for name in os.listdir(proc_folder()) if name.isdigit()]
    return [number for number in numbers if number > 1]


def _session_of(number: int) -> int:
    try:
        return os.getsid(number)
    except OSError:
        return -1  # it has ended


def session_has_work(pid: int) -> bool:
    """Whether a process of the session that ``pid`` leads runs, or would if it had a CPU."""
    found = [read_stat(proc_folder(), member) for member in session_members(pid)]
    return any(stat is not None and stat[1][0] in "RD" for stat in found)


def kill_session(pid: int, number: int) -> None:
    """Signal every process of the session that ``pid`` leads."""
    for member in session_members(pid):
        _send_signal_to(member, number)


def kill_others(spared: Callable[[int], bool]) -> None:
    """Kill all processes but the guest, the first of the programs' namespace, and ``spared``."""
    first = first_process()
    killed: set[int] = set()
    for _ in range(_KILL_ROUNDS):  # a process that was about to fork has a child by now
        found = [pid for pid in _all_processes() if pid != first and not spared(pid)]
        if killed.issuperset(found):
            return
        for pid in found:
            _send_signal_to(pid, signal.SIGKILL)
        killed.update(found)
    raise OSError(errno.EAGAIN, "programs that were there before the session do not end")


def _send_signal_to(member: int, number: int) -> None:
    try:
        os.kill(member, number)
    except OSError:
        pass  # it has ended


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

# What takes the place of "the code": an argument, or a program that runs the file named by its
# argument in the same scope, so that a long program sees what a short one does.
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

# Sandboxes that share a workspace can put another file in the place of a script. So Python is not
# started on the file there: it reads it once, runs those bytes if they are the caller's, and looks
# as if it had been started on it, but that our frames are below it: they are left out of the
# traceback that ends a program, and finalizers of what it leaves behind run later than usual.
_CHECKED_SCRIPT = """\
def _():
    import sys
    from _blake2 import blake2b
    (_, path, expected), main = sys.argv, globals()
    try:
        with open(path, "rb") as file:
            code = file.read()
    except OSError:
        code = b""
    if blake2b(code).hexdigest() != expected:
        sys.exit(path + " was changed by another program before it began; run it again")
    def show(kind, error, trace):
        trace = trace.tb_next.tb_next if trace and trace.tb_next else trace
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
    sys.excepthook = show
    sys.argv[:] = [path]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[-4:] = [path]
    if sys.path[:1] == [""]:
        sys.path[0] = sys.modules["os"].path.realpath(path).rpartition("/")[0]
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader
    main.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
    del main["_"]
    exec(compile(code, path, "exec", 0, True), main)
_()
"""


def language_command(
    language: str, code: bytes, exec_id: str, cwd: str, *, shared: bool = False
) -> tuple[list[str], str | None]:
    """The argv that runs ``code``, and the file to remove afterwards, if one had to be made.

    ``shared`` is for a workspace that other sandboxes write to.
    """
    name = ALIASES[language]
    if name == "python" and b"\n" in code:
        path = _save_script(code, exec_id, cwd)
        if path is not None:
            return _script(path, code) if shared else ["python3", path], path
    if name == "ts":
        # Beside the user's files, because imports resolve relative to the file.
        path = _save(os.path.join(cwd, ".k8e-" + exec_id + ".ts"), code)
        return ["node", "--import", TSX_LOADER, path], path
    if len(code) <= ARGUMENT_LIMIT and b"\0" not in code:
        return _inline(name, code.decode("utf-8", "surrogateescape")), None
    path = _save("/tmp/.k8e-" + exec_id, code)
    return _FROM_FILE[name] + [path], path


def _inline(name: str, code: str) -> list[str]:
    """The argv with the code in it, in a place where it is not taken for an option."""
    if name == "bash" and code.startswith(("-", "+")):
        return ["bash", "-c", "--", code]
    if name == "node" and code.startswith(("-", "\\-")):
        # Not as ``--eval=``: Node looks for the code among its arguments when it starts children.
        code = " " + code
    return _INLINE[name] + [code]


def need_language(program: str, path: str, cwd: str) -> None:
    """Explain that an image has no interpreter for a language."""
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
    if scratch is None or argv[:1] != ["python3"]:
        return False
    return argv[1:] == [scratch] or argv[2:4] == [_CHECKED_SCRIPT, scratch]


def _script(path: str, code: bytes) -> list[str]:
    """The argv that runs a script unless it was changed meanwhile."""
    from _blake2 import blake2b  # hashlib takes longer to load than the rest of a start

    return ["python3", "-c", _CHECKED_SCRIPT, path, blake2b(code).hexdigest()]


def _save_script(code: bytes, exec_id: str, cwd: str) -> str | None:
    """Save several lines of Python in a file, as K8E's own client does; None if there is no room.

    A script has a ``__file__``, lines in its tracebacks, and functions that other processes find.
    It is beside the user's files, because imports are looked for beside the script. The name is
    always the same, so that tracebacks are; but never the name of a user's file.
    """
    try:
        try:
            return _save(os.path.join(cwd, SCRIPT), code)
        except FileExistsError:  # of another run, which may be in a sub-agent
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


MOST_PROCESSES = 1024  # in one answer
STAT_BYTES = 4096
START_TIME = 19  # its place among the fields of ``stat`` that come after the name


def list_processes(_: dict[str, Any]) -> dict[str, Any]:
    """All processes but the guest itself, or in gVisor its stand-in.

    Only ``stat`` is read: ``cmdline`` is memory of the process, which could keep us waiting.
    """
    found: list[dict[str, Any]] = []
    for number in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if number > 1 and len(found) < MOST_PROCESSES:
            entry = _describe_process(number)
            if entry is not None:
                found.append(entry)
    return {"processes": found}


def _describe_process(number: int) -> dict[str, Any] | None:
    found = read_stat("/proc", number)
    if found is None:
        return None  # it ended meanwhile
    comm, fields = found
    return {"pid": number, "ppid": int(fields[1]), "comm": comm, "state": fields[0]}


def read_stat(folder: str, number: int) -> tuple[str, list[str]] | None:
    """The name of a process and what follows it in ``stat``: state, parent, group, session ..."""
    try:
        fd = os.open(f"{folder}/{number}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.fsdecode(os.read(fd, STAT_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return None
    # The name is the program's to choose, and may have parentheses of its own.
    before, _, after = text.rpartition(") ")
    fields = after.split()
    return (before.partition(" (")[2], fields) if len(fields) > START_TIME else None
