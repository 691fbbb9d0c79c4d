"""When the certificates of a server and its own node are made anew."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from k8e.distro import certificates, server
from k8e.distro.certificates import Subject
from k8e.distro.layout import Layout


@pytest.mark.parametrize("first", ["kube-apiserver", "cilium"])
def test_the_certificate_that_is_due_first_decides_whose_ever_it_is(
    tmp_path: Path, first: str
) -> None:
    layout = Layout(tmp_path / "data", tmp_path / "run")
    layout.make()
    layout.make_server()
    signer = certificates.authority(layout.tls, "client-ca")
    (layout.pki / "client-ca.crt").write_bytes(signer.pem)
    for folder, name in ((layout.tls, "kube-apiserver"), (layout.pki, "cilium")):
        days = 3 if name == first else 300
        certificates.leaf(signer, Subject(name), folder / name, days=days)
    due = server.next_renewal(layout) - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=1) < due < datetime.timedelta(days=3)
