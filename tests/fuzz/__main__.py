"""``make fuzz``: the fuzz tests again and again, with other inputs each time, for so long.

It ends with the first failure, and prints the seed that repeats it. The input that failed is also
kept below ``.hypothesis``, where the next run finds it and tries it first.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

SCALE = "20"
"""How many times as much as in CI, in each round."""
ROUND_SECONDS = 1800  # for one test


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; 0 for a new one")
    options, rest = parser.parse_known_args()
    seed = options.seed or secrets.randbelow(1 << 30) + 1
    until = time.monotonic() + options.seconds
    rounds = 0
    while not rounds or time.monotonic() < until:
        print(f"round {rounds + 1}, seed {seed}", flush=True)
        # The seed of Python's hashes decides too, in which order things are tried.
        environ = {**os.environ, "K8E_FUZZ_SCALE": SCALE, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parent)]
        command += [f"--hypothesis-seed={seed}", "-o", f"timeout={ROUND_SECONDS}", *rest]
        left = max(1.0, until - time.monotonic()) if rounds else None
        try:
            status = subprocess.run(command, env=environ, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            break
        if status:
            print(f"failed; to repeat it: make fuzz FUZZ_SEED={seed}", flush=True)
            return status
        rounds, seed = rounds + 1, seed + 1
    print(f"{rounds} rounds, nothing found", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
