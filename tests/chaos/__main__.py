"""``python -m tests.chaos``: kill gateways for as long as you like. `make chaos` runs it."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys

from tests.chaos import actions, campaign

RUNTIMES = ("container", "gvisor")


def _leave(*_: object) -> None:
    sys.exit(1)  # so that nothing is left then, either


def main() -> int:
    kinds = [*actions.ALONE, *actions.WITH_ONE]
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="gateways to kill per runtime")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--runtime", action="append", choices=RUNTIMES)
    parser.add_argument(
        "--sweep", action="append", choices=kinds, help="kill at every step of this, in order"
    )
    parser.add_argument("--every", type=int, default=1, help="of a sweep: at every so many steps")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    for runtime in options.runtime or RUNTIMES:
        if options.sweep:
            campaign.sweep(runtime, options.seed, options.sweep, every=options.every)
        else:
            campaign.run(runtime, options.seed, options.count, slow=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
