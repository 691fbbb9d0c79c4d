"""Authorities and certificates: made once, renewed in time, never half."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from k8e import errors
from k8e.distro import certificates
from k8e.distro.certificates import Subject

WEB = Subject("web", hosts=("web.example", "192.0.2.1"))


def test_an_authority_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    made = certificates.authority(tmp_path, "ca")
    again = certificates.authority(tmp_path, "ca")
    assert again.pem == made.pem
    assert (tmp_path / "ca.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("missing", ["ca.crt", "ca.key"])
def test_half_an_authority_is_never_replaced(tmp_path: Path, missing: str) -> None:
    certificates.authority(tmp_path, "ca")
    (tmp_path / missing).unlink()
    with pytest.raises(errors.StateUnusable, match="half there"):
        certificates.authority(tmp_path, "ca")


def test_a_certificate_that_serves_is_kept(tmp_path: Path) -> None:
    signer = certificates.authority(tmp_path, "ca")
    assert certificates.leaf(signer, WEB, tmp_path / "web", days=30)
    assert not certificates.leaf(signer, WEB, tmp_path / "web", days=30)


def test_a_certificate_is_made_anew_for_other_names_and_by_another_authority(
    tmp_path: Path,
) -> None:
    signer = certificates.authority(tmp_path, "ca")
    certificates.leaf(signer, WEB, tmp_path / "web", days=30)
    moved = Subject("web", hosts=("web.example", "192.0.2.2"))
    assert certificates.leaf(signer, moved, tmp_path / "web", days=30)
    other = certificates.authority(tmp_path, "other-ca")
    assert certificates.leaf(other, moved, tmp_path / "web", days=30)


def test_a_damaged_certificate_is_made_anew(tmp_path: Path) -> None:
    signer = certificates.authority(tmp_path, "ca")
    certificates.leaf(signer, WEB, tmp_path / "web", days=30)
    (tmp_path / "web.crt").write_text("nonsense")
    assert certificates.leaf(signer, WEB, tmp_path / "web", days=30)


def test_a_certificate_is_renewed_in_the_last_third_of_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = certificates.authority(tmp_path, "ca")
    certificates.leaf(signer, WEB, tmp_path / "web", days=30)
    due = certificates.renewal_time(certificates.read(tmp_path / "web.crt"))
    monkeypatch.setattr(certificates, "_now", lambda: due - datetime.timedelta(minutes=1))
    assert not certificates.leaf(signer, WEB, tmp_path / "web", days=30)
    monkeypatch.setattr(certificates, "_now", lambda: due + datetime.timedelta(minutes=1))
    assert certificates.leaf(signer, WEB, tmp_path / "web", days=30)


def test_the_chain_shows_the_authority_that_a_token_pins(tmp_path: Path) -> None:
    signer = certificates.authority(tmp_path, "ca")
    certificates.leaf(signer, WEB, tmp_path / "web", days=30, chain=True)
    assert (tmp_path / "web.crt").read_bytes().endswith(signer.pem)
