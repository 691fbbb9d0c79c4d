"""Runs that outlive their caller, for the synchronous SDK. A part of its client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Unpack

from k8e import errors
from k8e.client import attaching, operations, requests
from k8e.client.callers import Caller
from k8e.client.handles import Following, Handle
from k8e.client.operations import Operation
from k8e.client.requests import ExecOptions
from k8e.client.results import ExecEvent, ExecResult, ProcessInfo, RunState


class Runs(Caller):
    """What a client can do with programs that nobody waits for, and with processes."""

    def start(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        language: str = "",
        **options: Unpack[ExecOptions],
    ) -> Run:
        """Start a command that goes on without us; a handle to come back to it.

        Its newest 512 KiB of output are kept, and its end for a day.

        Args:
            session_id: where to run it.
            command: text for the shell, a list for no shell; with ``language``, source code.
            timeout: seconds after which it is killed; 0 means never.
            language: what the source code is written in.
            options: see :class:`ExecOptions`.
        """
        requests.check_exec_options(self.start, options)
        call = requests.start_call(
            session_id, command, language=language, timeout=timeout, options=options
        )
        told = self._call(attaching.start(call))
        return self.get_run(requests.run_id(str(told["session_id"]), str(told["id"])))

    def get_run(self, run_id: str) -> Run:
        """The handle of a run that was started before, here or elsewhere; asks nobody."""
        return Run(run_id, self._call, self._stream)

    def transcript(
        self, session_id: str, start: int = 0, *, follow: bool = False
    ) -> Generator[ExecEvent]:
        """Iterate over what all programs of a session printed, from byte ``start`` on.

        The newest 512 KiB are kept, without what was printed on terminals; values of the session's
        secrets are hidden. Last comes an exit, with the code of the run that ended last, if nothing
        runs by then; with ``follow`` it is waited for.
        """
        call = {"op": "transcript", "session": requests.by_id(session_id), "seq": start}
        return self._stream(attaching.output(call, follow=follow))

    def processes(self, session_id: str) -> list[ProcessInfo]:
        """Everything that runs in a session's sandbox."""
        call = {"op": "processes", "session": requests.by_id(session_id)}
        return self._call(operations.processes(call))

    def resize(self, session_id: str, exec_id: str, rows: int, columns: int) -> None:
        """Tell a command on a terminal that its window has another size."""
        call = requests.run_call("resize", requests.run_id(session_id, exec_id))
        self._call(operations.call({**call, "rows": rows, "cols": columns}))

    def symlink(self, session_id: str, path: str, target: str) -> None:
        """Make a symbolic link in a sandbox, replacing a file or link of that name."""
        self._call(operations.call(requests.file_call("symlink", session_id, path, target=target)))

    def chmod(self, session_id: str, path: str, mode: int) -> None:
        """Change the permissions of a file of a sandbox."""
        self._call(operations.call(requests.file_call("chmod", session_id, path, mode=mode)))


class Run(Handle):
    """A command that goes on without us. Made by :class:`SandboxClient`."""

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
        """How it is, and what it printed so far. Does not wait for its end."""
        return self._call(attaching.snapshot(self._about("attach")))

    def output(self, start: int = 0, *, follow: bool = True) -> Generator[ExecEvent]:
        """Iterate over its output from byte ``start`` and, last, its exit.

        Leaving the loop does not disturb it. Without ``follow``, only what there is by now, and
        the exit only if it has ended. A gateway that restarts meanwhile is asked again.
        """
        following = Following(start)
        while True:
            operation = attaching.output(self._about("attach", seq=following.at), follow=follow)
            try:
                with contextlib.closing(self._stream(operation)) as events:
                    for event in events:
                        following.saw(event)
                        yield event
                return
            except errors.GatewayUnreachable as error:
                time.sleep(following.delay(error))

    def wait(self) -> ExecResult:
        """Wait for its end; what came of it, and the output that is still kept."""
        collected = attaching.Collected()
        for event in self.output():
            collected.add(event)
        return collected.result()

    def kill(self) -> None:
        """End it and everything that it started; nothing happens if it has ended."""
        self._call(operations.call(self._about("signal", terminate=True)))

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        self._call(operations.call(self._about("signal", signal=number)))
