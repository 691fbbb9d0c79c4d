"""Errors as callers see them, the same on every wire."""

from __future__ import annotations

import logging
from typing import NamedTuple

from k8e import database, errors
from k8e.errors import WireStatus
from k8e.gateway.identity import UnknownPeer
from k8e.sessions.exchange import GuestOSError

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """The status of an error on each wire, and its text with the hint."""

    status: WireStatus
    text: str


def describe(error: Exception) -> Refusal:
    """Describe ``error`` to a caller; unexpected ones go to the log only: they name our files."""
    if database.is_full(error):
        error = database.full()
    if isinstance(error, errors.K8eError):
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        return Refusal(error.wire_status, text)
    if isinstance(error, GuestOSError):
        return Refusal(errors.status_of_errno(error.errno), str(error))
    if isinstance(error, UnknownPeer):
        return Refusal(errors.UNAUTHENTICATED, str(error))
    log.error("a call failed unexpectedly", exc_info=error)
    return Refusal(errors.K8eError(errors.INTERNAL).wire_status, errors.INTERNAL)
