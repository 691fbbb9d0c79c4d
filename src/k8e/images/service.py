"""Root file systems for templates: a folder, an archive, or an image of a registry."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from k8e import errors
from k8e.guest.spawn import HOME
from k8e.images import manifest as images_manifest
from k8e.images import registry as images_registry
from k8e.images.manifest import Blob, Config, ImageManifest, Reference
from k8e.images.registry import Calls, Registry
from k8e.images.store import Image, ImageStore
from k8e.images.unpack import UnpackBudget, Unpackers
from k8e.model import Rootfs
from k8e.settings import Settings

AT_ONCE = 3  # layers of one image
THREADS = 8
TELL_SECONDS = 0.1

T = TypeVar("T")
Tell = Callable[[int, int], None]


def _no_env() -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Content:
    """The folders that make a root file system."""

    folders: tuple[Path, ...]
    """Each on top of those after it."""
    key: str
    """Different for different content."""
    env: dict[str, str] = field(default_factory=_no_env)


class PullProgress:
    """How much of an image is here, counted by several threads and reported to one loop."""

    def __init__(self, tell: Tell, total: int) -> None:
        self._tell, self._total = tell, total
        self._loop = asyncio.get_running_loop()
        self._done = 0
        self._told = 0.0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            due = now >= self._told + TELL_SECONDS
            if due:
                self._told = now
        if due:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell, self._done, self._total)


class Images:
    """Fetches and unpacks each thing once, however many ask for it at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.store = ImageStore(settings.data_dir / "images", settings.min_free_disk)
        self._unpacking = Unpackers(settings.min_free_disk)
        self._calls = Calls()
        self._threads = ThreadPoolExecutor(THREADS, "images")
        self._stopped = threading.Event()
        self._making: dict[str, asyncio.Task[Any]] = {}
        self._listeners: dict[str, list[Tell]] = {}

    def prepare(self) -> None:
        self.store.prepare()

    def sweep(self) -> None:
        """Remove unneeded files in the background."""
        self._threads.submit(self.store.sweep)

    def close(self) -> None:
        """Stop all fetching; the next gateway begins again."""
        self._stopped.set()
        self._unpacking.stop()
        self._calls.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def parse(self, text: str) -> Reference:
        return images_manifest.parse_reference(text, self._settings.default_registry)

    # For runtimes.

    async def provide(self, rootfs: Rootfs) -> Content:
        """The content of a sandbox's root; fetched and unpacked if it is not here."""
        if rootfs.kind == "dir":
            return await asyncio.to_thread(self._folder, rootfs.source)
        if rootfs.kind == "tar":
            image = await self._tar(rootfs.source)
        elif rootfs.kind == "image":
            name = str(self.parse(rootfs.source))
            image = await asyncio.to_thread(self.store.find, name)
            image = image or await self.pull(rootfs.source)
        else:
            raise errors.InvalidRequest(
                f"unknown kind of root file system {rootfs.kind[:80]!r}",
                hint="known are host, dir, tar and image",
            )
        folders = tuple(self.store.layer(item) for item in reversed(image.layers))
        env = dict(image.env)
        if "PATH" in env:
            env["PATH"] += f":{HOME}/.local/bin"  # where pip installs programs
        return Content(folders, _key(*image.layers), env)

    def _folder(self, source: str) -> Content:
        path = _operators_path(source)
        own = (self._settings.data_dir.resolve(), self._settings.run_dir.resolve())
        if path == Path("/") or any(
            item.is_relative_to(path) or path.is_relative_to(item) for item in own
        ):
            raise _no_root(path, "sandboxes would see this host's own files in it")
        try:
            info = path.stat()
        except OSError as error:
            raise _no_root(path, error.strerror or str(error)) from None
        if not path.is_dir():
            raise _no_root(path, "it is not a folder")
        if info.st_mode & 0o005 != 0o005:
            raise _no_root(
                path, "other users may not read it, so neither may a sandbox's (chmod o+rx)"
            )
        stamp = f"{info.st_dev} {info.st_ino} {info.st_ctime_ns}"
        return Content((path,), _key(str(path), stamp))

    async def _tar(self, source: str) -> Image:
        path = await asyncio.to_thread(_operators_path, source)
        name = f"tar:{path}"
        stamp = await asyncio.to_thread(_stamp, path)
        known = await asyncio.to_thread(self.store.find, name)
        if known is not None and known.digest == stamp:
            return known
        return await self._once(name + stamp, lambda: self._unpack_tar(name, path, stamp))

    async def _unpack_tar(self, name: str, path: Path, stamp: str) -> Image:
        return await self._slowly(self._unpack_tar_now, name, path, stamp)

    def _unpack_tar_now(self, name: str, path: Path, stamp: str) -> Image:
        with open(path, "rb") as archive, self.store.scratch() as folder:
            found = self._unpacking.unpack(archive, folder / "fs", self._settings.max_image_bytes)
            image = Image(name, stamp, (found.diff_id,), found.size, time.time())
            with self.store.pinned(image.layers):
                self.store.keep(folder, found.diff_id, found.size)
                self.store.save(image)
        return image

    # Pulling.

    async def pull(self, text: str, tell: Tell | None = None) -> Image:
        """Fetch an image, also if one of this name is here already: a tag may have moved."""
        reference = self.parse(text)
        name = str(reference)
        listeners = self._listeners.setdefault(name, [])
        if tell is not None:
            listeners.append(tell)

        def tell_all(done: int, total: int) -> None:
            for listener in listeners:
                listener(done, total)

        try:
            return await self._once(name, lambda: self._pull(reference, tell_all))
        finally:
            if tell is not None:
                listeners.remove(tell)
            if not listeners and name not in self._making:
                self._listeners.pop(name, None)

    async def _once(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``, or join a task that does it; it goes on if the caller disconnects."""
        task = self._making.get(key)
        if task is None:
            task = asyncio.ensure_future(work())
            self._making[key] = task
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(task)

    def _made(self, key: str, task: asyncio.Task[Any]) -> None:
        self._making.pop(key, None)
        if not task.cancelled():
            task.exception()  # other waiters get it too

    async def _pull(self, reference: Reference, tell: Tell) -> Image:
        host = reference.host
        password = await asyncio.to_thread(
            images_registry.find, self._settings.registry_credentials, host
        )
        insecure = {item.strip() for item in self._settings.insecure_registries.split(",")}
        registry = Registry(host, plain=host in insecure, credentials=password, calls=self._calls)
        manifest, digest = await self._slowly(registry.manifest, reference)
        config = await self._slowly(self._config, registry, reference, manifest)
        async with self._kept(config.diff_ids):
            size = await self._layers(registry, reference.name, manifest, config, tell)
            image = Image(
                name=str(reference),
                digest=digest,
                layers=config.diff_ids,
                size=size,
                pulled_at=time.time(),
                env=config.env,
                workdir=config.workdir,
                platform=config.platform,
            )
            await asyncio.to_thread(self.store.save, image)
        return image

    @contextlib.asynccontextmanager
    async def _kept(self, diff_ids: Iterable[str]) -> AsyncGenerator[None]:
        """Keep layers while an image is made of them; if that fails, remove the new ones."""
        missing: list[str] = []
        try:
            with self.store.pinned(diff_ids):
                missing += (item for item in diff_ids if not self.store.has(item))
                yield
        except Exception:
            await asyncio.to_thread(self.store.drop, missing)
            with contextlib.suppress(RuntimeError):  # closed: the next gateway sweeps
                self.sweep()
            raise

    def _config(self, registry: Registry, reference: Reference, manifest: ImageManifest) -> Config:
        most = self._settings.max_image_bytes
        if sum(blob.size for blob in manifest.layers) > most:
            raise errors.ImageUnusable(
                f"the image has more than {most} bytes",
                hint="K8E_MAX_IMAGE_BYTES sets how large one may be",
            )
        document = registry.config(reference.name, manifest.config)
        return images_manifest.config(document, len(manifest.layers))

    async def _layers(
        self,
        registry: Registry,
        name: str,
        manifest: ImageManifest,
        config: Config,
        tell: Tell,
    ) -> int:
        """Make sure that all layers are here, a few at a time; return the bytes that they hold."""
        pairs = list(zip(config.diff_ids, manifest.layers, strict=True))
        missing = {diff_id: blob for diff_id, blob in pairs if not self.store.has(diff_id)}
        coming = sum(blob.size for blob in missing.values())
        await asyncio.to_thread(self.store.refuse_if_full, coming)
        budget = UnpackBudget(self._settings.max_image_bytes)
        here = [diff_id for diff_id in config.diff_ids if diff_id not in missing]
        budget.take(await asyncio.to_thread(self._measure, here))
        progress = PullProgress(tell, coming)
        room = asyncio.Semaphore(AT_ONCE)

        async def have(diff_id: str, blob: Blob) -> None:
            async with room:
                fetch = lambda: self._slowly(  # noqa: E731 - named for what it does
                    self._fetch, registry, name, blob, diff_id, progress, budget
                )
                await self._once(diff_id, fetch)

        async with _together() as group:
            for diff_id, blob in missing.items():
                group.create_task(have(diff_id, blob))
        size = await asyncio.to_thread(self._measure, config.diff_ids)
        UnpackBudget(self._settings.max_image_bytes).take(
            size
        )  # some may have come with another image
        return size

    def _fetch(
        self,
        registry: Registry,
        name: str,
        blob: Blob,
        diff_id: str,
        progress: PullProgress,
        budget: UnpackBudget,
    ) -> None:
        """Download and unpack one layer."""

        def tell(size: int) -> None:
            if self._stopped.is_set():
                raise errors.ImageUnusable("the gateway is being stopped")
            self.store.refuse_if_full(0)  # several are fetched at once
            progress.add(size)

        with self.store.scratch() as folder:
            with tempfile.TemporaryFile(dir=folder) as archive:
                registry.fetch(name, blob, archive, tell)
                archive.seek(0)
                found = self._unpacking.unpack(archive, folder / "fs", *budget.left())
            if found.diff_id != diff_id:
                raise errors.ImageUnusable(
                    f"a layer is not what the image says: {found.diff_id}, not {diff_id}",
                    hint="build the image again",
                )
            budget.take(found.size, found.entries)
            self.store.keep(folder, diff_id, found.size)

    def _measure(self, diff_ids: Iterable[str]) -> int:
        return sum(self.store.size(item) for item in diff_ids)

    # For operators.

    async def listing(self) -> list[Image]:
        return await asyncio.to_thread(self.store.listing)

    async def remove(self, text: str) -> None:
        """Forget an image; its layers are removed when nothing uses them any more."""
        name = text if text.startswith("tar:") else str(self.parse(text))
        if not await asyncio.to_thread(self.store.remove, name):
            raise errors.ImageNotFound(
                f"there is no image {name!r} here", hint="k8e image list shows the images"
            )

    async def _slowly(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do work of minutes in a thread of its own, so that it does not take up a shared one."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)


@contextlib.asynccontextmanager
async def _together():
    """A task group whose first error is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as found:
        raise found.exceptions[0] from None


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _operators_path(source: str) -> Path:
    if not source.startswith("/"):
        raise errors.InvalidRequest(
            f"{source[:80]!r} is not an absolute path", hint="write the whole path, from / on"
        )
    return Path(os.path.realpath(source))


def _stamp(path: Path) -> str:
    """A value that changes when an archive has changed, without reading it."""
    try:
        info = path.stat()
    except OSError as error:
        raise _no_root(path, error.strerror or str(error)) from None
    if not path.is_file():
        raise _no_root(path, "it is not a file")
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"


def _no_root(path: Path, why: str) -> errors.ImageUnusable:
    return errors.ImageUnusable(
        f"{path} cannot be the root file system of sandboxes: {why}",
        hint="name a folder or archive that was made for sandboxes",
    )
