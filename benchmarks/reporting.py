"""The JSON with everything behind the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(document), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")


def write_compact(path: Path, document: dict[str, Any]) -> None:
    """A line for each row: what belongs together changes together."""
    told = _rounded(document)
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in told.pop("rows"))
    told.pop("interactive", None)  # the same samples once more
    rest = json.dumps(told, ensure_ascii=False)[1:-1]
    path.write_text(f'{{{rest}, "rows": [\n{rows}\n]}}\n', "utf-8")


def _rounded(value: Any) -> Any:
    """Six digits say more than any clock here can."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {key: _rounded(item) for key, item in table.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_rounded(item) for item in items]
    return value
