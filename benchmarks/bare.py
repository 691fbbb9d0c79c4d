"""Sandboxes without k8e: the bundle that k8e makes, started by hand with ``runsc`` or ``runc``."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import timing
from k8e.model import new_id
from k8e.runtimes import cgroups
from k8e.runtimes.oci import OciRuntime


class Model(NamedTuple):
    """A live sandbox of k8e's, as it was written down for the runtime's program."""

    folder: Path
    config: str
    key: bytes
    owner: int


def read_model(folder: Path) -> Model:
    key = folder / "link" / "key"
    config = (folder / "config.json").read_text("utf-8")
    return Model(folder, config, key.read_bytes(), key.stat().st_uid)


class Bare:
    """Starts sandboxes with the spec of a model, one after the other or many at once."""

    def __init__(self, runtime: OciRuntime, model: Path, folder: Path) -> None:
        self._runtime = runtime
        self._model = read_model(model)
        self._folder = folder
        self.tool = runtime.tool_name
        folder.mkdir()

    def create(self) -> float:
        """Seconds of create, start, and the guest's own start until it dials."""
        with self._bundle() as bundle, self._listening(bundle) as listener:
            try:
                began = time.perf_counter()
                self._tool("create", "--bundle", str(bundle), bundle.name)
                self._tool("start", bundle.name)
                _accept(listener)
                return time.perf_counter() - began
            finally:
                self._delete(bundle)

    def cycle(self) -> float:
        """Seconds of a whole life: made, run until the guest dials, and removed."""
        return timing.timed(self._live)()

    def _live(self) -> None:
        with self.alive():
            pass

    @contextlib.contextmanager
    def alive(self) -> Generator[str]:
        """A sandbox whose guest has dialled; its id."""
        with self._bundle() as bundle, self._listening(bundle) as listener:
            try:
                self._tool("run", "--detach", "--bundle", str(bundle), bundle.name)
                _accept(listener)
                yield bundle.name
            finally:
                self._delete(bundle)

    def release(self) -> float:
        """Seconds of removing a sandbox that runs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.alive())
            return timing.timed(stack.close)()

    def first_line(self, argv: Sequence[str]) -> float:
        """Seconds until ``argv`` in a sandbox of its own has printed a line."""
        return self.burst(argv, 1)[0]

    def burst(self, argv: Sequence[str], count: int) -> list[float]:
        """The same for many at once."""
        with contextlib.ExitStack() as stack:
            bundles = [stack.enter_context(self._bundle(argv)) for _ in range(count)]
            commands = [
                self._runtime.command("run", "--bundle", str(bundle), bundle.name)
                for bundle in bundles
            ]
            try:
                return timing.burst(commands)
            finally:
                for bundle in bundles:
                    cgroups.remove(bundle.name)

    @contextlib.contextmanager
    def _bundle(self, argv: Sequence[str] = ()) -> Generator[Path]:
        """The model's bundle under another name and in another place, for another program."""
        sandbox_id = new_id("sb")
        bundle = self._folder / sandbox_id
        (bundle / "link").mkdir(parents=True)
        try:
            (bundle / "slot").mkdir()
            config = rename_config(self._model.config, self._model.folder, bundle, argv)
            (bundle / "config.json").write_text(config, "utf-8")
            (bundle / "link" / "key").write_bytes(self._model.key)
            yield bundle
        finally:
            shutil.rmtree(bundle)

    @contextlib.contextmanager
    def _listening(self, bundle: Path) -> Generator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(bundle / "link" / "sock"))
            for name in ("sock", "key"):
                os.chown(bundle / "link" / name, self._model.owner, self._model.owner)
            listener.listen()
            yield listener

    def _tool(self, *arguments: str) -> None:
        timing.run(self._runtime.command(*arguments))

    def _delete(self, bundle: Path) -> None:
        self._tool("delete", "--force", bundle.name)
        cgroups.remove(bundle.name)


def rename_config(text: str, model: Path, bundle: Path, argv: Sequence[str] = ()) -> str:
    """The configuration of ``model`` for ``bundle``, with ``argv`` in place of the guest."""
    text = text.replace(str(model), str(bundle)).replace(model.name, bundle.name)
    config = json.loads(text)
    for namespace in config["linux"].get("namespaces", ()):
        if namespace["type"] == "user":
            namespace.pop("path", None)  # the tool makes one itself
    if argv:
        config["process"]["args"] = list(argv)
    return json.dumps(config)


def _accept(listener: socket.socket) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if not poll.poll(timing.PATIENCE * 1000):
        raise TimeoutError("the guest did not dial")
    listener.accept()[0].close()
