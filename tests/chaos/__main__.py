"""``python -m tests.chaos``: kill gateways for as long as you like. `make chaos` runs it."""

from __future__ import annotations

import argparse
import secrets
import sys

from tests.chaos import campaign

RUNTIMES = ("container", "gvisor")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="gateways to kill per runtime")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--runtime", action="append", choices=RUNTIMES)
    options = parser.parse_args()
    for runtime in options.runtime or RUNTIMES:
        done = campaign.run(runtime, options.seed, options.count)
        steps = ", ".join(f"{name} {count}" for name, count in done.steps.items())
        print(f"chaos: {done.rounds} gateways killed, nothing lost, nothing left. Steps: {steps}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
