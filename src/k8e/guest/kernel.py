"""The program of a Python context: it takes cells of code, runs them and reports results.

It is the user's own process: a program of the session like any other, and everything that it says
is as hostile as that. It talks to ``contexts.py`` by a socket, in frames: HELLO when it is ready;
then for each CALL, which carries a cell, any number of SHOW (a result; RESULT lets it go on, so
that what is printed before and after keeps its place) and one EXIT. An interrupt is a CANCEL with
the number of the cell, and then SIGINT: the signal stops a cell that runs, and the frame one that
had not begun when the signal came.

The methods are those that notebooks ask for (``_repr_html_`` and so on), so libraries have them.
A part of the program that runs Python contexts; it is the user's process, and nothing here is safe
from what runs in it.
"""

from __future__ import annotations

import _ast
import builtins
import os
import signal
import sys
from _thread import RLock, get_ident
from typing import Any, Callable

from k8e.guest.wire import (
    CALL,
    CANCEL,
    EXIT,
    HEADER,
    HEADER_SIZE,
    HELLO,
    RESULT,
    SHOW,
    pack,
    unpack_dict,
)

# Values of a user's program have no static type.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false


TEXT = "text/plain"
PNG = "image/png"
METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    PNG: "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
BINARY = (PNG, "image/jpeg", "application/pdf")
MAX_TEXT = 1 << 20  # characters of one representation; bytes of all together
MAX_RICH = 6 << 20  # bytes of all ways together
MAX_TYPES = 32


def describe_value(value: Any) -> dict[str, Any]:
    """Describe a value by media type. Errors of ``__repr__`` are raised, others skipped."""
    found: dict[str, Any] = {}
    if not isinstance(value, type):  # a class has these methods for its instances
        for kind, content in _ask(value, "_repr_mimebundle_", {}).items():
            _add_content(found, kind, content)
        for kind, method in METHODS.items():
            if kind not in found:
                _add_content(found, kind, _ask(value, method, None))
        if PNG not in found and _is_figure(value):
            found[PNG] = draw_figure(value)
    if TEXT not in found:
        found[TEXT] = repr(value)
    return found


def _ask(value: Any, method: str, otherwise: Any) -> Any:
    """Call a display method, if the value's class has it; a failure is reported and skipped."""
    function = getattr(type(value), method, None)
    if not callable(function):
        return otherwise
    try:
        answer = function(value)
    except NotImplementedError:
        return otherwise
    except Exception:
        import traceback

        traceback.print_exc()
        return otherwise
    if isinstance(answer, tuple):  # the value, and metadata about it
        answer = answer[0] if answer else None
    if otherwise is not None and not isinstance(answer, dict):
        return otherwise
    return answer


def _add_content(found: dict[str, Any], kind: Any, content: Any) -> None:
    """Add one media type: text, or bytes if it is binary."""
    if content is None or not isinstance(kind, str):
        return
    if kind in BINARY:
        content = _as_bytes(content)
    elif not isinstance(content, str):
        content = _as_json(content)
    if content is not None:
        found[kind] = content


def _as_bytes(content: Any) -> bytes | None:
    if isinstance(content, str):  # it may come as base64
        from binascii import Error, a2b_base64

        try:
            return a2b_base64(content)
        except (Error, ValueError):
            return None
    return bytes(content) if isinstance(content, (bytes, bytearray, memoryview)) else None


def _as_json(content: Any) -> str | None:
    import json

    try:
        return json.dumps(content)
    except (TypeError, ValueError):
        return None


