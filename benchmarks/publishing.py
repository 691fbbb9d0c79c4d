"""Puts a result into ``docs/``: samples, chart, and the tables of ``performance.md``.

python -m benchmarks --publish                 measure, then publish
python -m benchmarks.publishing RESULT.json    publish what was measured before
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks import chart, reporting
from k8e.bench.measure import Series, TableRow, ratio_text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_FILE = re.compile(r"(?<![\w./:])/(?:[\w.@+-]+/)+[\w.@+-]+")
_EVERYWHERE = ("bin", "dev", "etc", "lib", "proc", "sbin", "sys", "usr", "workspace")
BEGIN = "<!-- results: written by python -m benchmarks --publish -->"
END = "<!-- results end -->"
TITLES = {
    "first echo": "Create to first result",
    "first python": "Create to first result of Python",
    "create": "A new session",
    "exec": "Commands",
    "parallel": "Commands at once",
    "warm": "Code in a language",
    "sdk": "What the SDK adds",
    "cli": "The command line",
    "files": "Files",
    "footprint": "The gateway itself",
    "memory": "Memory of idle sandboxes",
    "peers": "Live sessions beside live containers of others",
    "churn": "Made and destroyed, sustained",
    "release": "Until everything is released",
    "leaks": "Leaks",
    "noise": "Beside a noisy neighbour",
    "egress": "Egress",
}


def summary(rows: Sequence[TableRow]) -> str:
    """One line: how many bars are reached, and which are not."""
    judged = [row for row in rows if row.passed is not None]
    missed = [f"{row.ours.name} ({row.runtime})" for row in judged if not row.passed]
    told = f"bars reached: {len(judged) - len(missed)} of {len(judged)}"
    return f"{told}; missed: {'; '.join(missed)}" if missed else told


def publish(document: dict[str, Any], docs: Path = DOCS) -> list[Path]:
    """Write everything; what was written."""
    samples, picture, page = (docs / f"performance.{kind}" for kind in ("json", "svg", "md"))
    reporting.write_compact(samples, without_folders(document))
    document = json.loads(samples.read_text("utf-8"))  # as anybody finds it: numbers are rounded
    picture.write_text(chart.svg(chart.panels(document)), "utf-8")
    page.write_text(replace_section(page.read_text("utf-8"), section(document)), "utf-8")
    return [samples, picture, page]


def without_folders(value: Any) -> Any:
    """A result that names no folder of the machine that measured: they mean nothing elsewhere.

    Of a file of the repository the path in it is left, of any other file its name. Folders that
    every Linux machine or sandbox has stay as they are.
    """
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: without_folders(item) for key, item in items}
    if isinstance(value, list):
        return [without_folders(item) for item in cast("list[Any]", value)]
    return _FILE.sub(_relative, value) if isinstance(value, str) else value


def _relative(found: re.Match[str]) -> str:
    path = Path(found[0])
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    if path.parts[1] in _EVERYWHERE:
        return found[0]
    parts = path.parts
    # A clone that lay elsewhere: what follows its last folder that this one has, too.
    for at in range(1, len(parts) - 1):
        if (ROOT / parts[at]).is_dir():
            return "/".join(parts[at:])
    return path.name


def replace_section(page: str, text: str) -> str:
    """``page`` with what stands between the two marks replaced."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no section between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def section(document: dict[str, Any]) -> str:
    """The results in Markdown."""
    rows = document["rows"]
    parts = [
        _machine(document),
        "![Create to first result and memory, against other systems](performance.svg)",
        "Every single sample is in [performance.json](performance.json).",
        "### Bars",
        _markdown(row for row in rows if row["passed"] is not None),
    ]
    for subject, title in TITLES.items():
        found = [row for row in rows if row["subject"] == subject]
        if found:
            parts += [f"### {title}", _markdown(found)]
    missing = [*document.get("skipped", []), *_errors(document)]
    if missing:
        lines = [f"- {_where(item)}{item['name']}: {item['reason']}" for item in missing]
        parts += ["### Not measured", "\n".join(lines)]
    return "\n\n".join(parts)


def _errors(document: dict[str, Any]) -> Iterator[dict[str, str]]:
    for name, reason in document["errors"].items():
        yield {"name": name, "runtime": "", "reason": reason}


def _where(item: dict[str, str]) -> str:
    return f"`{item['runtime']}`, " if item["runtime"] else ""


def _machine(document: dict[str, Any]) -> str:
    facts = document["machine"]
    tools = ", ".join(facts[name] for name in ("runsc", "runc", "crun") if name in facts)
    scale = document.get("scale", 1)
    small = "" if scale == 1 else f" Bursts and crowds are {scale:g} of the full size."
    quick = " **Two repetitions only: these numbers mean nothing.**" if document["quick"] else ""
    return (
        f"{document['date'][:10]}, k8e {facts['k8e']}, Linux {facts['kernel']}, **{facts['cpus']} "
        f"CPUs** ({facts['cpu']}), {facts['memory_mb'] / 1000:.0f} GB, cgroup {facts['cgroup']}, "
        f"Python {facts['python']}, {tools}; load {facts['load_before']} before and "
        f"{facts.get('load_after', '?')} after.{small}{quick}"
    )


HEADINGS = ("runtime", "k8e", "p50 (p95, p99)", "against", "p50 (p95, p99)", "ratio", "bar", "")


def _markdown(rows: Iterable[dict[str, Any]]) -> str:
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ours, peer = Series.from_json(row["ours"]), row["peer"]
    ratio = "" if row["ratio"] is None else ratio_text(row["ratio"], row["sense"])
    verdict = {True: "pass", False: "**missed**", None: ""}[row["passed"]]
    return (
        row["runtime"],
        ours.name,
        ours.text(),
        peer["name"] if peer else "",
        Series.from_json(peer).text() if peer else "",
        ratio,
        row["bar"] or "",
        "; ".join(filter(None, (verdict, row["note"]))),
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    for path in publish(json.loads(Path(arguments[0]).read_text("utf-8"))):
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
