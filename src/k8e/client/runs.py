# Generated from async_runs.py by tools/generate_client.py (`make gen`); changes belong there.
"""The handle of a run that outlives its caller, for the synchronous client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Any

from k8e import errors
from k8e.client import attachment, operations
from k8e.client.attachment import Following, RunHandle
from k8e.client.operations import Operation
from k8e.client.results import ExecEvent, ExecResult, RunState


class Run(RunHandle):
    """A command that runs on without us. Made by :meth:`SandboxClient.start`."""

    def __init__(
        self,
        run_id: str,
        call: Callable[[Operation[Any]], Any],
        stream: Callable[[Operation[Any]], Generator[Any]],
    ) -> None:
        super().__init__(run_id)
        self._call = call
        self._stream = stream

    def poll(self) -> RunState:
        """Its state, and its output so far. Does not wait for its end."""
        return self._call(attachment.run_snapshot(self._about("attach")))

    def output(self, start: int = 0, *, follow: bool = True) -> Generator[ExecEvent]:
        """Iterate over its output from byte ``start`` and, last, its exit.

        Leaving the loop does not disturb it. Without ``follow``, only what there is by now, and
        the exit only if it has ended. A gateway that restarts meanwhile is asked again.
        """
        following = Following(start)
        while True:
            operation = attachment.attached_output(
                self._about("attach", seq=following.at), follow=follow
            )
            try:
                with contextlib.closing(self._stream(operation)) as events:
                    for event in events:
                        following.saw(event)
                        yield event
                return
            except errors.GatewayUnreachable as error:
                time.sleep(following.delay(error))

    def wait(self) -> ExecResult:
        """Wait for its end; return the result, with the output that is still kept."""
        collected = attachment.Collected()
        for event in self.output():
            collected.add(event)
        return collected.result()

    def kill(self) -> None:
        """End it and everything that it started; nothing happens if it has ended."""
        self._call(operations.call(self._about("signal", terminate=True)))

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        self._call(operations.call(self._about("signal", signal=number)))
