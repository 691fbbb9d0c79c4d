"""The session's transcript: the output of all its programs, in the order of its arrival.

It is an output like that of one exec, numbered and bounded; it ends when no program runs any more.
Output on terminals is not in it, nor that of programs which the gateway runs itself.
"""

from __future__ import annotations

import time
from typing import Any

from k8e.guest.streams import ExecOutput, OutputReader
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
# Bytes that are held back for what follows; a longer beginning of a secret is shown.
HELD_MOST = 4096


class Veil:
    """Masks secrets in one stream, in whatever pieces they come.

    A possible beginning of a secret is held back until more has come, or no program runs any more.
    """

    def __init__(self, secrets: list[bytes]) -> None:
        self._secrets = secrets  # the longest first
        self._seen = b""  # the newest bytes, and how many of them were given away
        self._given = 0

    def cover(self, data: bytes) -> bytes:
        """The part that can be shown now."""
        self._seen += data
        end = len(self._seen) - self._waiting()
        told = self._covered()[self._given : end]
        start = max(0, end - len(self._secrets[0]) + 1)
        self._seen, self._given = self._seen[start:], end - start
        return told

    def lift(self) -> bytes:
        """The part that was held back, since nothing follows."""
        told = self._covered()[self._given :]
        self._seen, self._given = b"", 0
        return told

    def _covered(self) -> bytes:
        text = self._seen
        for secret in self._secrets:
            text = text.replace(secret, b"*" * len(secret))
        return text

    def _waiting(self) -> int:
        """The number of bytes at the end that are the beginning of a secret."""
        most = 0
        for secret in self._secrets:
            longest = min(len(secret) - 1, HELD_MOST, len(self._seen) - self._given)
            tail = self._seen[len(self._seen) - longest :]
            at = tail.find(secret[:1])
            while 0 <= at < longest - most:
                if secret.startswith(tail[at:]):
                    most = longest - at
                    break
                at = tail.find(secret[:1], at + 1)
        return most


class Transcript:
    """All output of this sandbox's programs since it got its session."""

    def __init__(self) -> None:
        self._output = ExecOutput(True, 0)
        self._output.finished = True
        self._running: set[str] = set()
        self._code = 0  # output of the program that ended last
        self._began = time.monotonic()
        self._veils: dict[int, Veil] = {}  # by stream; none where there are no secrets

    def hide(self, values: list[str]) -> None:
        """Never show these values; asterisks take the place of their bytes."""
        found = {value.encode("utf-8", "surrogateescape") for value in values}
        secrets = [value for value in found if len(value) >= SHORTEST_SECRET]
        secrets.sort(key=len, reverse=True)
        self._veils = {kind: Veil(secrets) for kind in (OUT, ERR)} if secrets else {}

    def begin(self, exec_id: str, output: ExecOutput) -> None:
        """Follow the output of a program that starts."""
        self._running.add(exec_id)
        self._output.finished = False
        output.copy = self._add

    def end(self, exec_id: str, code: int) -> None:
        """Note that a program has ended, and has no more output."""
        if exec_id in self._running:
            self._running.remove(exec_id)
            self._code = code
            if not self._running:
                for kind, veil in self._veils.items():
                    self._output.add(kind, veil.lift())
                self._output.finish()

    def _add(self, kind: int, data: bytes) -> None:
        if kind != SHOW:
            veil = self._veils.get(kind)
            self._output.add(kind, data if veil is None else veil.cover(data))

    def attach(self, channel: Any, spec: dict[str, Any]) -> None:
        start, credit = int(spec.get("seq") or 0), int(spec.get("window") or WINDOW)
        channel.send(RESULT, pack(self._describe()))
        TranscriptReader(self._output, channel, start, credit, self._describe)

    def _describe(self) -> dict[str, Any]:
        """A description like an exec's, which other code can read."""
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


class TranscriptReader:
    """A reader of the transcript, until no program runs any more."""

    def __init__(
        self, output: ExecOutput, channel: Any, start: int, credit: int, describe: Any
    ) -> None:
        self._output = output
        self._channel = channel
        self._describe = describe
        self._reader = OutputReader(output, channel, start=start, credit=credit)
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
