"""Certificates are made, checked and renewed without help."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import stat
import sys
import time
from pathlib import Path

import pytest

from k8e import errors
from k8e.gateway import issuer, tls

DAY = 24 * 3600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issuer.make(tmp_path / "tls")
    return tmp_path / "tls"


def shown(folder: Path, name: str) -> dict[str, object]:
    """What a client that trusts only our CA learns in a real handshake with ``name``."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = client.wrap_bio(theirs, ours, server_hostname=name)
    serving = server.wrap_bio(ours, theirs, server_side=True)
    for _ in range(3):
        for end in (dialling, serving):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(dialling.getpeercert() or {})


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", socket.gethostname()])
def test_clients_that_trust_the_ca_accept_every_local_name(folder: Path, name: str) -> None:
    assert shown(folder, name)


def test_other_names_are_not_accepted(folder: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(folder, "example.com")


def test_a_certificate_lasts_90_days_and_its_ca_ten_years(folder: Path) -> None:
    ends = ssl.cert_time_to_seconds(str(shown(folder, "localhost")["notAfter"]))
    assert 89 * DAY < ends - time.time() <= 90 * DAY
    assert json.loads((folder / "server.json").read_text())["not_after"] == ends
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    ca_ends = ssl.cert_time_to_seconds(str(context.get_ca_certs()[0]["notAfter"]))
    assert 3649 * DAY < ca_ends - time.time() <= 3650 * DAY


def test_keys_are_for_their_owner_only(folder: Path) -> None:
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.crt",
        "ca.key",
        "server.crt",
        "server.json",
        "server.key",
    ]


async def test_a_first_start_makes_everything(tmp_path: Path) -> None:
    certificates = tls.Certificates(tmp_path / "tls")
    await certificates.load()
    assert certificates.identity.certificate == (tmp_path / "tls/server.crt").read_bytes()
    assert shown(tmp_path / "tls", "localhost")


async def test_a_good_certificate_is_left_alone(folder: Path) -> None:
    before = (folder / "server.crt").read_bytes()
    await tls.Certificates(folder).load()
    assert (folder / "server.crt").read_bytes() == before


def test_it_is_due_when_less_than_30_days_are_left(folder: Path) -> None:
    now = time.time()
    assert not tls.due(folder, now + 59 * DAY)
    assert tls.due(folder, now + 61 * DAY)


async def test_renewal_keeps_the_ca_and_reaches_who_serves(folder: Path) -> None:
    certificates = tls.Certificates(folder)
    await certificates.load()
    old, ca = certificates.identity, (folder / "ca.crt").read_bytes()
    _age(folder)
    await certificates.load()
    assert certificates.identity != old
    assert certificates.identity.certificate == (folder / "server.crt").read_bytes()
    assert (folder / "ca.crt").read_bytes() == ca
    assert shown(folder, "localhost")


def _age(folder: Path) -> None:
    """Let the certificate look as if it ended tomorrow."""
    record = json.loads((folder / "server.json").read_text())
    (folder / "server.json").write_text(json.dumps({**record, "not_after": time.time() + DAY}))


async def test_it_is_renewed_while_the_gateway_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = tls.Certificates(folder)
    await certificates.load()
    old = certificates.identity
    _age(folder)
    monkeypatch.setattr(tls, "CHECK_EVERY", 0)
    renewed = asyncio.Event()
    load = certificates.load

    async def load_and_tell() -> None:
        await load()
        renewed.set()

    monkeypatch.setattr(certificates, "load", load_and_tell)
    keeper = asyncio.create_task(certificates.keep())
    async with asyncio.timeout(20):
        await renewed.wait()
    keeper.cancel()
    assert certificates.identity != old


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key", "server.json"])
@pytest.mark.parametrize("damage", ["missing", "foreign"])
async def test_damage_is_repaired(folder: Path, name: str, damage: str) -> None:
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_text("{}")
    assert tls.due(folder, time.time())
    await tls.Certificates(folder).load()
    assert not tls.due(folder, time.time())
    assert shown(folder, "localhost")


def test_a_new_host_name_needs_a_new_certificate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Renamed.example")
    assert tls.names()[-1] == "renamed.example"
    assert tls.due(folder, time.time())


def test_a_host_name_that_no_certificate_can_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "my_host\n")
    assert tls.names() == ["localhost", "127.0.0.1", "::1"]


async def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        errors.K8eError, match=r"making the TLS certificate in .* failed: .*NotADir"
    ):
        await tls.Certificates(tmp_path / "file/tls").load()


async def test_the_gateway_never_loads_cryptography(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, sys; from k8e.gateway import tls\n"
        "asyncio.run(tls.Certificates(pathlib.Path(sys.argv[1])).load())\n"
        "assert not any(name.startswith('cryptography') for name in sys.modules)"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path / "tls"))
    assert await child.wait() == 0