def fit_bundle(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The part of a bundle that may be sent, and the types that were too large."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    room = MAX_RICH
    for kind, content in list(found.items())[:MAX_TYPES]:
        if kind == TEXT and len(content) > MAX_TEXT:
            content = f"{content[:MAX_TEXT]}… ({len(content)} characters)"
        if isinstance(content, str):
            content = content.encode("utf-8", "backslashreplace").decode()
            size = len(content.encode())
        else:
            size = len(content)
        if size > room:
            left_out.append(kind[:100])
            continue
        room -= size
        kept[kind[:100]] = content
    return kept, left_out


# matplotlib, where it is used.


def _is_figure(value: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, getattr(module, "Figure", ()))


def draw_figure(figure: Any) -> bytes:
    from io import BytesIO

    drawn = BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    return drawn.getvalue()


def take_figures() -> list[Any]:
    """Take the open figures, and close them."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not hasattr(pyplot, "get_fignums"):
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures


class PyplotShow:
    """Replaces ``matplotlib.pyplot.show`` once that module has been imported."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "matplotlib.pyplot":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load, show = loader.exec_module, self._show

            def show_open(*_: Any, **__: Any) -> None:  # matplotlib sets attributes of it
                show()

            def exec_module(module: Any) -> None:
                load(module)
                module.show = show_open

            loader.exec_module = exec_module
        return spec


# What cells do has no static type.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false


ONLY_AST, TOP_LEVEL_AWAIT, IS_COROUTINE = 0x400, 0x2000, 0x80
MAX_SOURCES = 500  # cells whose lines are kept for tracebacks
MAX_VALUE_TEXT = 16 << 10
TRACEBACK_HEAD, TRACEBACK_TAIL = 16 << 10, 48 << 10
CELL = "<cell {}>"
INTERRUPTED_CODE = 130


class Kernel:
    """One namespace and the cells that ran in it."""

    def __init__(self, control: int, namespace: dict[str, Any]) -> None:
        self._control = control
        self._arrivals: Any = None
        self._namespace = namespace
        self._pid = os.getpid()
        self._main_thread = get_ident()
        self._sending = RLock()
        self._flags = TOP_LEVEL_AWAIT
        self._sources: list[str] = []
        self._event_loop: Any = None
        self._number = 0
        self._interruptible = False
        self._interrupted_late = False

    def serve(self) -> None:
        """Run cells until the guest closes its end."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._send(HELLO, 0, {})
        self._prepare()
        while True:
            kind, number, body = self._receive()
            if kind == CALL:
                self._number = number
                self._answer(unpack_dict(body))

    def _prepare(self) -> None:
        """Do in advance what the first cell would have to wait for."""
        import __future__

        import select

        # Made before a cell can replace what select offers.
        self._arrivals = select.poll()
        self._arrivals.register(self._control, select.POLLIN)
        names = __future__.all_feature_names
        self._futures = sum(getattr(__future__, name).compiler_flag for name in names)
        __import__("linecache")

    # The guest's end.

    def _receive(self) -> tuple[int, int, bytes]:
        length, kind, number = HEADER.unpack(self._read(HEADER_SIZE))
        return kind, number, self._read(length)

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = os.read(self._control, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _send(self, kind: int, number: int, value: dict[str, Any]) -> None:
        body = pack(value)
        view = memoryview(HEADER.pack(len(body), kind, number) + body)
        while view:
            view = view[os.write(self._control, view) :]

    def _leave_to_parent(self) -> None:
        """Cut a forked child off from the messages between its parent and the guest."""
        os.close(self._control)
        self._control = -1

    # Interrupts.

    def _on_interrupt(self, *_: object) -> None:
        if self._interruptible:
            raise KeyboardInterrupt
        self._interrupted_late = True

    def _undisturbed(self, work: Callable[[], object]) -> None:
        """Hold back an interrupt until this is done."""
        if get_ident() != self._main_thread:
            work()
            return
        # In this order: an interrupt between the two is raised at once instead of being forgotten.
        self._interrupted_late = False
        before, self._interruptible = self._interruptible, False
        try:
            work()
        finally:
            self._interruptible = before
        if before and self._interrupted_late:
            raise KeyboardInterrupt

    # Cells.

    def _answer(self, asked: dict[str, Any]) -> None:
        restore = _set_variables(asked.get("env") or {})
        source = asked["code"].decode("utf-8", "replace")
        told = self._guarded(lambda: self._run_cell(source))
        if os.getpid() != self._pid:
            os._exit(_end_child(told))
        _flush_streams()
        _set_variables(restore)
        self._undisturbed(lambda: self._send(EXIT, self._number, told))

    def _guarded(self, work: Callable[[], object]) -> dict[str, Any]:
        """Run ``function``; return how it ended, in the guest's words."""
        try:
            try:
                self._interruptible = True
                self._check_cancelled()
                work()
                return {"code": 0}
            except BaseException as error:
                return describe_error(error)
            finally:
                self._interruptible = False
        except BaseException as error:  # while the other was being described
            self._interruptible = False
            name = type(error).__name__
            code = INTERRUPTED_CODE if isinstance(error, KeyboardInterrupt) else 1
            return {"code": code, "name": name, "value": "", "traceback": name + "\n"}

    def _check_cancelled(self) -> None:
        """Raise the interrupt of this cell if its signal came before it could be raised.

        Asked when signals are raised already: the guest sends the frame first, so where it is not
        here yet, the signal is still to come.
        """
        found: list[tuple[int, int]] = []

        def look() -> None:
            if self._arrivals.poll(0):
                found.append(self._receive()[:2])

        self._undisturbed(look)
        if found == [(CANCEL, self._number)]:
            # Its signal may still come, and there is nothing left to stop.
            self._interruptible = False
            raise KeyboardInterrupt

    def _run_cell(self, source: str) -> None:
        name = CELL.format(self._number)
        self._remember_source(name, source)
        tree: Any = compile(source, name, "exec", ONLY_AST | self._flags, True)
        last = None
        is_shown = not source.rstrip().endswith(";")
        if is_shown and tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = _ast.Expression(tree.body.pop().value)
        self._evaluate(tree, name, "exec")
        if last is not None:
            value = self._evaluate(last, name, "eval")
            if value is not None:
                builtins.__dict__["_"] = value
                self._show(describe_value(value), main=True)
        self.show_figures()

    def _evaluate(self, tree: Any, name: str, mode: str) -> Any:
        code = compile(tree, name, mode, self._flags, True)
        self._flags |= code.co_flags & self._futures
        answer = eval(code, self._namespace)  # noqa: S307 - that is what it is for
        return self._await(answer) if code.co_flags & IS_COROUTINE else answer

    def _await(self, work: Any) -> Any:
        import asyncio

        if self._event_loop is None or self._event_loop.is_closed():
            self._event_loop = asyncio.new_event_loop()
        loop = self._event_loop
        asyncio.set_event_loop(loop)
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: let it clean up
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException:  # noqa: S110 - the first one is reported
                    pass
            raise

    def _remember_source(self, name: str, source: str) -> None:
        import linecache

        lines = source.splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        linecache.cache[name] = (len(source), None, lines, name)
        self._sources.append(name)
        if len(self._sources) > MAX_SOURCES:
            linecache.cache.pop(self._sources.pop(0), None)

    # Results.

    def display(self, *values: Any, raw: bool = False, **_: Any) -> None:
        """Show values as a notebook would; with ``raw``, dicts from media types to content."""
        for value in values:
            self._show(value if raw and isinstance(value, dict) else describe_value(value))

    def show_figures(self) -> None:
        for figure in take_figures():
            self.display(figure)

    def _show(self, found: dict[str, Any], main: bool = False) -> None:
        _flush_streams()
        if self._control < 0:  # in a forked child
            sys.stdout.write(str(found.get("text/plain", "")) + "\n")
            return
        data, left_out = fit_bundle(found)
        waits = get_ident() == self._main_thread and self._interruptible
        record = {"data": data, "main": main, "left_out": left_out, "waits": waits}

        def tell() -> None:
            with self._sending:
                self._send(SHOW, self._number, record)
            if waits:
                while self._receive()[0] != RESULT:
                    pass

        self._undisturbed(tell)


def _set_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Set variables, or unset those that are None; return what restores the old ones."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        _flush_stream(stream)


def _flush_stream(stream: Any) -> None:
    try:
        stream.flush()
    except Exception:  # noqa: S110 - the user's program may have put anything there
        pass


def _end_child(told: dict[str, Any]) -> int:
    """End a child that a cell forked, at the end of that cell."""
    _flush_streams()
    if told.get("traceback"):
        os.write(2, told["traceback"].encode("utf-8", "backslashreplace"))
    return int(told["code"])


def describe_error(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the guest, without our own frames."""
    import traceback

    if isinstance(error, SystemExit):
        code = _exit_code(error.code)
        if not code:
            return {"code": 0}
    else:
        code = INTERRUPTED_CODE if isinstance(error, KeyboardInterrupt) else 1
    try:
        value = str(error)
    except Exception:
        value = "<exception str() failed>"
    told_by = traceback.TracebackException(type(error), error, error.__traceback__)
    ours = describe_error.__code__.co_filename
    told_by.stack[:] = [frame for frame in told_by.stack if not _is_below(frame, ours)]
    text = "".join(told_by.format())
    if len(text) > TRACEBACK_HEAD + TRACEBACK_TAIL:
        text = f"{text[:TRACEBACK_HEAD]}\n…\n{text[-TRACEBACK_TAIL:]}"
    told = {"name": type(error).__name__[:1000], "value": value[:MAX_VALUE_TEXT], "traceback": text}
    safe = {k: v.encode("utf-8", "backslashreplace").decode() for k, v in told.items()}
    return {"code": code, **safe}


def _is_below(frame: Any, ours: str) -> bool:
    """Whether a frame belongs to this program, and not to a cell."""
    return frame.filename == ours or frame.name == "run_until_complete"


def _exit_code(code: Any) -> int:
    """The exit code that a process would end with."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _refuse_input(prompt: object = "", /) -> str:
    raise EOFError("input() cannot be used: a context has no stdin")


def start_kernel(control: int) -> None:
    """Make the namespace, and report that the context is ready."""
    from types import ModuleType

    os.set_inheritable(control, False)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = [""]
    sys.path[0] = ""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    kernel = Kernel(control, module.__dict__)
    module.__dict__["__builtins__"] = builtins
    builtins.__dict__.update(display=kernel.display, input=_refuse_input)
    sys.meta_path.insert(0, PyplotShow(kernel.show_figures))
    kernel.serve()


if __name__ == "__main__":
    _own_module = sys.modules["__main__"]  # kept: its functions need its names
    start_kernel(int(sys.argv[1]))
