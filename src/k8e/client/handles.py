"""What both kinds of handles to a run have in common."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.client import requests
from k8e.client.operations import RETRY_DELAYS
from k8e.client.results import ExecEvent, Exit


class Handle:
    """Something that runs in a session, by its name."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        """Names the run, also for other programs and on the command line."""
        self.session_id, self.exec_id = requests.split_run_id(run_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.run_id!r})"

    def _about(self, op: str, **fields: Any) -> dict[str, Any]:
        """An operation on it."""
        return requests.run_call(op, self.run_id, **fields)


class Following:
    """How far a reader of a run has come, and how soon it tries again when a gateway is gone."""

    def __init__(self, start: int) -> None:
        self.at = start
        self._delays = iter(RETRY_DELAYS)

    def saw(self, event: ExecEvent) -> None:
        if not isinstance(event, Exit):
            self.at = event.seq + len(event.data)
        self._delays = iter(RETRY_DELAYS)

    def delay(self, error: errors.GatewayUnreachable) -> float:
        """Seconds until the next try; ``error`` is raised if that was the last one."""
        delay = next(self._delays, None)
        if delay is None:
            raise error
        return delay
