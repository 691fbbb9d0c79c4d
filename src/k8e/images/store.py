"""Fetched images on disk: unpacked layers by digest, and images by name.

    layers/HEX/fs    one unpacked layer, by the digest of its archive; shared by all images
    layers/HEX/size  of its files, in bytes
    names/KEY.json   an image: which layers, and what its configuration says
    scratch/         what is being made or removed; swept at start

A layer is made in ``scratch`` and renamed when it is whole, so that a half of one is never seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k8e import disk, errors
from k8e.images import manifest
from k8e.images.unpacker import RESERVE

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


def _no_env() -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Image:
    """An image that is here."""

    name: str
    """Its reference, or ``tar:`` and a path."""
    digest: str
    """Of its manifest (or index); of an archive, what tells whether it has changed."""
    layers: tuple[str, ...]
    """Digests of the unpacked archives, the lowest first."""
    size: int
    """Of its files, in bytes."""
    pulled_at: float
    env: dict[str, str] = field(default_factory=_no_env)
    workdir: str = ""
    platform: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that an operator may see; its variables may be confidential."""
        shown = asdict(self)
        del shown["env"]
        return shown | {"layers": list(self.layers)}


class ImageStore:
    """The images and layers below one folder."""

    def __init__(self, folder: Path, min_free: int = 0) -> None:
        """``min_free`` bytes of the disk are left to others."""
        self._min_free = max(RESERVE, min_free)
        self._layers, self._names = folder / "layers", folder / "names"
        self._scratch = folder / "scratch"
        self.lock = threading.RLock()
        """Held while layers are taken into use or away."""
        self._pinned: Counter[str] = Counter()
        self._named: set[str] = set()  # layers of all images that were saved by us
        self._making: set[Path] = set()

    def prepare(self) -> None:
        for folder in (self._layers, self._names, self._scratch):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove half-made layers of a killed gateway, and discarded ones."""
        with self.lock:
            left = [path for path in self._scratch.iterdir() if path not in self._making]
        for path in left:
            _discard(path)  # another thread may do the same

    # Layers.

    def refuse_if_full(self, coming: int) -> None:
        """Refuse a download that would leave others no room, before it begins."""
        free = disk.space(self._scratch).free
        if free < coming + self._min_free:
            # At first the size to come is known; later, other programs may have taken the free
            # space.
            beside = f"there is no room on the disk for an image of {coming} bytes beside"
            raise disk.nearly_full(free, self._min_free, beside if coming else "images leave")

    def layer(self, diff_id: str) -> Path:
        """The folder with the layer's files."""
        return self._home(diff_id) / "fs"

    def _home(self, diff_id: str) -> Path:
        return self._layers / diff_id.removeprefix("sha256:")

    def has(self, diff_id: str) -> bool:
        return self._home(diff_id).is_dir()

    def size(self, diff_id: str) -> int:
        return int((self._home(diff_id) / "size").read_text("ascii"))

    @contextlib.contextmanager
    def scratch(self) -> Generator[Path]:
        """A new folder to make a layer in, with ``fs`` for its files; removed unless kept."""
        folder = self._scratch / secrets.token_hex(8)
        with self.lock:
            self._making.add(folder)
        folder.mkdir(mode=0o700)
        (folder / "fs").mkdir()
        (folder / "fs").chmod(0o755)
        try:
            yield folder
        finally:
            _discard(folder)
            with self.lock:
                self._making.discard(folder)

    def keep(self, folder: Path, diff_id: str, size: int) -> None:
        """Make a scratch folder the layer of this digest; on disk before it is visible.

        Unless it is not wanted any more, because the pull failed.
        """
        (folder / "size").write_text(str(size), "ascii")
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _libc.syncfs(fd)
        finally:
            os.close(fd)
        with self.lock:
            if self._pinned[diff_id] and not self.has(diff_id):
                folder.rename(self._home(diff_id))

    @contextlib.contextmanager
    def pinned(self, diff_ids: Iterable[str]) -> Generator[None]:
        """Keep layers, present or expected, that no image names yet."""
        wanted = Counter(diff_ids)
        with self.lock:
            self._pinned += wanted
        try:
            yield
        finally:
            with self.lock:
                self._pinned -= wanted

    def drop(self, diff_ids: Iterable[str]) -> None:
        """Discard the layers of a failed pull, unless another one needs them by now."""
        with self.lock:
            for diff_id in set(diff_ids) - self._named:
                if self.has(diff_id) and not self._pinned[diff_id]:
                    self._home(diff_id).rename(self._scratch / secrets.token_hex(8))

    def prune(self, used: Iterable[Path]) -> list[str]:
        """Discard layers of no image that are not ``used`` either; return their digests.

        They are out of the way at once; ``sweep`` removes them, which may take a while.
        """
        with self.lock:
            wanted = {self._home(item) for image in self.listing() for item in image.layers}
            wanted |= {self._home(item) for item in self._pinned} | {path.parent for path in used}
            gone = [path for path in self._layers.iterdir() if path not in wanted]
            for path in gone:
                path.rename(self._scratch / secrets.token_hex(8))
        return sorted(f"sha256:{path.name}" for path in gone)

    # Images.

    def find(self, name: str) -> Image | None:
        """The image of this name, if it is complete."""
        image = self._load(self._file(name))
        if image is None or image.name != name:
            return None
        return image if all(map(self.has, image.layers)) else None

    def listing(self) -> list[Image]:
        found = (self._load(file) for file in self._names.glob("*.json"))
        return sorted((image for image in found if image is not None), key=lambda item: item.name)

    def save(self, image: Image) -> None:
        file = self._file(image.name)
        scratch = file.with_suffix(f".{secrets.token_hex(4)}.tmp")
        scratch.write_text(json.dumps(asdict(image)), "utf-8")
        with self.lock:
            self._named.update(image.layers)
            scratch.rename(file)

    def remove(self, name: str) -> bool:
        try:
            self._file(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _file(self, name: str) -> Path:
        return self._names / (hashlib.sha256(name.encode()).hexdigest()[:32] + ".json")

    def _load(self, file: Path) -> Image | None:
        try:
            data: dict[str, Any] = json.loads(file.read_text("utf-8"))
            data["layers"] = tuple(data["layers"])
            image = Image(**data)
            # They name folders: nothing but a digest may.
            digests: list[Any] = [*image.layers]
            return image if all(map(manifest.is_digest, digests)) else None
        except errors.UNREADABLE:
            return None


def _discard(folder: Path) -> None:
    """Remove a folder, whatever is in it; one that resists must not keep the others."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        log.error("%s is too deep to be removed (rm -r does it)", folder)
