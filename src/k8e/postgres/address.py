"""The address of the database, and how it is displayed: never with its password."""

from __future__ import annotations

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from k8e import database, errors

_DRIVERS = ("postgres", "postgresql", "postgresql+psycopg")
_MOST = 300  # characters of what the database says


def parse(text: str) -> URL:
    """Parse ``text``; errors do not quote it, because it may have a password."""
    try:
        found = make_url(text)
    except (ArgumentError, ValueError):
        raise errors.InvalidRequest(
            "DATABASE_URL is not the address of a database",
            hint="postgresql://USER:PASSWORD@HOST:5432/NAME",
        ) from None
    if found.drivername not in _DRIVERS:
        raise errors.InvalidRequest(
            f"DATABASE_URL is an address of {found.drivername[:40]!r}, not of PostgreSQL",
            hint="postgresql://USER:PASSWORD@HOST:5432/NAME; without it, k8e uses SQLite",
        )
    if not found.database:
        raise errors.InvalidRequest(
            "DATABASE_URL names no database", hint="postgresql://USER:PASSWORD@HOST:5432/NAME"
        )
    return found.set(drivername="postgresql+psycopg")


def describe(url: URL) -> str:
    """Host and name alone: even a parameter may be secret."""
    host = url.host or url.query.get("host") or "its socket"
    return f"{url.database} on {host}"


def is_text(*values: str) -> bool:
    """Whether PostgreSQL accepts all of ``values``; no others were ever written to it."""
    return database.is_text(*values) and not any("\0" in value for value in values)


def reason(error: BaseException) -> str:
    """The reason of a failure, in one line of the driver's words; without a password."""
    told = getattr(error, "orig", None) or error
    first = (str(told).strip().splitlines() or [""])[0]
    return first[:_MOST] or type(told).__name__


def unreachable(url: URL, error: BaseException) -> errors.StoreUnreachable:
    return errors.StoreUnreachable(
        f"the database {describe(url)} does not answer: {reason(error)}",
        hint="look whether PostgreSQL runs and lets this machine in (DATABASE_URL); sessions that "
        "run go on",
    )
