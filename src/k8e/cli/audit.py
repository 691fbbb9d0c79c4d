"""``k8e audit`` and ``k8e sandbox events``: who did what, and what happened in a session."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from k8e import errors
from k8e.cli import fast, output, sessions
from k8e.cli.parser import Commands, Parser
from k8e.client import audit, events
from k8e.client.approvals import visible
from k8e.client.audit import AuditRow
from k8e.client.events import Event

PAGE = 1000
WAIT = 20.0  # seconds that the gateway keeps an empty answer back
_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def show(options: argparse.Namespace) -> int:
    """Print the newest rows, and with ``--follow`` those that come."""
    wanted = _wanted(options)
    page = sessions.ask(options, audit.page({**wanted, "limit": options.limit}))
    _print(page["rows"], as_json=options.json)
    while options.follow:
        further = {"forward": True, "cursor": page["cursor"], "wait": WAIT, "limit": PAGE}
        page = sessions.ask(options, audit.page({**wanted, **further}))
        _print(page["rows"], as_json=options.json)
    return 0


def export(options: argparse.Namespace) -> int:
    """Print everything, page by page."""
    wanted = {**_wanted(options), "forward": True, "limit": PAGE}
    page: dict[str, Any] = {"cursor": "", "more": True}
    while page["more"]:
        page = sessions.ask(options, audit.page({**wanted, "cursor": page["cursor"]}))
        _print(page["rows"], as_json=True)
    return 0


def verify(options: argparse.Namespace) -> int:
    told = sessions.ask(options, audit.verify(options.expect))
    output.answer(told)
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
            f"{text[:40]!r} is not a time", hint="use 15m, 2h, 7d, 2026-01-31 or 2026-01-31T12:00"
        ) from None


def _print(rows: list[str], *, as_json: bool) -> None:
    lines = rows if as_json else audit_table(map(audit.parse, rows))
    text = "".join(f"{line}\n" for line in lines)
    fast.write(1, text.encode("utf-8", "backslashreplace"))


def audit_table(rows: Iterator[AuditRow]) -> Iterator[str]:
    """A line for each row; nothing that a client or a sandbox wrote acts on the terminal."""
    for row in rows:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.at))
        who = f"{row.principal or '?'} ({row.via}{', ' + row.peer if row.peer else ''})"
        told = "  ".join(f"{key}={_row_value(value)}" for key, value in row.detail.items())
        mark = "" if row.outcome == "allowed" else "DENIED  "
        line = f"{row.seq}  {at}  {mark}{row.action}  {visible(who)}  {visible(row.session) or '-'}"
        yield f"{line}  {told}".rstrip()


def _row_value(value: Any) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


_TIME = "an age (30s, 15m, 2h, 7d), a date and time, or unix time"


def add_audit(commands: Commands) -> None:
    wanted = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    wanted.add_argument("--session", metavar="ID", help="what happened to one session")
    wanted.add_argument("--principal", metavar="NAME", help="the actions of one principal")
    wanted.add_argument("--since", metavar="TIME", help=f"not before: {_TIME}")
    wanted.add_argument("--until", metavar="TIME", help="before that time")
    wanted.add_argument("--action", metavar="NAME", help="one action, or all of a kind: 'exec.*'")
    wanted.add_argument(
        "--denied", action="store_true", default=argparse.SUPPRESS, help="only what was refused"
    )
    audit = commands.add(
        "audit",
        "show who did what to which session, and what was refused",
        "k8e audit --since 1h\n         k8e audit --session ID --denied --json",
        show,
        remote=True,
        parents=[wanted],
    )
    audit.add_argument("--limit", type=int, default=100, metavar="N", help="the newest N (100)")
    audit.add_argument("--follow", action="store_true", help="go on with rows as they come")
    audit.add_argument("--json", action="store_true", help="print lines of JSON")
    group = audit.commands()
    group.add(
        "export",
        "print all rows, oldest first, as the lines of JSON that were written",
        "k8e audit export --since 30d > audit.jsonl",
        export,
        remote=True,
        parents=[wanted],
    )
    verify_parser = group.add(
        "verify",
        "check that no row was changed or is missing; exits with 1 if one was",
        "k8e audit verify\n         k8e audit verify --expect 1234:9f86d081…",
        verify,
        remote=True,
    )
    verify_parser.add_argument(
        "--expect",
        default="",
        metavar="HEAD",
        help="the head that an earlier check printed; it must still be there",
    )


# Events.

_HTML = str.maketrans({"&": "\\u0026", "<": "\\u003c", ">": "\\u003e"})


def show_events(options: argparse.Namespace) -> int:
    """Print the events: a table on a terminal, elsewhere the gateway's lines of JSON."""
    one = bool(options.session_id)
    found: list[str] = sessions.ask(options, events.lines(options.session_id, options.limit))
    if options.json or not os.isatty(1):
        text = "".join(f"{line.translate(_HTML)}\n" for line in found)
    else:
        rows = events_table([events.parse(line) for line in found], one=one)
        text = "".join(f"{row}\n" for row in rows)
    fast.write(1, text.encode("utf-8", "backslashreplace"))
    return 0


def events_table(found: list[Event], *, one: bool = True) -> Iterator[str]:
    """A line for each event; characters from a sandbox or a client never act on the terminal."""
    if one and found and found[0].seq > 1:
        yield f"({found[0].seq - 1} older events are not shown)"
    rows: list[tuple[str, str, str]] = []
    for item in found:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.at))
        fields = item.fields if one else {"session_id": item.session_id, **item.fields}
        detail = "  ".join(f"{key}={_event_value(value)}" for key, value in fields.items())
        rows.append((at, item.kind, detail))
    yield from output.table(rows)


def _event_value(value: Any) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def add_events(commands: Commands) -> None:
    parser = commands.add(
        "events",
        "print what happened in a session: one line of JSON each, on a terminal a table",
        "k8e sandbox events ID\n         k8e sandbox events ID --limit 10 --json",
        show_events,
        remote=True,
    )
    parser.add_argument(
        "session_id", metavar="ID", nargs="?", default="", help="without it: all of yours"
    )
    parser.add_argument(
        "--limit", type=int, default=500, metavar="N", help="only the newest N (default 500)"
    )
    parser.add_argument("--json", action="store_true", help="lines of JSON on a terminal too")
