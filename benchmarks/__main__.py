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

from benchmarks import machine, reporting
from benchmarks.samples import Row
from benchmarks.stage import RUNTIMES, Stage, staged
from benchmarks.subjects import SUBJECTS

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if os.geteuid() != 0:
        print("benchmarks start sandboxes of their own, which needs root", file=sys.stderr)
        return 2
    # Ended from outside, a run still removes what it made.
    signal.signal(signal.SIGTERM, _terminate)
    now = datetime.datetime.now(datetime.UTC)
    rows: list[Row] = []
    errors: dict[str, str] = {}
    with staged(runtimes=options.runtime or list(RUNTIMES), quick=options.quick) as stage:
        facts = machine.facts(stage.host)
        for name in options.only or list(SUBJECTS):
            _measure(stage, name, rows, errors)
    document: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": facts,
        "rows": [row.to_json() for row in rows],
        "errors": errors,
    }
    output = options.output or RESULTS / f"{now:%Y-%m-%dT%H%M%SZ}.json"
    reporting.write(output, document)
    print(_describe(facts))
    print(reporting.table(rows))
    for name, error in errors.items():
        print(f"{name}: not measured: {error}")
    print(f"raw samples: {output}")
    return 1 if errors else 0


def _terminate(*_: object) -> None:
    sys.exit(143)


def _measure(stage: Stage, name: str, rows: list[Row], errors: dict[str, str]) -> None:
    """One subject; what goes wrong in it does not keep the others from being measured."""
    print(f"measuring {name} …", file=sys.stderr)
    try:
        rows.extend(SUBJECTS[name](stage))
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
