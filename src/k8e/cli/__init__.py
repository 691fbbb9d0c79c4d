"""The command ``k8e``.

``k8e sandbox run`` is what agents start hundreds of times, so it has a path of its own that imports
next to nothing; every other command, and every flag that path does not know, goes through the full
parser.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code of the process."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    return code if _flush() else _closed_pipe()


def _run(arguments: list[str]) -> int:
    if arguments[:2] == ["sandbox", "run"] and sys.platform == "linux":
        from k8e.cli import fast

        code = fast.run(arguments[2:])
        if code is not None:
            return code
    from k8e.cli import parser

    if arguments[:1] == ["sandbox"]:
        arguments = _said_once(arguments)
    return parser.main(arguments)


def _said_once(arguments: list[str]) -> list[str]:
    """Read ``sandbox sandbox run``, which ``k8e-sandbox sandbox run`` makes, as ``sandbox run``.

    K8E's older program of that name had its commands below ``sandbox``, the newer one has not.
    """
    at = 1
    while at < len(arguments) and arguments[at].startswith("--"):  # flags of every command
        at += 1 if "=" in arguments[at] else 2
    is_again = arguments[at : at + 1] == ["sandbox"]
    return arguments[:at] + arguments[at + 1 :] if is_again else arguments


def _flush() -> bool:
    """Write what Python has buffered; False if the reader of stdout is gone.

    Python does this after us too, and would print a traceback.
    """
    try:
        if sys.stdout is not None:  # closed from the start
            sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


def _closed_pipe() -> int:
    import os

    from k8e.cli import fast

    with open(os.devnull, "wb") as nowhere:  # so that Python's own flush finds a reader
        os.dup2(nowhere.fileno(), 1)
    return fast.CLOSED_PIPE


def sandbox_main() -> int:
    """``k8e-sandbox`` and ``k8e-sandbox-cli``: K8E's names of ``k8e sandbox``."""
    return main(["sandbox", *sys.argv[1:]])
