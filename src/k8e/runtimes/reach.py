"""A path to the data folder that every uid may pass: a sandbox's own uids have to.

Below the home of a user there is none where homes are closed, and that user may not make one. But
the namespace of mounts is the gateway's own then: a folder that nobody needs shows the data folder.
"""

from __future__ import annotations

from pathlib import Path

from k8e import errors, rootless
from k8e.runtimes import mounts
from k8e.settings import Settings

PLACES = tuple(map(Path, ("/mnt", "/media", "/srv")))


def of(settings: Settings) -> Path:
    """The path by which sandboxes reach the data folder, once it was made."""
    return settings.data_dir if rootless.inside() is None else _place(settings) / "k8e"


def make(settings: Settings) -> None:
    """Make it, if there is need; twice is once."""
    if rootless.inside() is None:
        return
    place = _place(settings)
    found = place / "k8e" in mounts.mounts_below(place)
    if found and not (place / "k8e").samefile(settings.data_dir):
        undo(settings)  # of a gateway that had another data folder
        found = False
    if not found:
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        mounts.mount("k8e-reach", place, "tmpfs", flags, "size=16k,nr_inodes=8,mode=755")
        (place / "k8e").mkdir(exist_ok=True)
        mounts.bind(settings.data_dir, place / "k8e")


def undo(settings: Settings) -> None:
    """Nobody needs it any more."""
    if rootless.inside() is not None:
        place = _place(settings)
        for point in mounts.mounts_below(place):
            mounts.unmount(point)


def _place(settings: Settings) -> Path:
    """A folder in which nothing of ours is."""
    ours = (settings.home, settings.data_dir, settings.run_dir, Path.home())
    for place in PLACES:
        if place.is_dir() and not any(place in (path, *path.parents) for path in ours):
            return place
    raise errors.RuntimeUnusable(
        f"none of {', '.join(map(str, PLACES))} can be used to show sandboxes their files",
        hint="make one of these folders, or run k8e as root",
    )
