"""``srt`` of @anthropic-ai/sandbox-runtime: bubblewrap and a proxy, around one command."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

from benchmarks.peers import HOW_TO_INSTALL, Peer, Unavailable, environment

INSTALLED = Path(__file__).parent / "node_modules/@anthropic-ai/sandbox-runtime/dist/cli.js"
NEEDS = ("node", "bwrap", "socat", "rg")


@contextlib.contextmanager
def found(folder: Path, tools: dict[str, str]) -> Generator[list[Peer]]:
    program = _program()
    missing = [name for name in NEEDS if shutil.which(name) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)}: {HOW_TO_INSTALL}")
    settings = folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "network": {"allowedDomains": [], "deniedDomains": []},
                "filesystem": {"denyRead": [], "allowWrite": [str(folder)], "denyWrite": []},
            }
        ),
        "utf-8",
    )
    prefix = [*program, "--settings", str(settings), "-c"]

    def wrap(argv: Sequence[str]) -> list[str]:
        return [*prefix, shlex.join(argv)]

    yield [Peer("srt", "container", wrap, environment(folder))]


def _program() -> list[str]:
    """Ours, else the one on PATH."""
    node, srt = shutil.which("node"), shutil.which("srt")
    if node is not None and os.access(INSTALLED, os.R_OK):
        return [node, str(INSTALLED)]
    if srt is not None:
        return [srt]
    raise Unavailable(HOW_TO_INSTALL)
