"""Records of each sandbox's network, in small files, for the next gateway.

A record is written before the kernel is changed, with what was bound before: so whichever of the
two the kernel turns out to have, a new gateway knows exactly what that is.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.egress.policy import Policy, parse_rule
from k8e.egress.rules import BoundPolicy

log = logging.getLogger(__name__)

# A generation is a mark of connections; above are the marks of the proxy, and groups of ports.
MOST = 0x6B000000
STEP = 1024  # generations that are set aside at a time
PAGE = 4096


@dataclass(frozen=True)
class NetworkRecord:
    """A sandbox's slot, the policy that is being bound to it, and the one before."""

    slot: int
    bound: BoundPolicy = field(default_factory=BoundPolicy)
    before: BoundPolicy = field(default_factory=BoundPolicy)


class NetworkRecords:
    """The records below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sandboxes"
        self._ceiling_file = folder / "generation"
        self._newest = self._ceiling = 0

    def load(self) -> dict[str, NetworkRecord]:
        """All records; an unreadable one has no owner."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.skip(self._read_ceiling())
        for scratch in self._folder.glob("*.tmp"):  # of a gateway that was killed while it wrote
            scratch.unlink()
        found: dict[str, NetworkRecord] = {}
        for path in self._folder.glob("*.json"):
            try:
                data = json.loads(path.read_text("utf-8"))
                found[path.stem] = NetworkRecord(
                    int(data["slot"]), _bound(data["bound"]), _bound(data["before"])
                )
            except errors.UNREADABLE:
                log.warning("the record %s cannot be read", path)
                path.unlink(missing_ok=True)
        for record in found.values():
            self.skip(max(record.bound.generation, record.before.generation))
        return found

    def _read_ceiling(self) -> int:
        try:
            found = int(self._ceiling_file.read_text("ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError):
            found = -1
        if not 0 <= found < MOST:
            # The kernel knows which ones are in use; see Egress.start.
            log.warning("%s holds no generation", self._ceiling_file)
            return 0
        return found

    def skip(self, generation: int) -> None:
        """Never use a generation up to this one again."""
        if generation > self._newest:
            self._newest = self._ceiling = generation

    def save(self, sandbox_id: str, record: NetworkRecord) -> None:
        data = {
            "slot": record.slot,
            "bound": _stored(record.bound),
            "before": _stored(record.before),
        }
        _write(self._folder / f"{sandbox_id}.json", json.dumps(data))

    def remove(self, sandbox_id: str) -> None:
        (self._folder / f"{sandbox_id}.json").unlink(missing_ok=True)

    def next_generation(self) -> int:
        """A number that no policy of this router ever had, also after a crash."""
        if self._newest + 1 >= MOST:
            raise errors.LimitExceeded(
                "policies were bound more often than this router can count",
                hint="end all sessions, remove the gateway's run folder and start it again",
            )
        if self._newest >= self._ceiling:
            self._ceiling = self._newest + STEP
            _write(self._ceiling_file, str(self._ceiling))
        self._newest += 1
        return self._newest


def _write(path: Path, text: str) -> None:
    data = text.encode("utf-8")
    if not _overwrite(path, data):
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(data)
        scratch.rename(path)


def _overwrite(path: Path, data: bytes) -> bool:
    """Overwrite an existing file, all or nothing; False if that fails.

    Nothing ends a process in the middle of a write within one page, and after a power failure there
    is no network to know about. A file of another name that takes its place costs ten times more.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        size = max(os.fstat(fd).st_size, len(data))
        return size <= PAGE and os.pwrite(fd, data.ljust(size), 0) == size
    except OSError:
        return False
    finally:
        os.close(fd)


def _stored(bound: BoundPolicy) -> dict[str, Any]:
    policy = bound.policy
    return {
        "generation": bound.generation,
        "rules": [[str(rule), rule.trusted] for rule in policy.rules],
        "open": policy.open,
        "strict": policy.strict,
    }


def _bound(data: dict[str, Any]) -> BoundPolicy:
    rules = tuple(parse_rule(text, trusted=bool(trusted)) for text, trusted in data["rules"])
    policy = Policy(rules, bool(data["open"]), bool(data["strict"]))
    return BoundPolicy(policy, int(data["generation"]))
