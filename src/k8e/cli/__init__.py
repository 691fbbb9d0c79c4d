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
        if arguments[:2] == ["sandbox", "run"] and sys.platform == "linux":
            from k8e.cli import fast

            code = fast.run(arguments[2:])
            if code is not None:
                return code
        from k8e.cli import parsing

        return parsing.main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def sandbox_main() -> int:
    """``k8e-sandbox-cli``: K8E's name of ``k8e sandbox``, for scripts that were written for it."""
    return main(["sandbox", *sys.argv[1:]])
