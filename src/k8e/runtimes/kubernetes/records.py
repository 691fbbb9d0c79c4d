"""What a gateway writes down of each sandbox in a pod, before anything of it exists."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.link import KEY_SIZE
from k8e.model import Limits

FORMAT = 1


@dataclass(frozen=True)
class PodRecord:
    """A sandbox in a pod."""

    sandbox_id: str
    """The name of its claim, too."""
    runtime: str
    limits: Limits
    key: str
    """The key of its link, in hexadecimal digits."""
    template: str
    """The name of its template."""
    claim_uid: str = ""
    pod: str = ""
    pod_uid: str = ""
    """Empty until its guest has proved that it is in this pod, and taken the key."""
    format: int = FORMAT


class Records:
    """A folder for each sandbox. They outlive a reboot of this machine, as pods do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._templates: dict[str, str] | None = None

    def templates(self) -> set[str]:
        """The templates that sandboxes are made of now."""
        return set(self._by_sandbox().values())

    def _by_sandbox(self) -> dict[str, str]:
        if self._templates is None:
            known = (self.load(name) for name in self.names())
            self._templates = {item.sandbox_id: item.template for item in known if item}
        return self._templates

    def names(self) -> set[str]:
        return {path.name for path in self._folder.glob("sb-*")}

    def save(self, record: PodRecord) -> None:
        folder = self._folder / record.sandbox_id
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = folder / "pod.json.tmp"
        scratch.unlink(missing_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(record), file)
        scratch.rename(folder / "pod.json")
        self._by_sandbox()[record.sandbox_id] = record.template

    def load(self, sandbox_id: str) -> PodRecord | None:
        """The record of a sandbox; None where it was only half made.

        Raises:
            StateUnusable: a newer release made it, and might want it back.
        """
        try:
            text = (self._folder / sandbox_id / "pod.json").read_text("utf-8")
            data: dict[str, Any] = json.loads(text)
            made_by = int(data.get("format", 0))
            data["limits"] = Limits(**_known(Limits, data["limits"]))
            record = PodRecord(**_known(PodRecord, data))
            if made_by <= FORMAT and len(bytes.fromhex(record.key)) == KEY_SIZE:
                return record if record.sandbox_id == sandbox_id else None
        except errors.UNREADABLE:
            return None
        raise errors.StateUnusable(
            f"sandbox {sandbox_id} was made by a newer k8e",
            hint="update k8e, or set K8E_DATA_DIR to another folder",
        )

    def remove(self, sandbox_id: str) -> None:
        shutil.rmtree(self._folder / sandbox_id, ignore_errors=True)
        self._by_sandbox().pop(sandbox_id, None)


def _known(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in data.items() if name in names}
