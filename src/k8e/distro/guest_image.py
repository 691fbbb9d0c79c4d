"""The image from which pods copy the guest: made of this machine's Python, without a registry."""

from __future__ import annotations

import tempfile
from pathlib import Path

from k8e._version import __version__
from k8e.distro import images
from k8e.distro.component_store import architecture
from k8e.distro.components import Component, Image
from k8e.runtimes import guest_package
from k8e.runtimes.host import GUEST_PYTHON

_PLACE = "run/k8e"
NAME = "guest"


def write(folder: Path) -> Path:
    """Write the archive of the image into a folder, unless it is there in the same form."""
    folder.mkdir(parents=True, exist_ok=True)
    target, noted = folder / "images" / f"{NAME}.tar", folder / f"{NAME}.stamp"
    stamp = guest_package.pods_stamp(GUEST_PYTHON)
    if target.exists() and noted.exists() and noted.read_text("ascii") == stamp:
        return target
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".guest-") as scratch:
        staged = Path(scratch)
        guest_package.pack_for_pods(staged, GUEST_PYTHON)
        found = (path.relative_to(staged) for path in staged.rglob("*") if path.is_file())
        files = {f"{_PLACE}/{path}": str(path) for path in sorted(found)}
        image = Image(NAME, files)
        owner = Component(NAME, __version__, "Apache-2.0", "copied into pods", images=(image,))
        made = images.write(owner, image, staged, architecture())
        made.rename(target)
    noted.write_text(stamp, "ascii")
    return target
