"""``python -m k8e`` is the command ``k8e``."""

import sys

from k8e.cli import main

if __name__ == "__main__":
    sys.exit(main())
