"""Certificates of logins renew themselves, once, and nobody waits or fails for it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from k8e.client import login, remote, renewal
from k8e.client.endpoints import Endpoint
from k8e.conformance.lab.ports import free_port
from tests.places import COMMAND, Place

PAST = "1000000000\nmy laptop\n"


@pytest.fixture
def far(place: Place, tmp_path: Path) -> Generator[dict[str, Any]]:
    """The environment of another machine that has logged in."""
    place.json("sandbox", "status")
    place.wait_for_grpc()
    environ: dict[str, Any] = {
        "HOME": str(tmp_path),
        "K8E_DATA_DIR": str(tmp_path / "data"),
        "K8E_RUN_DIR": str(tmp_path / "run"),
    }
    key = place.json("sandbox", "api-key", "create", "renewing")["key"]
    pin = place.json("gateway", "fingerprint")["fingerprint"]
    target = ["--endpoint", place.environ["K8E_LISTEN"], "--ca-fingerprint", pin]
    place.json("sandbox", "login", *target, "--apikey", key, "--profile", "work", **environ)
    yield environ
    place.cli("sandbox", "api-key", "delete", "renewing")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".k8e/sandbox/profiles/work"


def serial(folder: Path) -> int:
    pem = (folder / "client.crt").read_bytes()
    return x509.load_pem_x509_certificate(pem).serial_number


def test_a_login_says_when_its_certificate_is_renewed(far: dict[str, Any], folder: Path) -> None:
    due = float((folder / "renew_at").read_text().split()[0])
    assert due == pytest.approx(time.time() + 20 * renewal.DAY, abs=3600), "of 30 days"


def test_a_command_renews_what_is_due_and_the_next_one_uses_it(
    place: Place, far: dict[str, Any], folder: Path
) -> None:
    first, key = serial(folder), (folder / "client.key").read_bytes()
    assert place.json("sandbox", "run", "echo 1", **far)["stdout"] == "1\n"
    assert serial(folder) == first, "not before its time"
    (folder / "renew_at").write_text(PAST)
    assert place.json("sandbox", "run", "echo 2", **far)["stdout"] == "2\n"
    second = serial(folder)
    assert second != first
    assert (folder / "client.key").read_bytes() == key
    assert float((folder / "renew_at").read_text().split()[0]) > time.time()
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert place.json("sandbox", "run", "echo 3", **far)["stdout"] == "3\n"
    assert serial(folder) == second
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.crt",
        "client.crt",
        "client.key",
        "endpoint",
        "renew_at",
    ]


def test_of_many_who_find_it_due_one_renews_it(
    place: Place, far: dict[str, Any], folder: Path
) -> None:
    (folder / "renew_at").write_text(PAST)
    endpoint = Endpoint(target=place.environ["K8E_LISTEN"], cert_dir=str(folder))
    began = [renewal.begin(endpoint) for _ in range(8)]
    for thread in began:
        if thread is not None:
            thread.join(30)
    told = place.cli("audit", "--action", "key.login", "--limit", "100", "--json").stdout
    rows = [json.loads(line) for line in told.splitlines()]
    newest = max(rows, key=lambda row: row["at"])
    mine = [row["detail"]["device"] for row in rows if row["principal"] == newest["principal"]]
    assert mine[-1] == "my laptop"
    assert len(mine) == 2, "the login, and one more"


def test_what_cannot_be_renewed_is_used_until_its_end_and_tried_again_later(
    place: Place, far: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "renew_at").write_text(PAST)
    before = serial(folder)
    thread = renewal.begin(Endpoint(target=f"127.0.0.1:{free_port()}", cert_dir=str(folder)))
    assert thread is not None
    thread.join(60)
    assert "could not be renewed" in caplog.text
    assert serial(folder) == before
    later = float((folder / "renew_at").read_text().split()[0])
    assert later == pytest.approx(time.time() + renewal.RETRY_SECONDS, abs=60)
    assert place.json("sandbox", "run", "echo 1", **far)["stdout"] == "1\n"


def test_who_was_killed_in_the_middle_is_in_nobody_s_way_for_long(
    place: Place, far: dict[str, Any], folder: Path
) -> None:
    (folder / "renew_at").write_text(PAST)
    lock = folder / "renewing"
    lock.touch()
    endpoint = Endpoint(target=place.environ["K8E_LISTEN"], cert_dir=str(folder))
    before = serial(folder)
    renewal.renew(endpoint)
    assert serial(folder) == before, "somebody may be at it"
    long_ago = time.time() - 2 * renewal.STALE_SECONDS
    os.utime(lock, (long_ago, long_ago))
    renewal.renew(endpoint)
    assert serial(folder) != before
    assert not lock.exists()


@pytest.mark.parametrize("written", ["never\n", "", "x\n", None])
def test_without_a_time_nothing_is_renewed(tmp_path: Path, written: str | None) -> None:
    for name in ("client.crt", "client.key"):
        (tmp_path / name).write_text("x")
    if written is not None:
        (tmp_path / "renew_at").write_text(written)
    assert not renewal.is_due(Endpoint(target="x:1", cert_dir=str(tmp_path)))


def test_a_key_of_the_caller_s_own_renews_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("client.crt", "x"), ("client.key", "x"), ("renew_at", PAST)):
        (tmp_path / name).write_text(text)
    endpoint = Endpoint(target="x:1", cert_dir=str(tmp_path))
    assert renewal.is_due(endpoint)
    assert not renewal.is_due(Endpoint(target="x:1", cert_dir=str(tmp_path), api_key="k"))
    monkeypatch.setenv("K8E_SANDBOX_CERT", "a")
    monkeypatch.setenv("K8E_SANDBOX_KEY", "b")
    assert not renewal.is_due(endpoint)


def test_a_login_meanwhile_keeps_its_key_and_its_certificate(
    place: Place, far: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "renew_at").write_text(PAST)
    asked = login.login

    def slow(*arguments: Any) -> login.LoginCertificate:
        issued = asked(*arguments)
        place.json("sandbox", "login", **far)
        return issued

    monkeypatch.setattr(login, "login", slow)
    renewal.renew(Endpoint(target=place.environ["K8E_LISTEN"], cert_dir=str(folder)))
    assert place.json("sandbox", "run", "echo 1", **far)["stdout"] == "1\n"


def test_a_long_lived_client_uses_the_renewed_certificate(
    place: Place, far: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FRESH_SECONDS", 0.0)
    channel = remote.GrpcChannel(Endpoint(target=place.environ["K8E_LISTEN"], cert_dir=str(folder)))
    first = newest(channel)
    channel.connect().close()
    assert newest(channel) is first
    place.json("sandbox", "login", **far)
    channel.connect().close()
    second = newest(channel)
    assert second is not first
    channel.connect().close()
    assert newest(channel) is second
    channel.close()


def newest(channel: remote.GrpcChannel) -> object:
    return channel._lines._newest  # pyright: ignore[reportPrivateUsage]


def test_what_is_another_user_s_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("client.crt", "x"), ("client.key", "x"), ("renew_at", PAST)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert not renewal.is_due(Endpoint(target="x:1", cert_dir=str(tmp_path)))


def test_a_login_waits_for_a_renewal_that_is_under_way(
    place: Place, far: dict[str, Any], folder: Path
) -> None:
    with renewal.only_one(folder) as alone:
        assert alone
        command = [*COMMAND, "sandbox", "login", "--device-name", "other"]
        quiet = subprocess.DEVNULL
        waiting = subprocess.Popen(
            command, env={**place.environ, **far}, stdin=quiet, stdout=quiet, stderr=quiet
        )
        with renewal.only_one(folder) as also:
            assert not also
        before = serial(folder)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1.5)
        assert serial(folder) == before
    assert waiting.wait(30) == 0
    assert serial(folder) != before
    assert not (folder / "renewing").exists()


def test_what_cannot_be_looked_at_keeps_nobody_from_working(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "renew_at").write_text(PAST)
    (tmp_path / "client.crt").mkdir()  # no file that could be read
    assert renewal.begin(Endpoint(target="x:1", cert_dir=str(tmp_path))) is None
    assert "cannot be told" in caplog.text
