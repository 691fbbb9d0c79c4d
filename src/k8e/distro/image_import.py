"""Images that come with the components: given to containerd, so that no registry is needed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from k8e import errors
from k8e.distro.layout import Layout

log = logging.getLogger(__name__)

_SECONDS = 180.0
_FIRST = "pause"
"""Without it no pod starts."""


def archives(components: Path) -> list[Path]:
    return sorted((components / "images").glob("*.tar"))


async def load_first(layout: Layout, components: Path) -> None:
    await _load(layout, components, [path for path in archives(components) if _FIRST in path.name])


async def load_all(layout: Layout, components: Path) -> None:
    await _load(
        layout, components, [path for path in archives(components) if _FIRST not in path.name]
    )


async def load(layout: Layout, components: Path, archive: Path) -> None:
    """Give containerd an archive that is no component's."""
    await _load(layout, components, [archive])


async def _load(layout: Layout, components: Path, wanted: list[Path]) -> None:
    """Import archives that were not imported in the same form before."""
    noted = layout.agent / "images.loaded"
    known = noted.read_text("utf-8").splitlines() if noted.exists() else []
    for path in wanted:
        found = path.stat()
        mark = f"{path.name} {found.st_size} {found.st_mtime_ns}"
        if mark in known:
            continue
        await _import(layout, components, path)
        known = [line for line in known if not line.startswith(f"{path.name} ")] + [mark]
        noted.write_text("\n".join(known) + "\n", "utf-8")


async def _import(layout: Layout, components: Path, path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(str(components / "bin/ctr"), "--address", str(layout.containerd_socket)),
        *("--namespace", "k8s.io", "images", "import", str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise errors.TimedOut(f"importing {path} took more than {_SECONDS:g} s") from None
    if process.returncode:
        text = said.decode("utf-8", "replace").strip()
        raise errors.ToolFailed(
            f"importing the image {path} failed: {text[-500:]}", hint="k8e components verify"
        )
    log.info("image %s imported", path.name)
