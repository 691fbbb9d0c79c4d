"""The session's transcript: what all its programs printed, in the order in which it came.

It is an output like that of one exec, numbered and bounded; its end is when nothing runs any more.
What programs print on terminals is not in it, nor what the gateway runs itself.
"""

from __future__ import annotations

import time
from typing import Any

from k8e.guest.output import Output, Reader
from k8e.guest.wire import (
    CANCEL,
    CREDIT,
    CREDIT_BODY,
    ERR,
    EXIT,
    OUT,
    RESULT,
    SHOW,
    WINDOW,
    WireError,
    pack,
)

SHORTEST_SECRET = 4  # bytes: shorter ones are words of every output


class Transcript:
    """What was printed in this sandbox since it became a session's."""

    def __init__(self) -> None:
        self._output = Output(True, 0)
        self._output.finished = True
        self._running: set[str] = set()
        self._code = 0  # of what ended last
        self._began = time.monotonic()
        self._secrets: list[bytes] = []
        self._held = {OUT: b"", ERR: b""}

    def hide(self, values: list[str]) -> None:
        """Never show these values; asterisks stand for them, as many as they have bytes."""
        found = {value.encode("utf-8", "surrogateescape") for value in values}
        self._secrets = sorted(
            (value for value in found if len(value) >= SHORTEST_SECRET), key=len, reverse=True
        )

    def begin(self, exec_id: str, output: Output) -> None:
        """A program starts: follow what it prints."""
        self._running.add(exec_id)
        self._output.finished = False
        output.copy = self._add

    def end(self, exec_id: str, code: int) -> None:
        """A program has ended, and has said everything."""
        if exec_id in self._running:
            self._running.remove(exec_id)
            self._code = code
            if not self._running:
                self._release()
                self._output.finish()

    def _release(self) -> None:
        """Show what might have become a secret; nothing follows that would make it one."""
        for kind, held in self._held.items():
            if held:
                self._held[kind] = b""
                self._output.add(kind, held)

    def _add(self, kind: int, data: bytes) -> None:
        if kind != SHOW:
            shown = self._hidden(kind, data) if self._secrets else data
            if shown:
                self._output.add(kind, shown)

    def _hidden(self, kind: int, data: bytes) -> bytes:
        """What can be shown by now; a secret may come in pieces, and its first is held until then.

        Else somebody who prints it byte by byte would show all of it but for the last one.
        """
        both = self._held[kind] + data
        for secret in self._secrets:
            both = both.replace(secret, b"*" * len(secret))
        shown = len(both) - max(_begun(both, secret) for secret in self._secrets)
        self._held[kind] = both[shown:]
        return both[:shown]

    def attach(self, channel: Any, spec: dict[str, Any]) -> None:
        start, credit = int(spec.get("seq") or 0), int(spec.get("window") or WINDOW)
        channel.send(RESULT, pack(self._describe()))
        TranscriptReader(self._output, channel, start, credit, self._describe)

    def _describe(self) -> dict[str, Any]:
        """Like an exec, which others know how to read."""
        return {
            "id": "",
            "pid": 0,
            "background": False,
            "status": "running" if self._running else "completed",
            "code": None if self._running else self._code,
            "signal": 0,
            "duration_ms": int((time.monotonic() - self._began) * 1000),
            "truncated": False,
            "seq": self._output.end,
        }


def _begun(text: bytes, secret: bytes) -> int:
    """How many bytes of a secret, but not all, ``text`` ends with."""
    start = max(0, len(text) - len(secret) + 1)
    while (start := text.find(secret[:1], start)) >= 0:
        if secret.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class TranscriptReader:
    """One who reads the transcript, until nothing runs any more."""

    def __init__(
        self, output: Output, channel: Any, start: int, credit: int, describe: Any
    ) -> None:
        self._output = output
        self._channel = channel
        self._describe = describe
        self._reader = Reader(output, channel, start=start, credit=credit)
        self._reader.on_end = self._say_end
        output.readers.append(self._reader)
        channel.handler = self
        self._reader.pump()

    def _say_end(self) -> None:
        told = dict(self._describe(), lost=self._reader.lost)
        self._channel.send(EXIT, pack(told))
        self._channel.close()

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == CREDIT:
            self._reader.credit(CREDIT_BODY.unpack(body)[0])
        elif kind == CANCEL:
            self._channel.close()
            self.on_lost()
        else:
            raise WireError(f"frame {kind} on a transcript")

    def on_lost(self) -> None:
        if self._reader in self._output.readers:
            self._output.readers.remove(self._reader)
