"""Client certificates: issued for a key, known by their serial, gone with their key."""

from __future__ import annotations

import functools
import ssl
import time
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.devices import (
    PEM,
    REFUSED,
    WRONG,
    Device,
    Metadata,
    Stub,
    ask,
    bearer,
    every_kind,
    log_in,
    new_key,
    private_pem,
    request,
)
from tests.gateway.serving import Frames, Running, failing

Status = grpc.StatusCode
DAY = 24 * 3600


def test_a_certificate_alone_identifies_its_key(
    running: Running, stub: Stub, agent: Metadata, session_of: dict[str, str]
) -> None:
    device = log_in(stub, agent)
    with device.channel(running) as channel:
        mine = pb_grpc.SandboxServiceStub(channel)
        listed = mine.ListSessions(pb.ListSessionsRequest(), timeout=30)
        assert [item.session_id for item in listed.sessions] == [session_of["agent"]]
        done = mine.Exec(
            pb.ExecRequest(session_id=session_of["agent"], command="echo hi"), timeout=50
        )
        assert done.stdout == "hi\n"
        with Frames(channel) as frames:
            frames.ask(1, op="status")
            assert frames.result(1)["caller"] == "key:agent"
        renewed = log_in(mine)
    with renewed.channel(running) as channel:
        pb_grpc.SandboxServiceStub(channel).ListSessions(pb.ListSessionsRequest(), timeout=30)


def test_nothing_of_a_csr_is_used_but_its_key(running: Running, stub: Stub) -> None:
    metadata = new_key(running, "careful", ttl="7d")
    private = ec.generate_private_key(ec.SECP384R1())
    told = stub.Login(
        pb.LoginRequest(csr=request(private, "root", hashes.SHA256())),
        metadata=metadata,
        timeout=40,
    )
    issued = x509.load_pem_x509_certificate(told.cert.encode())
    assert issued.subject.rfc4514_string() == "CN=careful"
    assert not issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [item.oid for item in issued.extensions]
    assert x509.SubjectAlternativeName.oid not in names
    assert told.ca_cert.encode() == running.ca.read_bytes()
    left = issued.not_valid_after_utc.timestamp() - time.time()
    assert 6.9 * DAY < left <= 7 * DAY, "never longer than its key"
    assert told.valid_days == 7
    ask(running, op="delete_api_key", name="careful")


def test_a_key_without_end_gets_certificates_of_90_days(running: Running, stub: Stub) -> None:
    metadata = new_key(running, "eternal", ttl="never")
    csr = request(ec.generate_private_key(ec.SECP256R1()), digest=hashes.SHA256())
    assert stub.Login(pb.LoginRequest(csr=csr), metadata=metadata, timeout=40).valid_days == 90
    ask(running, op="delete_api_key", name="eternal")


