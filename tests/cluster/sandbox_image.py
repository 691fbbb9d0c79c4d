"""An image for sandboxes in tests, made of this computer's own programs: a shell, Python, tools."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from k8e.distro import images
from k8e.distro.component_store import architecture
from k8e.distro.components import Component, Image

REFERENCE = "k8e.internal/sandbox-test:1"
PROGRAMS = (
    "bash dash python3 cat cp chmod date dd df echo env expr false find grep head id kill ln ls "
    "mkdir mkfifo mv nice nproc od pgrep pkill printf ps pwd readlink rm rmdir sed seq setsid "
    "sha256sum sleep sort stat stty tail tee test timeout touch tr true truncate tty uname wc "
    "whoami yes"
).split()
_LIBRARY = re.compile(r"(/\S+) \(0x")


def write(folder: Path) -> Path:
    """Write the image's archive below a folder; where it is."""
    programs = [f"/usr/bin/{name}" for name in PROGRAMS if Path(f"/usr/bin/{name}").exists()]
    standard = Path("/usr/lib/python3.11")
    assert standard.is_dir(), "this computer's Python is another one"
    modules = [
        str(path)
        for path in standard.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "test" not in path.parts
    ]
    extensions = [path for path in modules if path.endswith(".so")]
    linked = [*programs, *extensions]
    said = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    found = {*programs, *modules, *_LIBRARY.findall(said)}
    files = {f"usr/{path.removeprefix('/usr').lstrip('/')}": path for path in found}
    links = {name: f"usr/{name}" for name in ("bin", "lib", "lib64")} | {"usr/bin/sh": "dash"}
    folder.mkdir(parents=True, exist_ok=True)
    # An image may say so, and it must mean nothing: not to the guest, whose loader reads it.
    hostile = folder / "ld.so.preload"
    hostile.write_text("/workspace/evil.so\n", "ascii")
    files["etc/ld.so.preload"] = str(hostile)
    image = Image("sandbox-test", files, links=links, tag="1")
    owner = Component("sandbox-test", "1", "various", "tests", images=(image,))
    return images.write(owner, image, folder, architecture())
