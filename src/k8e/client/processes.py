# Generated from async_processes.py by tools/generate_client.py (`make gen`); changes belong there.
"""The handle of an interactive program, for the synchronous client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from k8e import errors
from k8e.client import exchange, operations, requests
from k8e.client.attachment import RunHandle
from k8e.client.caller import ProgramDriver
from k8e.client.exchange import Exchange
from k8e.client.operations import Operation
from k8e.client.results import ExecEvent, ExecResult, Foreground


class Process(RunHandle):
    """A running program to write to and read from. Made by :meth:`SandboxClient.open`.

    Leaving its ``with`` block kills it. A write never waits for a reader, because what the
    program prints meanwhile is kept, up to 64 MiB.
    """

    def __init__(
        self,
        exchange: Exchange,
        driver: ProgramDriver,
        call: Callable[[Operation[Any]], Any],
    ) -> None:
        super().__init__(exchange.run_id)
        self._exchange = exchange
        self._driver = driver
        self._call = call

    def begin(self) -> None:
        """Start it; called once, by the client."""
        self._driver.begin()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing.

    def write(self, data: str | bytes) -> None:
        """Send input. Waits while the program is 1 MiB behind; BrokenPipeError if it has ended.

        Raises LimitExceeded if 64 MiB of output wait to be read.
        """
        self._driver.write(self._exchange.write(data))

    def close_stdin(self) -> None:
        """Let the program see the end of its input; on a terminal this is Ctrl-D."""
        self._driver.write(self._exchange.close_stdin())

    # Reading.

    def __iter__(self) -> Generator[ExecEvent]:
        """Iterate over its output and, last, its exit. Leaving the loop does not disturb it."""
        while (event := self._driver.drive(self._exchange.next_event())) is not None:
            yield event

    def read(self, count: int = -1) -> bytes:
        """At most ``count`` bytes of stdout, as soon as there are any; empty at the end.

        Without ``count``, everything up to the end.
        """
        return self._driver.drive(self._exchange.read(count))

    def read_until(self, marker: str | bytes) -> bytes:
        """Stdout up to and with ``marker``; EOFError if the program ends without printing it."""
        return self._driver.drive(self._exchange.read_until(requests.as_bytes(marker)))

    def wait(self) -> ExecResult:
        """Wait for its end; return the result, with the output that was not read before."""
        return self._driver.drive(self._exchange.wait())

    # Control.

    def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size."""
        self._call(operations.call(self._about("resize", rows=rows, cols=columns)))

    def signal(self, number: int, *, foreground: bool = False) -> None:
        """Send a signal to its process group, or to the foreground group of its terminal."""
        call = self._about("signal", signal=number, foreground=foreground)
        self._call(operations.call(call))

    def foreground(self) -> Foreground:
        """The foreground process group of its terminal, and whether that waits for input."""
        return self._call(exchange.foreground_group(self._about("foreground")))

    def kill(self) -> None:
        """End it and everything that it started; nothing happens if it has ended."""
        with contextlib.suppress(errors.ExecNotFound):
            self._call(operations.call(self._about("signal", terminate=True)))

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
        self._driver.close(self.kill)
