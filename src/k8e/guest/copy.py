"""Copies the guest and its Python out of their image, into a volume of the pod that needs them.

It runs in that image, whose Python has few modules.
"""

from __future__ import annotations

import os
import sys

PARTS = ("guest", "python")
EMPTY = "empty"
"""A file without content, which is mounted over those of an image that its loader must not read."""
CHUNK_BYTES = 1 << 20


def copy_tree(source: str, target: str) -> None:
    """Copy folders and files, readable by all and written by root alone."""
    os.mkdir(target, 0o755)
    for name in os.listdir(source):
        inner, outer = f"{source}/{name}", f"{target}/{name}"
        if os.path.isdir(inner):
            copy_tree(inner, outer)
        else:
            copy_file(inner, outer)


def copy_file(source: str, target: str) -> None:
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    while data := os.read(reading, CHUNK_BYTES):
        while data:
            data = data[os.write(writing, data) :]
    os.close(reading)
    os.close(writing)


def main() -> None:
    source, target = sys.argv[1:]
    os.umask(0o022)
    for part in PARTS:
        copy_tree(f"{source}/{part}", f"{target}/{part}")
    os.close(os.open(f"{target}/{EMPTY}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444))


if __name__ == "__main__":
    main()
