"""What only the gateway knows of a session: what it was refused, and which limits it met.

It is told with the end of a run and noted in the session's events, whatever the guest says of that
end, and though it says nothing: a guest is hostile, and auditors read this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from k8e.model import Session
from k8e.sessions.events import Events
from k8e.sessions.live import Live
from k8e.sessions.network import Network


class Witness:
    """Looks at one exec, from now to its end."""

    def __init__(self, network: Network, live: Live) -> None:
        self._network = network
        self._live = live
        self._mark = self._until = network.mark(live.session.sandbox_id)
        self._denials: list[dict[str, Any]] = []
        self._limits: list[dict[str, Any]] = []
        self._looked = False

    @property
    def saw_something(self) -> bool:
        """Whether there is anything to note that the guest could not tell the next gateway."""
        return self._until > self._mark or bool(self._limits)

    def amend(self, body: bytes) -> bytes:
        """An EXIT with the refusals since this began, and the limits that were met."""
        self._look()
        lacks = self._network.lacks(self._live.session)
        body = self._network.add_denials(body, self._denials, lacks)
        body, self._limits = self._live.limits.examine(body)
        return body

    def note(self, events: Events, exec_id: str) -> None:
        """Write down what was seen, once it is known how the exec ended."""
        if not self._looked:  # there was no EXIT
            self._look()
        live = self._live
        _note_refusals(self._network, events, live, self._mark)  # of what nobody waited for
        if self._until > self._mark:
            count = self._until - self._mark
            fields = {"exec_id": exec_id, "count": count, "denials": self._denials}
            events.write(live.session, "egress.denied", **fields)
        live.refusals_noted = max(live.refusals_noted, self._until)
        note_limits(events, live.session, self._limits, exec_id=exec_id)

    def _look(self) -> None:
        sandbox_id = self._live.session.sandbox_id
        self._denials = self._network.denials_since(sandbox_id, self._mark)
        self._until = self._network.mark(sandbox_id)
        self._looked = True


def note_limits(
    events: Events, session: Session, met: Iterable[dict[str, Any]], **fields: Any
) -> None:
    """One row for each limit. The gateway itself has found the words."""
    for item in met:
        events.write(session, "limit.reached", **fields, **item)


def note_rest(network: Network, events: Events, live: Live) -> None:
    """Note what was refused to a session and is in no row: its last network is about to go."""
    sandbox_id = live.session.sandbox_id
    network.take_in()
    _note_refusals(network, events, live, network.mark(sandbox_id))


def _note_refusals(network: Network, events: Events, live: Live, until: int) -> None:
    """Note what was refused up to ``until`` and not yet noted: no exec is known for it."""
    before = live.refusals_noted
    if until <= before:
        return
    live.refusals_noted = until
    denials = network.denials_since(live.session.sandbox_id, before, until)
    events.write(live.session, "egress.denied", count=until - before, denials=denials)
