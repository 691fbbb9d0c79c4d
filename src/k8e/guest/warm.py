"""Warm interpreters: Pythons and Nodes that have started already and wait for code.

Starting one is most of the time that a short program takes. So after the first run of a language's
code the guest keeps one or a few ready, and for a sandbox that has no session yet it can do so
ahead. They are programs of the session like any other: same user, own process session, same limits.
What they do, and why a program cannot tell, is in ``boot.py`` and ``boot_node.js``.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

from k8e.guest.keeping import Keeper
from k8e.guest.kinds import NodeKind, PythonKind, boot_folder
from k8e.guest.languages import ALIASES
from k8e.guest.loop import Loop
from k8e.guest.spawn import BASE_ENV, GID, UID
from k8e.guest.waiting import Waiting
from k8e.guest.wire import RESULT, WireError, pack


class Warmth:
    """The keepers of all languages, as one."""

    def __init__(self, loop: Loop, busy: Callable[[], object]) -> None:
        folder = boot_folder(sys.argv[0])
        kinds = (PythonKind(folder), NodeKind(folder))
        self.keepers = {kind.language: Keeper(kind, loop, busy) for kind in kinds}

    @property
    def ready(self) -> dict[str, int]:
        """How many could take a program now, by language."""
        return {name: keeper.ready for name, keeper in self.keepers.items()}

    def keeps(self, pid: int) -> bool:
        return any(pid in keeper.kept for keeper in self.keepers.values())

    def bind(self, env: dict[str, str], languages: dict[str, list[str]]) -> None:
        """A session has this environment, and room for interpreters of these languages.

        With each language come the modules that are loaded ahead.
        """
        for name, keeper in self.keepers.items():
            keeper.bind(dict(BASE_ENV, **env), name in languages, languages.get(name))

    def limit(self, kind: int, most: int) -> None:
        """Those that wait do not have it yet; only what has the user's ids may give it to them."""
        from resource import prlimit

        os.setresgid(GID, GID, 0)
        os.setresuid(UID, UID, 0)
        try:
            for keeper in self.keepers.values():
                for pid in keeper.kept:
                    prlimit(pid, kind, (most, most))
            return
        except OSError:
            pass  # new ones inherit it
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        for keeper in self.keepers.values():
            keeper.renew()

    def claim(self, spec: dict[str, Any], env: dict[str, str], cwd: str) -> Waiting | None:
        """An interpreter that has begun to run the code of ``spec``; None if a new one must."""
        keeper = self.keepers.get(ALIASES[spec["language"]])
        if keeper is None or spec.get("warm") is False or spec.get("tty"):
            return None
        return keeper.claim(spec, env, cwd)

    def on_quiet(self) -> None:
        """No program runs any more."""
        for keeper in self.keepers.values():
            keeper.on_quiet()

    def lost(self, pid: int) -> None:
        """A process that is no exec has ended; it was ours, perhaps."""
        for keeper in self.keepers.values():
            keeper.lost(pid)

    def clear(self) -> bool:
        """End all that wait; whether there were any."""
        return sum([keeper.clear() for keeper in self.keepers.values()]) > 0


class Preparation:
    """Somebody who waits until interpreters wait."""

    def __init__(
        self, channel: Any, warmth: Warmth, wanted: dict[str, list[str]], env: dict[str, str]
    ) -> None:
        self._channel = channel
        self._asked = [warmth.keepers[name] for name in wanted if name in warmth.keepers]
        channel.handler = self
        for keeper in self._asked:
            keeper.on_news = self._look
            if not keeper.ready:
                keeper.prepare(dict(BASE_ENV, **env), list(wanted[keeper.kind.language]))
        self._look()

    def on_frame(self, kind: int, body: bytes) -> None:
        raise WireError(f"frame {kind} while a sandbox settles")

    def on_lost(self) -> None:
        for keeper in self._asked:
            keeper.on_news = lambda: None

    def _look(self) -> None:
        if any(keeper.allowed and not keeper.ready for keeper in self._asked):
            return
        self.on_lost()
        left_out: list[str] = []
        for keeper in self._asked:
            left_out += keeper.left_out
            if not keeper.ready:
                left_out.append(f"{keeper.kind.language}: none could be started")
        ready = sum(keeper.ready for keeper in self._asked)
        self._channel.send(RESULT, pack({"warm": ready, "left_out": left_out}))
        self._channel.close()
