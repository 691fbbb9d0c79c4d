"""Certificates are replaced while the gateway serves, and nobody who trusts its CA notices."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from k8e.gateway import issuer, signer, tls
from tests.gateway.devices import private_pem, request
from tests.gateway.fronts import Client, serving

DAY = 24 * 3600


def age(folder: Path) -> None:
    record = json.loads((folder / tls.RECORD).read_text())
    (folder / tls.RECORD).write_text(json.dumps({**record, "not_after": time.time() + DAY}))


async def test_a_certificate_is_replaced_under_open_connections_of_clients_that_pin_the_ca(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (certificates, endpoint, _):
        pinned, old = (tmp_path / tls.CA_CERT).read_bytes(), certificates.identity
        first = await Client.dial(endpoint, pinned)
        age(tmp_path)
        monkeypatch.setattr(tls, "CHECK_EVERY", 0.01)
        keeper = asyncio.create_task(certificates.keep())
        async with asyncio.timeout(20):
            while certificates.identity == old:  # noqa: ASYNC110 - nobody reports it
                await asyncio.sleep(0.01)
        keeper.cancel()
        second = await Client.dial(endpoint, pinned)
        assert second.shown != first.shown
        assert await first.says(b"still here") == b"still here"
        assert await second.says(b"me too") == b"me too"
        await first.close()
        await second.close()


@pytest.mark.parametrize("loss", ["near its end", "lost", "damaged"])
async def test_a_ca_is_renewed_with_its_key_so_old_pins_and_client_certificates_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    folder = tmp_path / "tls"
    monkeypatch.setattr(issuer, "CA_DAYS", 200)
    issuer.make(folder)
    pinned = (folder / tls.CA_CERT).read_bytes()
    device = tmp_path / "client.crt", tmp_path / "client.key"
    private = ec.generate_private_key(ec.SECP256R1())
    csr = request(private, digest=hashes.SHA256())
    signed = signer.sign(folder, csr, "laptop", time.time() + DAY)
    device[0].write_text(signed["certificate"])
    device[1].write_bytes(private_pem(private))
    monkeypatch.undo()
    if loss == "lost":
        (folder / tls.CA_CERT).unlink()
    elif loss == "damaged":
        (folder / tls.CA_CERT).write_text("nonsense")
    assert tls.due(folder, time.time())
    async with serving(folder) as (_, endpoint, _):
        renewed = (folder / tls.CA_CERT).read_bytes()
        assert renewed != pinned
        assert not tls.due(folder, time.time())
        for ca in (pinned, renewed):
            client = await Client.dial(endpoint, ca, device)
            assert await client.says(b"hello") == b"hello"
            await client.close()


def test_a_ca_whose_key_is_lost_is_made_anew(tmp_path: Path) -> None:
    issuer.make(tmp_path)
    before = (tmp_path / tls.CA_CERT).read_bytes()
    (tmp_path / tls.CA_KEY).unlink()
    issuer.make(tmp_path)
    assert (tmp_path / tls.CA_CERT).read_bytes() != before
    assert issuer.load_ca(tmp_path) is not None


def test_a_ca_is_due_two_years_before_its_end(tmp_path: Path) -> None:
    issuer.make(tmp_path)
    record = json.loads((tmp_path / tls.RECORD).read_text())
    (tmp_path / tls.RECORD).write_text(
        json.dumps({**record, "not_after": record["ca_not_after"], "sha256": record["sha256"]})
    )
    ends = record["ca_not_after"]
    assert not tls.due(tmp_path, ends - (tls.RENEW_CA_DAYS + 1) * DAY)
    assert tls.due(tmp_path, ends - (tls.RENEW_CA_DAYS - 1) * DAY)