@pytest.mark.parametrize(
    "private",
    [ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)],
    ids=["ed25519", "rsa"],
)
def test_other_good_keys_are_signed_too(stub: Stub, agent: Metadata, private: Any) -> None:
    digest = None if isinstance(private, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    told = stub.Login(
        pb.LoginRequest(csr=request(private, digest=digest)), metadata=agent, timeout=40
    )
    assert "CERTIFICATE" in told.cert


def _hostile() -> dict[str, str]:
    good = request(ec.generate_private_key(ec.SECP256R1()), digest=hashes.SHA256())
    swapped = good.replace(good[60:64], "AAAA", 1)
    weak = rsa.generate_private_key(65537, 1024)
    odd = ec.generate_private_key(ec.SECP256K1())
    return {
        "empty": "",
        "nonsense": "hello",
        "binary": "\0\1\2",
        "foreign": "ä" * 100,
        "long": "A" * 20_000,
        "damaged": swapped,
        "cut": good[: len(good) // 2],
        "certificate": good.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
        "weak": request(weak, digest=hashes.SHA256()),
        "curve": request(odd, digest=hashes.SHA256()),
        "dsa": request(dsa.generate_private_key(2048), digest=hashes.SHA256()),
    }


HOSTILE = _hostile()


@pytest.mark.parametrize("what", HOSTILE)
def test_a_bad_csr_is_refused(stub: Stub, agent: Metadata, what: str) -> None:
    asked = pb.LoginRequest(csr=HOSTILE[what])
    failed = failing(lambda: stub.Login(asked, metadata=agent, timeout=40))
    assert failed.status is Status.INVALID_ARGUMENT, failed
    assert "CSR" in failed.details


def test_a_bad_device_name_is_refused(stub: Stub, agent: Metadata) -> None:
    asked = pb.LoginRequest(csr="x", device_name="a\nb")
    failed = failing(lambda: stub.Login(asked, metadata=agent, timeout=40))
    assert failed.status is Status.INVALID_ARGUMENT


def test_the_local_user_has_no_key_to_log_in_with(stub: Stub) -> None:
    failed = failing(lambda: stub.Login(pb.LoginRequest(csr="x"), timeout=40))
    assert (failed.status, failed.code) == (Status.PERMISSION_DENIED, "denied")


def test_a_deleted_key_s_certificate_is_refused_and_its_open_connection_too(
    running: Running, stub: Stub
) -> None:
    device = log_in(stub, new_key(running, "lost"))
    with device.channel(running) as channel:
        pb_grpc.SandboxServiceStub(channel).ListSessions(pb.ListSessionsRequest(), timeout=30)
        ask(running, op="delete_api_key", name="lost")
        new_key(running, "lost")
        for failed in every_kind(channel, ()):
            assert failed.status in REFUSED
    ask(running, op="delete_api_key", name="lost")


def test_certificate_and_key_of_different_callers_are_refused(
    running: Running, stub: Stub, agent: Metadata, other: Metadata
) -> None:
    device = log_in(stub, agent)
    with device.channel(running) as channel:
        for failed in every_kind(channel, other):
            assert failed.status in REFUSED
        mine = pb_grpc.SandboxServiceStub(channel)
        mine.ListSessions(pb.ListSessionsRequest(), metadata=agent, timeout=30)


def test_certificates_that_we_did_not_issue_do_not_get_through(running: Running) -> None:
    tls = running.ca.parent
    server = Device((tls / "server.key").read_bytes(), (tls / "server.crt").read_bytes())
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "agent")])
    ours = x509.load_pem_x509_certificate(running.ca.read_bytes())
    forged = (
        x509.CertificateBuilder(ours.subject, name, private.public_key(), 5)
        .not_valid_before(ours.not_valid_before_utc)
        .not_valid_after(ours.not_valid_after_utc)
        .sign(private, hashes.SHA256())
    )
    stranger = Device(private_pem(private), forged.public_bytes(PEM))
    for device in (server, stranger):
        with device.channel(running) as channel:
            call = functools.partial(
                pb_grpc.SandboxServiceStub(channel).ListSessions, pb.ListSessionsRequest()
            )
            failed = failing(lambda call=call: call(timeout=20))
            assert failed.status in (Status.UNAVAILABLE, Status.UNAUTHENTICATED)


def test_the_ca_is_told_to_anybody(running: Running) -> None:
    with running.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        told = stub.GetCACert(pb.GetCACertRequest(), metadata=bearer(WRONG), timeout=30)
    assert told.cert.encode() == running.ca.read_bytes()
    assert ssl.PEM_cert_to_DER_cert(told.cert)


def test_nobody_gets_past_the_front(running: Running) -> None:
    with grpc.insecure_channel(f"unix:{running.folder}/r/rpc.sock") as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        failed = failing(lambda: stub.ListSessions(pb.ListSessionsRequest(), timeout=20))
    assert failed.status is Status.UNAUTHENTICATED
    assert "did not come through the endpoint" in failed.details
    assert (running.folder / "r/rpc.sock").stat().st_mode & 0o777 == 0o600
