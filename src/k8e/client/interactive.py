"""Programs that are talked to while they run, for the synchronous SDK. A part of its client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Unpack

from k8e import errors
from k8e.client import driving, exchange, operations, requests
from k8e.client.callers import Caller
from k8e.client.exchange import MORE, Exchange, Steps
from k8e.client.handles import Handle
from k8e.client.operations import Operation, Send
from k8e.client.requests import ExecOptions
from k8e.client.results import ExecEvent, ExecResult, Foreground


class Interactive(Caller):
    """What a client can do with programs that it talks to."""

    _pool: driving.Pool

    def open(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        stdin: bool = True,
        **options: Unpack[ExecOptions],
    ) -> Process:
        """Start a program to write to and read from while it runs; it ends with the handle.

        Args:
            session_id: where to run it.
            command: text for the shell, a list for no shell.
            timeout: seconds after which it is killed; 0 means never.
            stdin: whether it can be written to; otherwise it reads an empty stdin.
            options: see :class:`ExecOptions`; ``tty=(rows, columns)`` gives it a terminal.
        """
        requests.check_exec_options(self.open, options)
        call = exchange.open_call(
            session_id, command, timeout=timeout, stdin=stdin, options=options
        )
        process = Process(Exchange(call), self._pool, self._call)
        process.begin()
        self._pool.end_with(process)
        return process

    def terminal(
        self,
        session_id: str,
        program: str | Sequence[str] | None = None,
        rows: int = 24,
        columns: int = 80,
        *,
        timeout: float = 0,
        **options: Unpack[ExecOptions],
    ) -> Process:
        """Start a program on a terminal: by default ``bash``, or ``sh`` where there is none."""
        requests.check_exec_options(self.terminal, options)
        options["tty"] = (rows, columns)
        tried = exchange.programs(program)
        for command in tried[:-1]:
            with contextlib.suppress(FileNotFoundError):
                return self.open(session_id, command, timeout, **options)
        return self.open(session_id, tried[-1], timeout, **options)


class Process(Handle):
    """A program that runs, to be written to and read from. Made by :meth:`SandboxClient.open`.

    Leaving its ``with`` block kills it. One thread may write while another reads; within one thread
    a write never waits for a reader, because what the program prints meanwhile is kept, up to
    64 MiB.
    """

    def __init__(
        self,
        exchange: Exchange,
        pool: driving.Pool,
        call: Callable[[Operation[Any]], Any],
    ) -> None:
        super().__init__(exchange.run_id)
        self._exchange = exchange
        self._pool = pool
        self._call = call
        self._connection: driving.Connection | None = None
        self._changed = threading.Condition()  # protects the exchange and the connection
        self._receiving = False  # whether a thread waits for the next frame, without the lock
        self._writing = threading.Lock()  # one whole write at a time

    def begin(self) -> None:
        """Start it; called once, by the client."""
        self._connection = self._pool.take()
        self._connection.begin()
        try:
            self._drive(self._exchange.begin())
        except BaseException:
            self._disconnect()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing.

    def write(self, data: str | bytes) -> None:
        """Send input. Waits while the program lags a MiB behind; BrokenPipeError if it has ended.

        Raises LimitExceeded if 64 MiB of output wait to be read.
        """
        with self._writing:
            self._drive(self._exchange.write(data))

    def close_stdin(self) -> None:
        """Let the program see the end of its input; on a terminal this is Ctrl-D."""
        with self._writing:
            self._drive(self._exchange.close_stdin())

    # Reading.

    def __iter__(self) -> Generator[ExecEvent]:
        """What it prints as it comes and, last, its exit. Leaving the loop does not disturb it."""
        while (event := self._drive(self._exchange.next_event())) is not None:
            yield event

    def read(self, count: int = -1) -> bytes:
        """At most ``count`` bytes of stdout, as soon as there are any; empty at the end.

        Without ``count``, everything up to the end.
        """
        return self._drive(self._exchange.read(count))

    def read_until(self, marker: str | bytes) -> bytes:
        """Stdout up to and with ``marker``; EOFError if the program ends without printing it."""
        return self._drive(self._exchange.read_until(requests.as_bytes(marker)))

    def wait(self) -> ExecResult:
        """Wait for its end; what came of it, with the output that was not read before."""
        return self._drive(self._exchange.wait())

    # Control.

    def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size."""
        self._call(operations.call(self._about("resize", rows=rows, cols=columns)))

    def signal(self, number: int, *, foreground: bool = False) -> None:
        """Send a signal to its process group, or to the one in front of its terminal."""
        call = self._about("signal", signal=number, foreground=foreground)
        self._call(operations.call(call))

    def foreground(self) -> Foreground:
        """Which process group is in front of its terminal, and whether that waits for input."""
        return self._call(exchange.foreground(self._about("foreground")))

    def kill(self) -> None:
        """End it and everything that it started; nothing happens if it has ended."""
        with contextlib.suppress(errors.ExecNotFound):
            self._call(operations.call(self._about("signal", terminate=True)))

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
        if self._exchange.exit is None:
            with contextlib.suppress(errors.K8eError):
                self.kill()
                self._drive(self._exchange.drain())

    # Driving.

    def _drive(self, steps: Steps) -> Any:
        self._pool.check_open()
        with self._changed:
            try:
                while True:
                    step = next(steps)
                    if isinstance(step, Send):
                        if self._connection is not None:
                            self._connection.send(step.kind, step.body)
                    elif step is MORE:
                        self._receive()
            except StopIteration as stop:
                return stop.value
            finally:
                steps.close()

    def _receive(self) -> None:
        """Take in one frame, or wait for the thread that does."""
        if self._receiving:
            self._changed.wait()
            return
        connection = self._connection
        if connection is None:
            raise errors.GatewayUnreachable("the program's connection was closed")
        self._receiving = True
        self._changed.release()
        failure: errors.GatewayUnreachable | None = None
        kind, body = -1, b""
        try:
            kind, body = connection.receive()
        except errors.GatewayUnreachable as error:
            failure = error
        finally:
            self._changed.acquire()
            self._receiving = False
            self._changed.notify_all()
        if failure is not None:
            self._exchange.fail(failure)
        else:
            self._exchange.receive(kind, body)
        if self._exchange.exit is not None:
            self._connection = None
            self._pool.keep(connection)
        elif self._exchange.over:
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
