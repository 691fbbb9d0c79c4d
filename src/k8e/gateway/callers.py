"""Who makes a call: an API key, a client certificate, or the local user by the kernel's word."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

from k8e import errors
from k8e.audit.acting import Caller as Described
from k8e.auth import keys
from k8e.auth.keys import Keys, Unknown
from k8e.auth.store import Key
from k8e.gateway import peers
from k8e.gateway.peers import Refusal
from k8e.model import Principal

if TYPE_CHECKING:
    from k8e.gateway.handshakes import Caller

log = logging.getLogger(__name__)

_KEY_HEADERS = ("authorization", "x-api-key")


@contextlib.asynccontextmanager
async def identified(
    known: Keys, caller: Caller | None, metadata: Iterable[tuple[str, str | bytes]]
) -> AsyncGenerator[Principal]:
    """The principal of a call, for as long as it may make it.

    Raises:
        Refusal: nobody that we know, or not any more.
        LimitExceeded: the same, and too often.
    """
    if caller is None:
        raise Refusal("this connection did not come through the endpoint")
    try:
        _refuse_pages(metadata)
        found = _key(known, caller, metadata) or _local(caller)
    except (Unknown, Refusal) as error:
        raise _failed(known, caller, error) from None
    if isinstance(found, Principal):
        yield found
        return
    try:
        async with known.while_valid(found):
            yield keys.principal(found)
    except Unknown as error:
        raise Refusal(str(error)) from None


def _refuse_pages(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """No web page is a client of ours; only browsers send these, and a page cannot leave them out.

    A page can make the browser of our own user dial us, and then its uid would be ours.
    """
    for header, _ in metadata:
        if header == "origin" or header.startswith("sec-fetch-"):
            raise Refusal("this is no service for web pages")


def _local(caller: Caller) -> Principal:
    """The local user, by the kernel's word."""
    if not caller.by_our_name:
        raise Refusal("the name that was dialled is not one of this gateway (K8E_ADVERTISE_NAMES)")
    return peers.identify(caller.client, caller.server)


def described(caller: Caller | None, principal: Principal | None) -> Described:
    """Who somebody is and how we know, for those who write it down; None is not known yet."""
    peer = str(caller.client) if caller is not None else ""
    if principal is None:
        return Described("", "grpc", peer)
    if not principal.name.startswith(keys.OWNER_PREFIX):
        return Described(principal.name, "loopback", peer)
    shown = caller.certificate if caller is not None else None
    return Described(principal.name, "certificate" if shown else "key", peer)


def _key(known: Keys, caller: Caller, metadata: Iterable[tuple[str, str | bytes]]) -> Key | None:
    """The key that a call shows, itself or by a certificate. What is shown must be right."""
    found: list[Key] = []
    if caller.certificate is not None:
        found.append(known.of_certificate(caller.certificate.serial, caller.certificate.name))
    found += [known.of_secret(secret) for secret in _secrets(metadata)]
    if len({key.key_id for key in found}) > 1:
        raise Unknown("the credentials of this call belong to different keys")
    return found[0] if found else None


def _secrets(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[str]:
    for header, value in metadata:
        if header not in _KEY_HEADERS:
            continue
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if header == "authorization":
            scheme, _, text = text.partition(" ")
            if scheme.lower() != "bearer":
                raise Unknown("authorization must be 'Bearer ' and an API key")
        yield text.strip()


def _failed(known: Keys, caller: Caller, error: Unknown | Refusal) -> Exception:
    address = str(caller.client.address)
    if not known.attempts.failed(address):
        return errors.LimitExceeded(
            f"too many wrong credentials from {address}", hint="correct them, and wait a minute"
        )
    log.warning("refused a call from %s: %s", address, error)
    return Refusal(str(error))
