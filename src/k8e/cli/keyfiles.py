"""``--apikey`` and ``--apikey-file``: a key that no list of processes shows."""

from __future__ import annotations

import argparse
import sys

STDIN = "-"
MOST = 4096  # characters; a key has less than a hundred


def api_key(options: argparse.Namespace) -> str | None:
    """The key that the flags give, if they do. What is read from stdin is read once."""
    given = vars(options)
    path = given.pop("apikey_file", None)
    if path is not None:
        if given.get("apikey"):
            raise _refused("--apikey and --apikey-file are two ways to say the same")
        given["apikey"] = _read(path)
    return given.get("apikey")


def _read(path: str) -> str:
    try:
        if path == STDIN:
            text = sys.stdin.readline(MOST)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(MOST)
    except (OSError, ValueError) as error:
        raise _refused(f"the API key cannot be read from {path}: {error}") from None
    if not text.strip():
        raise _refused(f"there is no API key in {'stdin' if path == STDIN else path}")
    return text.strip()


def _refused(why: str) -> Exception:
    from k8e import errors

    return errors.InvalidRequest(
        why, hint="k8e sandbox login --apikey-file PATH, with the key alone in the file"
    )
