"""Where templates are written down that came by API: SQLite in the data folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from k8e import database, errors

MIGRATIONS = (
    """
    CREATE TABLE templates (
        name       TEXT PRIMARY KEY,
        recipe     TEXT NOT NULL,
        applied_by TEXT NOT NULL,
        applied_at REAL NOT NULL
    ) STRICT;
    """,
)


class TemplateStore:
    """The recipes of one gateway, as they were applied."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=True)

    def close(self) -> None:
        self._db.close()

    def put(self, name: str, recipe: dict[str, Any], by: str) -> None:
        """Write a recipe down in the place of the one before. One statement: the last one wins."""
        self._db.execute(
            "REPLACE INTO templates (name, recipe, applied_by, applied_at) VALUES (?,?,?,?)",
            (name, json.dumps(recipe), by, time.time()),
        )

    def delete(self, name: str) -> None:
        self._db.execute("DELETE FROM templates WHERE name=?", (name,))

    def all(self) -> dict[str, Any]:
        rows = self._db.execute("SELECT name, recipe FROM templates ORDER BY name")
        return {name: _recipe(recipe) for name, recipe in rows}


def _recipe(text: str) -> Any:
    """What was written down; None, which is no recipe, where it cannot be read."""
    try:
        return json.loads(text)
    except errors.UNREADABLE:
        return None
