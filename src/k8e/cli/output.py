"""Output of the command: JSON, tables, progress bars, and errors that say what to do next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import textwrap
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from k8e import errors
from k8e.cli import fast

_HINTS = {
    "session_not_found": "k8e sandbox sessions lists your sessions",
    "context_not_found": "k8e sandbox context list lists the contexts of a session",
    "context_ended": "k8e sandbox context restart NAME starts it again, without its variables",
    "exec_not_found": "k8e sandbox ps ID lists the runs of a session",
    "runtime_unusable": "k8e doctor shows which runtimes work on this host and how to fix others",
    "gateway_unreachable": "k8e gateway in the foreground shows what is wrong",
    "invalid_request": "correct it and try again; k8e --help explains commands and arguments",
    "sandbox_died": "run the command again; a new session is made where none was named",
    "tool_failed": "the gateway's log has more; k8e doctor shows which runtimes work",
    "limit_exceeded": "free something, or ask for more",
    "unimplemented": "this comes with a later release",
}
_DEL = 0x7F  # the one character left as it is by json.dumps that a terminal acts on
_LISTING = "k8e sandbox list shows what is in /workspace"
_BUG_HINT = "this is a defect of k8e; the gateway's log may say more"


def encode(value: Any) -> str:
    """One line of JSON as K8E prints it: keys in order, safe inside HTML."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Outside of strings JSON has none of these, so replacing them everywhere is right.
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return text if text.isprintable() else "".join(map(_harmless, text))


def _harmless(char: str) -> str:
    """A character as it is, or escaped if a terminal would act on it or hide it.

    JSON leaves DEL, C1 controls and characters that turn the direction of text as they are, and
    some of this output comes from sandboxes. Invalid UTF-8 stays, for the encoder to replace.
    """
    if char.isprintable() or "\ud800" <= char <= "\udfff":
        return char
    return json.dumps(char)[1:-1] if ord(char) != _DEL else "\\u007f"


def answer(value: Any, *, to: int = 1) -> None:
    # Names of files may hold bytes that are not UTF-8; JSON cannot.
    fast.write(to, encode(value).encode("utf-8", "replace") + b"\n")


def write_lines(lines: Iterable[str]) -> None:
    """Print text for people."""
    fast.write(1, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def failure(error: BaseException, *, raw: bool = False, ok: bool = False) -> int:
    """Print an error; return the exit code that it stands for.

    Args:
        error: what went wrong.
        raw: whether stdout is for bytes of the sandbox alone, so that the error goes to stderr.
        ok: whether the command answers ``{"ok": true}`` when it succeeds.
    """
    message, hint = describe(error)
    told: dict[str, Any] = {"detail": hint, "error": message}
    if ok:
        told["ok"] = False
    with contextlib.suppress(OSError):  # a reader who has left does not make it another error
        answer(told, to=2 if raw else 1)
    if not raw:
        complain(message, hint)
    return error.exit_code if isinstance(error, errors.K8eError) else 1


def complain(message: str, hint: str) -> None:
    """Print an error on stderr too, where ``id=$(k8e sandbox create)`` does not swallow it.

    Not where stdout and stderr are one terminal or file: there it would appear twice.
    """
    with contextlib.suppress(OSError):
        if not _is_one_place():
            lines = f"k8e: error: {_line(message)}\nk8e: hint: {_line(hint)}\n"
            fast.write(2, lines.encode("utf-8", "replace"))


def _is_one_place() -> bool:
    try:
        return os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:  # one of them is closed
        return False


def _line(text: str) -> str:
    """Text on one line, without characters that a terminal acts on."""
    return "".join(map(_harmless, text)) if not text.isprintable() else text


def describe(error: BaseException) -> tuple[str, str]:
    """An error in words: what happened, and what to do next."""
    if isinstance(error, errors.K8eError):
        return error.message, error.hint or _HINTS.get(error.code, _BUG_HINT)
    if isinstance(error, OSError) and error.errno is not None:
        text = error.strerror or os.strerror(error.errno)
        name: Any = error.filename
        hint = errors.file_hint(error, _LISTING)
        # What a sandbox answers has its path in the text.
        return (f"{text}: {os.fsdecode(name)}" if name else text), hint
    return f"{type(error).__name__}: {error}", _BUG_HINT


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """For ``warnings.showwarning``: a sentence for people, without a place in our code."""
    fast.write(2, f"k8e: warning: {message}\n".encode("utf-8", "replace"))


_STEP = 0.1  # seconds between two pictures of the bar
_WIDTH = 30


class ProgressBar:
    """Shows progress on a terminal, and warns of files that were not copied."""

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible
        self._began = time.monotonic()
        self._drawn = 0.0

    def draw(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not self._visible or now < self._drawn + _STEP:
            return
        self._drawn = now
        speed = size(done / max(now - self._began, 0.001))
        bar = self._bar(done, total, now)
        fast.write(2, f"\r\x1b[K{bar}  {size(done)}  {speed}/s".encode())

    def _bar(self, done: int, total: int | None, now: float) -> str:
        if not total:  # only that something happens
            at = int((now - self._began) / _STEP) % _WIDTH
            return f"[{' ' * at}#{' ' * (_WIDTH - 1 - at)}]     "
        share = min(1.0, done / total)
        return f"[{('#' * int(share * _WIDTH)).ljust(_WIDTH)}] {share:4.0%}"

    def skip(self, path: str, why: str) -> None:
        """Report that something is not copied. Names come from a sandbox, so they are escaped."""
        plain = "".join(char if char.isprintable() else "\ufffd" for char in path)
        self.close()
        fast.write(2, f"k8e: warning: {plain} is not copied: {why}\n".encode("utf-8", "replace"))

    def close(self) -> None:
        if self._visible and self._drawn:
            fast.write(2, b"\r\x1b[K")


_LEAST = 30  # characters of the last column, however narrow the terminal is
_COLOUR = re.compile("\033\\[[0-9;]*m")


def table(rows: Iterable[Sequence[str]], *, width: int = 0) -> Iterator[str]:
    """Rows as lines whose columns are as wide as their widest cells.

    The last column may be as long as it likes, or is wrapped so that a line has ``width``
    characters. Colours take no room.
    """
    cells = [list(row) for row in rows]
    widths = [max(map(_shown_width, column)) for column in list(zip(*cells, strict=True))[:-1]]
    indent = sum(widths) + 2 * len(widths)
    for *first, last in cells:
        shown = zip(first, widths, strict=True)
        start = "".join(cell + " " * (wide - _shown_width(cell) + 2) for cell, wide in shown)
        lines = textwrap.wrap(last, max(width - indent, _LEAST)) if width else []
        yield (start + (lines[0] if lines else last)).rstrip()
        yield from (" " * indent + line for line in lines[1:])


def _shown_width(cell: str) -> int:
    return len(_COLOUR.sub("", cell))


def size(count: float) -> str:
    """A number of bytes in readable units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@contextlib.contextmanager
def shown() -> Generator[ProgressBar]:
    """A progress bar, which is removed at the end."""
    bar = ProgressBar(visible=os.isatty(2))
    try:
        yield bar
    finally:
        bar.close()
