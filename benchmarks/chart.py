"""A chart of a result, as SVG: bars on a logarithmic scale, the same for the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

Kind = Literal["ours", "floor", "peer"]
COLOURS: dict[Kind, str] = {"ours": "#2563eb", "floor": "#94a3b8", "peer": "#d97706"}
MEANING: dict[Kind, str] = {"ours": "k8e", "floor": "the same without k8e", "peer": "other systems"}
WIDTH, LABELS, BAR, GAP = 900, 250, 18, 8
RIGHT = 120  # room for the numbers
FONT = "font-family='system-ui, sans-serif'"


class Bar(NamedTuple):
    label: str
    value: float
    kind: Kind


class Panel(NamedTuple):
    title: str
    unit: str
    bars: list[Bar]


def panels(document: dict[str, Any]) -> list[Panel]:
    """What of a result is worth a picture."""
    rows = document["rows"]
    found = [
        _first(rows, "first echo", "sequential", "Create to first result, one after the other"),
        _first(rows, "first python", "sequential", "Create to first result of Python"),
        _first(rows, "first echo", "burst", "Create to first result, many at once"),
        Panel("Memory of an idle sandbox", "MB", list(_memory(rows))),
    ]
    return [panel for panel in found if panel.bars]


def _first(rows: Iterable[dict[str, Any]], subject: str, mode: str, title: str) -> Panel:
    medians: dict[str, Bar] = {}
    for row in rows:
        if row["subject"] != subject:
            continue
        for side in (row["ours"], row["peer"]):
            name, _, its_mode = side["name"].rpartition(", ") if side else ("", "", "")
            if its_mode == mode and name != "python3 -c pass":
                medians[name] = Bar(name, side["p50"], _kind(name))
    return Panel(title, "ms", sorted(medians.values(), key=lambda bar: bar.value))


def _kind(name: str) -> Kind:
    if name.startswith("k8e"):
        return "ours"
    return "floor" if name in ("runc run", "runsc run", "crun run") else "peer"


def _memory(rows: Iterable[dict[str, Any]]) -> Iterable[Bar]:
    seen: set[str] = set()
    for row in rows:
        if row["subject"] == "memory":
            label = f"{row['runtime']}: {row['ours']['name'].removeprefix('PSS of ')}"
            yield Bar(label, row["ours"]["p50"], "ours")
            peer = row["peer"]
            if peer and peer["name"] not in seen:
                seen.add(peer["name"])
                yield Bar(peer["name"], peer["p50"], "floor")


def svg(parts: Sequence[Panel]) -> str:
    """The whole picture."""
    lines: list[str] = []
    top = 44
    for part in parts:
        lines += _draw(part, top)
        top += 58 + len(part.bars) * (BAR + GAP)
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' "
        f"height='{top}' role='img'>"
    )
    ground = f"<rect width='{WIDTH}' height='{top}' fill='#ffffff'/>"
    return "\n".join([head, ground, *_legend(), *lines, "</svg>"]) + "\n"


def _legend() -> Iterable[str]:
    left = 12
    for kind, meaning in MEANING.items():
        yield f"<rect x='{left}' y='12' width='14' height='14' fill='{COLOURS[kind]}'/>"
        yield _text(left + 20, 24, meaning, 13)
        left += 40 + 8 * len(meaning)
    yield _text(left, 24, "medians; logarithmic scale; shorter is better", 13, "#64748b")


def _draw(part: Panel, top: int) -> Iterable[str]:
    yield _text(12, top + 20, part.title, 16)
    axis = Axis.of([bar.value for bar in part.bars], WIDTH - LABELS - RIGHT)
    bottom = top + 32 + len(part.bars) * (BAR + GAP)
    for tick in axis.ticks():
        x = LABELS + axis.length(tick)
        yield f"<path d='M{x:.1f} {top + 30}V{bottom}' stroke='#e2e8f0'/>"
        yield _text(x, bottom + 10, f"{tick:,g}", 10, "#64748b", anchor="middle")
    for number, bar in enumerate(part.bars):
        y = top + 32 + number * (BAR + GAP)
        length, colour = axis.length(bar.value), COLOURS[bar.kind]
        yield _text(LABELS - 8, y + 14, bar.label, 13, anchor="end")
        yield f"<rect x='{LABELS}' y='{y}' width='{length:.1f}' height='{BAR}' fill='{colour}'/>"
        yield _text(LABELS + length + 6, y + 14, f"{number_text(bar.value)} {part.unit}", 13)


class Axis(NamedTuple):
    """A logarithmic scale: ten times as much is always so much longer."""

    most: float
    decades: float
    width: float

    @classmethod
    def of(cls, values: Sequence[float], width: float) -> Axis:
        """One on which the greatest value fills the width, and the least can still be seen."""
        spread = math.log10(max(values) / min(values))
        return cls(max(values), max(1.0, math.ceil(spread * 2) / 2 + 0.25), width)

    def length(self, value: float) -> float:
        return self.width * (1 - math.log10(self.most / value) / self.decades)

    def ticks(self) -> list[float]:
        """The powers of ten on it."""
        last = math.floor(math.log10(self.most))
        found = (10.0**power for power in range(last - math.ceil(self.decades), last + 1))
        return [tick for tick in found if self.length(tick) > 0]


def number_text(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _text(
    x: float, y: float, text: str, size: int, colour: str = "#0f172a", *, anchor: str = "start"
) -> str:
    place = f"x='{x:.1f}' y='{y}' text-anchor='{anchor}'"
    return f"<text {place} {FONT} font-size='{size}' fill='{colour}'>{escape(text)}</text>"
