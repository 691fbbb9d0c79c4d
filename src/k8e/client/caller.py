"""Drives operations, scripts and interactive programs for the synchronous client.

Its twin for event loops is :mod:`k8e.client.async_caller`. Both are written by hand, because
waiting and cancelling are different there; everything above them is written once (see ``make
gen``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from k8e import errors
from k8e.client import driver, operations, requests
from k8e.client.driver import Connector, Pool, SyncOperation
from k8e.client.exchange import MORE, Exchange, Steps
from k8e.client.operations import Ask, Do, Operation, Script, Send, Step
from k8e.client.requests import Content
from k8e.client.results import ExecResult

T = TypeVar("T")


class Caller:
    """Runs operations over the connections of one client, for any number of threads."""

    def __init__(self, connector: Connector) -> None:
        self._pool = Pool(connector)
        self._streamed: dict[str, Mapping[str, Any]] = {}  # commands that end with their reader

    def _call(self, operation: Operation[T], source: Content | None = None) -> T:
        running = SyncOperation(self._pool.take(), operation, source, self._pool.renew)
        while running.next_event() is not None:
            pass
        self._pool.keep(running.connection)
        return running.result

    def _exec(self, call: Mapping[str, Any], stdin: Content | None) -> ExecResult:
        with self._killing(call):
            return self._call(operations.exec_result(call), stdin)

    def _stream(self, operation: Operation[Any], source: Content | None = None) -> Generator[Any]:
        running = SyncOperation(self._pool.take(), operation, source, self._pool.renew)
        try:
            while (event := running.next_event()) is not None:
                yield event
                self._pool.check_open()
            self._pool.keep(running.connection)
        finally:
            running.close()

    @contextlib.contextmanager
    def _killing(self, call: Mapping[str, Any]) -> Generator[None]:
        """Kill the command if its caller gives up: Ctrl-C, or leaving a loop over its output."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            self._kill(call)
            raise

    def _kill(self, call: Mapping[str, Any]) -> None:
        with contextlib.suppress(errors.K8eError):
            self._call(operations.call(requests.terminate_call(call)))

    def _end_programs(self) -> None:
        """End the programs that end with their reader or with their handle."""
        for call in list(self._streamed.values()):
            self._kill(call)
        for program in self._pool.ending:
            program.close()

    def _perform(self, script: Script[T]) -> T:
        """Run a script."""
        try:
            step = next(script)
            while True:
                try:
                    answer = self._perform_step(step)
                except BaseException as error:
                    step = script.throw(error)
                else:
                    step = script.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            script.close()

    def _perform_step(self, step: Step) -> Any:
        if isinstance(step, Do):
            return step.work()
        if isinstance(step, Ask):
            return self._call(step.operation, step.source)
        for chunk in self._stream(step.operation):
            step.write(chunk.data)
        return None


class ProgramDriver:
    """Drives the exchange with one program over a connection of its own.

    One thread may write while another reads.
    """

    def __init__(self, exchange: Exchange, pool: Pool) -> None:
        self._exchange = exchange
        self._pool = pool
        self._connection: driver.Connection | None = None
        self._changed = threading.Condition()  # protects the exchange and the connection
        self._receiving = False  # whether a thread waits for the next frame, without the lock
        self._writing = threading.Lock()  # one whole write at a time

    def begin(self) -> None:
        """Start the program."""
        self._connection = self._pool.take()
        self._connection.begin()
        try:
            self.drive(self._exchange.begin())
        except BaseException:
            self._disconnect()
            raise

    def write(self, steps: Steps) -> None:
        """Take steps that send input, when those of other writers have been taken."""
        with self._writing:
            self.drive(steps)

    def close(self, kill: Callable[[], None]) -> None:
        """End the program with ``kill`` if it runs, and wait for its end."""
        if self._exchange.exit is None:
            with contextlib.suppress(errors.K8eError):
                kill()
                self.drive(self._exchange.drain())

    def drive(self, steps: Steps) -> Any:
        """Take steps of the exchange; return their result."""
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
