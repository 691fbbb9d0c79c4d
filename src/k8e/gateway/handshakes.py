"""What TLS tells of who is at the other end of a connection, and what it is told of us."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from k8e.gateway import peers, tls

_DIALLED = "k8e_dialled"
"""An attribute of a connection's TLS object: the name of the server that the client asked for."""


class Certificate(NamedTuple):
    """What a client's certificate says; TLS has checked that our CA signed it and it is current."""

    name: str
    serial: str


class Caller(NamedTuple):
    """The far end of a connection."""

    client: peers.Endpoint
    server: peers.Endpoint
    """Where the client dialled us."""
    certificate: Certificate | None
    by_our_name: bool = True
    """False if the client dialled a name that is not in our certificate, wherever it led it here:
    the mark of a web page whose name was pointed at this machine."""


def caller(transport: asyncio.Transport, is_ours: Callable[[str], bool]) -> Caller | None:
    """Both ends of a connection, and the certificate that was shown, if one was."""
    client, server = (transport.get_extra_info(what) for what in ("peername", "sockname"))
    if not client or not server:
        return None
    certificate: dict[str, Any] = transport.get_extra_info("peercert") or {}
    shown = None
    if certificate:
        fields = [pair for part in certificate.get("subject", ()) for pair in part]
        names = [str(value) for field, value in fields if field == "commonName"]
        serial = str(certificate.get("serialNumber", ""))
        shown = Certificate(names[0] if len(names) == 1 else "", serial)
    dialled: str = getattr(transport.get_extra_info("ssl_object"), _DIALLED, "")
    ends = peers.endpoint(*client[:2]), peers.endpoint(*server[:2])
    return Caller(*ends, shown, is_ours(dialled))


def _note_name(secured: Any, name: str | None, _: ssl.SSLContext) -> None:
    setattr(secured, _DIALLED, name or "")


def context(folder: Path) -> ssl.SSLContext:
    """What we show, and that a client may show a certificate of our CA, and no other."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.load_cert_chain(folder / tls.CERT, folder / tls.KEY)
    made.load_verify_locations(folder / tls.CA_CERT)
    made.verify_mode = ssl.CERT_OPTIONAL
    made.set_alpn_protocols(["h2"])
    made.sni_callback = _note_name
    # Resumed sessions would carry a certificate from one connection to another, unchecked.
    made.options |= ssl.OP_NO_TICKET
    made.num_tickets = 0
    return made
