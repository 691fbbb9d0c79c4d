"""How many sessions one owner may have at once, where the operator has said so."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator

from k8e import errors
from k8e.sessions.store import Store


class KeyQuotas:
    """Counts what lives, and what is about to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._coming: Counter[str] = Counter()
        self.most_of: Callable[[str], int] = lambda owner: 0
        """The quota of an owner; 0 means none of its own."""

    @contextlib.contextmanager
    def room(self, owner: str) -> Generator[None]:
        """Hold the place of a session until it is written down; LimitExceeded if there is none."""
        most = self.most_of(owner)
        if most and self._store.count_of(owner) + self._coming[owner] >= most:
            raise errors.LimitExceeded(
                f"you have {most} sessions, the most that this key may have (--max-sessions)",
                hint="destroy some: k8e sandbox sessions, k8e sandbox destroy ID",
            )
        self._coming[owner] += 1
        try:
            yield
        finally:
            self._coming[owner] -= 1
            if not self._coming[owner]:
                del self._coming[owner]
