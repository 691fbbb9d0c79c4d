"""``python -m benchmarks``: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks import interactive, machine, publishing, reporting
from benchmarks.stage import RUNTIMES, Amount, Stage, staged
from benchmarks.subjects import SUBJECTS
from k8e.bench import measure
from k8e.bench.measure import Skipped, TableRow

RESULTS = Path(__file__).parent / "results"
TERMINATED = 143  # 128 + SIGTERM, as shells report it


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if os.geteuid() != 0:
        print("benchmarks start sandboxes of their own, which needs root", file=sys.stderr)
        return 2
    # Ended from outside, a run still removes what it made.
    signal.signal(signal.SIGTERM, _terminate)
    now = datetime.datetime.now(datetime.UTC)
    found: list[TableRow | Skipped] = []
    errors: dict[str, str] = {}
    runtimes = options.runtime or list(RUNTIMES)
    with staged(Amount(runtimes, options.quick, options.scale, options.cycles)) as stage:
        facts = machine.facts(stage.host)
        ended = _measure_all(stage, options.only or list(SUBJECTS), found, errors)
        facts["load_after"] = round(os.getloadavg()[0], 2)
    rows = [item for item in found if isinstance(item, TableRow)]
    skipped = list(dict.fromkeys(item for item in found if isinstance(item, Skipped)))
    document: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "quick": options.quick,
        "scale": options.scale,
        "machine": facts,
        "rows": [row.to_json() for row in rows],
        "skipped": [item.to_json() for item in skipped],
        "errors": errors,
        "interactive": interactive.documents(rows),
    }
    written = [options.output or RESULTS / f"{now:%Y-%m-%dT%H%M%SZ}.json"]
    reporting.write(written[0], document)
    if options.publish and not ended:
        written += publishing.publish(document)
    print(_describe(facts), measure.table(rows), sep="\n")
    print(*(item.text() for item in skipped), sep="\n")
    print(*(f"{name}: not measured: {error}" for name, error in errors.items()), sep="\n")
    print(publishing.summary(rows), *(f"written: {path}" for path in written), sep="\n")
    return ended or (1 if errors else 0)


def _terminate(*_: object) -> None:
    sys.exit(TERMINATED)


def _measure_all(
    stage: Stage, names: list[str], found: list[TableRow | Skipped], errors: dict[str, str]
) -> int:
    """All subjects; where somebody ends that early, the exit code, and what was found stays."""
    for name in names:
        try:
            _measure(stage, name, found, errors)
        except (KeyboardInterrupt, SystemExit):
            errors[name] = "it was ended before it was done"
            return TERMINATED
    return 0


def _measure(
    stage: Stage, name: str, found: list[TableRow | Skipped], errors: dict[str, str]
) -> None:
    """One subject; what goes wrong in it does not keep the others from being measured."""
    print(f"measuring {name} …", file=sys.stderr)
    try:
        for item in SUBJECTS[name](stage):
            found.append(item)  # noqa: PERF402 - what was measured before an error stays
    except Exception as error:
        traceback.print_exc()
        errors[name] = f"{type(error).__name__}: {error}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it work at all")
    parser.add_argument(
        "--only", action="append", choices=list(SUBJECTS), help="measure this subject; repeatable"
    )
    parser.add_argument(
        "--runtime", action="append", choices=list(RUNTIMES), help="use this runtime; repeatable"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="F",
        help="how large bursts and crowds are: 1 means a hundred (default 1)",
    )
    parser.add_argument(
        "--cycles",
        type=int,
        default=100,
        metavar="N",
        help="sessions made and destroyed in the search for leaks (default 100; 1000 to be sure)",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write the chart, the samples and the tables of docs/performance.md, too",
    )
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    return parser.parse_args(arguments)


def _describe(facts: dict[str, Any]) -> str:
    tools = ", ".join(str(facts[name]) for name in ("runsc", "runc", "crun") if name in facts)
    return (
        f"\nk8e {facts['k8e']} on Linux {facts['kernel']}, {facts['cpus']} CPUs ({facts['cpu']}), "
        f"cgroup {facts['cgroup']}, load {facts['load_before']:.2f} before\n"
        f"Python {facts['python']}; {tools}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
