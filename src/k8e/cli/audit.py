"""``k8e audit``: who did what, as a table or as lines of JSON; and whether that is still true."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
from collections.abc import Iterator
from typing import Any

from k8e import errors
from k8e.cli import fast, printing, sandbox
from k8e.client import auditing
from k8e.client.approving import visible
from k8e.client.auditing import AuditRow

PAGE = 1000
WAIT = 20.0  # seconds that the gateway keeps an empty answer back
_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def show(options: argparse.Namespace) -> int:
    """Print the newest rows, and with ``--follow`` those that come."""
    wanted = _wanted(options)
    page = sandbox.ask(options, auditing.page({**wanted, "limit": options.limit}))
    _print(page["rows"], as_json=options.json)
    while options.follow:
        further = {"forward": True, "cursor": page["cursor"], "wait": WAIT, "limit": PAGE}
        page = sandbox.ask(options, auditing.page({**wanted, **further}))
        _print(page["rows"], as_json=options.json)
    return 0


def export(options: argparse.Namespace) -> int:
    """Print everything, page by page."""
    wanted = {**_wanted(options), "forward": True, "limit": PAGE}
    page: dict[str, Any] = {"cursor": "", "more": True}
    while page["more"]:
        page = sandbox.ask(options, auditing.page({**wanted, "cursor": page["cursor"]}))
        _print(page["rows"], as_json=True)
    return 0


def verify(options: argparse.Namespace) -> int:
    told = sandbox.ask(options, auditing.verify(options.expect))
    printing.answer(told)
    return 0 if told["ok"] else 1


def _wanted(options: argparse.Namespace) -> dict[str, Any]:
    def given(name: str) -> str:
        return getattr(options, name, "")

    return {
        "session_id": given("session"),
        "principal": given("principal"),
        "since": moment(given("since"), time.time()),
        "until": moment(given("until"), time.time()),
        "action": given("action"),
        "denied": bool(given("denied")),
    }


def moment(text: str, now: float) -> float:
    """A point in time: so long ago, a date with or without a time, or seconds since 1970."""
    if not text:
        return 0
    age = _AGE.fullmatch(text)
    if age is not None:
        return max(1.0, now - int(age[1]) * _SECONDS[age[2]])
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(
            f"{text[:40]!r} is no time", hint="use 15m, 2h, 7d, 2026-01-31 or 2026-01-31T12:00"
        ) from None


def _print(rows: list[str], *, as_json: bool) -> None:
    lines = rows if as_json else table(map(auditing.parse, rows))
    text = "".join(f"{line}\n" for line in lines)
    fast.write(1, text.encode("utf-8", "backslashreplace"))


def table(rows: Iterator[AuditRow]) -> Iterator[str]:
    """A line for each row; nothing that a client or a sandbox wrote acts on the terminal."""
    for row in rows:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.at))
        who = f"{row.principal or '?'} ({row.via}{', ' + row.peer if row.peer else ''})"
        told = "  ".join(f"{key}={_value(value)}" for key, value in row.detail.items())
        mark = "" if row.outcome == "allowed" else "DENIED  "
        line = f"{row.seq}  {at}  {mark}{row.action}  {visible(who)}  {visible(row.session) or '-'}"
        yield f"{line}  {told}".rstrip()


def _value(value: Any) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
