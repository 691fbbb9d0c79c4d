"""Tables of the kernel that all sandboxes of a host share, made large enough for all of them.

Open files count against the memory of whoever opens them, so that is the limit that holds. The
host's own table is smaller than what one sandbox may open: a single one could fill it, and then no
other sandbox could open a file. systemd makes it as good as endless for the same reason.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

log = logging.getLogger(__name__)

OPEN_FILES = Path("/proc/sys/fs/file-max")
ENDLESS = 1 << 40


def enlarge() -> None:
    """Where a table is smaller than sandboxes need it; nothing happens where we may not."""
    with contextlib.suppress(OSError, ValueError):
        before = int(OPEN_FILES.read_text("ascii"))
        if before < ENDLESS:
            OPEN_FILES.write_text(str(ENDLESS), "ascii")
            log.info("%s was %d, and a sandbox could have used that up", OPEN_FILES, before)
