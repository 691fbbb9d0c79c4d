"""Objects applied by the server: its add-ons, and the files of ``server/manifests``.

What stood in a manifest and stands there no more is deleted. Each file is a source of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from k8e import errors
from k8e.distro.layout import Layout, write_private
from k8e.kubernetes.api import Api, ApiError, Object, entries

log = logging.getLogger(__name__)

_AT_ONCE = 8
_KIND_SECONDS = 30.0  # after its CustomResourceDefinition, a kind takes a moment to be served
_KIND_PAUSE = 0.25
_BYTES = 4 << 20
_FOLDER_PAUSE = 0.3  # editors write in several steps
_RETRY_SECONDS = 30.0
_EARLY = ("Namespace", "CustomResourceDefinition", "ServiceAccount")

# inotify(7)
_IN_CLOSE_WRITE, _IN_MOVED, _IN_DELETE = 0x8, 0xC0, 0x200
_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000


async def apply_all(api: Api, wanted: Iterable[Object]) -> None:
    """Apply objects, those first on which others rest; several at a time."""
    listed = list(wanted)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Object) -> None:
        async with limit:
            await _apply(api, item)

    for early in (True, False):
        batch = [item for item in listed if (item["kind"] in _EARLY) is early]
        results = await asyncio.gather(*map(one, batch), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


async def _apply(api: Api, item: Object) -> None:
    deadline = asyncio.get_running_loop().time() + _KIND_SECONDS
    while True:
        try:
            await api.apply(item)
        except ApiError as error:
            # The kind or the namespace may be on its way.
            if error.status != 404 or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(_KIND_PAUSE)
        else:
            return


class Applier:
    """Applies sources of objects, and deletes what a source has no more."""

    def __init__(self, api: Api, layout: Layout) -> None:
        self._api = api
        self._file = layout.applied
        self._known: dict[str, list[list[str]]] = {}
        with contextlib.suppress(*errors.UNREADABLE):
            self._known = json.loads(self._file.read_bytes())

    @property
    def sources(self) -> list[str]:
        return list(self._known)

    async def apply(self, source: str, wanted: list[Object]) -> None:
        keys = [_key(item) for item in wanted]
        before = self._known.get(source, [])
        # Noted before it is done: what is applied in part must be pruned one day too.
        self._note(source, before + [key for key in keys if key not in before])
        await apply_all(self._api, wanted)
        for key in reversed([key for key in before if key not in keys]):
            await self._prune(source, key)
        self._note(source, keys)

    async def _prune(self, source: str, key: list[str]) -> None:
        version, kind, namespace, name = key
        item = {"apiVersion": version, "kind": kind}
        if await self._api.delete({**item, "metadata": {"name": name, "namespace": namespace}}):
            log.info("%s: %s %s was deleted, it stands there no more", source, kind, name)

    def _note(self, source: str, keys: list[list[str]]) -> None:
        self._known[source] = keys
        if not keys:
            del self._known[source]
        write_private(self._file, json.dumps(self._known, indent=1))


def _key(item: Object) -> list[str]:
    metadata = item["metadata"]
    return [item["apiVersion"], item["kind"], metadata.get("namespace") or "", metadata["name"]]


# The folder.


async def follow_folder(applier: Applier, folder: Path) -> None:
    """Apply what is in a folder, and each change of it, for ever."""
    with contextlib.closing(FolderWatch(folder)) as watch:
        while True:
            watch.forget()  # before the look, so that what changes during it is looked at again
            failed = await _apply_folder(applier, folder)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watch.changed(), _RETRY_SECONDS if failed else None)
                await asyncio.sleep(_FOLDER_PAUSE)


async def _apply_folder(applier: Applier, folder: Path) -> bool:
    """Whether something failed that may work later."""
    failed = False
    files = {path.name: path for path in await asyncio.to_thread(_files, folder)}
    for name, path in files.items():
        try:
            await applier.apply(f"file:{name}", await asyncio.to_thread(read_objects, path))
        except errors.InvalidRequest as error:
            log.warning("%s; it was not applied", error.message)
        except (errors.K8eError, OSError) as error:
            log.warning("%s: %s", path, error)
            failed = True
    for source in applier.sources:
        if source.startswith("file:") and source.removeprefix("file:") not in files:
            try:
                await applier.apply(source, [])
            except errors.K8eError as error:
                log.warning("%s: %s", source, error)
                failed = True
    return failed


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.yaml") if path.is_file())


def read_objects(path: Path) -> list[Object]:
    """The objects of a manifest; an error that names what is wrong with it."""
    data = path.read_bytes()[: _BYTES + 1]
    if len(data) > _BYTES:
        raise errors.InvalidRequest(f"the manifest {path} has more than {_BYTES} bytes")
    return objects(data, str(path))


def objects(data: bytes | str, name: str, *, loader: Any = yaml.SafeLoader) -> list[Object]:
    try:
        read: list[Any] = [item for item in yaml.load_all(data, loader) if item is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise errors.InvalidRequest(f"the manifest {name} is no YAML: {error}") from None
    found: list[Object] = []
    for item in read:
        found += entries(item, "items") if _is_list(item) else [item]
    for item in found:
        try:
            _key(item)
        except (KeyError, TypeError, AttributeError):
            raise errors.InvalidRequest(
                f"the manifest {name} has something without apiVersion, kind or metadata.name"
            ) from None
    return found


def _is_list(item: Any) -> bool:
    return isinstance(item, dict) and "items" in item and str(item.get("kind")).endswith("List")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


class FolderWatch:
    """Tells when a file of a folder is written, moved or removed."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        mask = _IN_CLOSE_WRITE | _IN_MOVED | _IN_DELETE
        if (
            self._descriptor < 0
            or self._libc.inotify_add_watch(self._descriptor, bytes(folder), mask) < 0
        ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
        self._event = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._descriptor, 1 << 16)
            while len(data) >= 16:
                length = struct.unpack_from("=I", data, 12)[0]
                if data[16 : 16 + length].rstrip(b"\0").endswith(b".yaml"):
                    self._event.set()
                data = data[16 + length :]

    async def changed(self) -> None:
        await self._event.wait()

    def forget(self) -> None:
        """Wait for what changes from now on."""
        self._event.clear()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
