"""Which certificate requests are approved: real requests, judged without a cluster."""

from __future__ import annotations

import base64
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from k8e.distro import approval, tokens
from k8e.distro.approval import CLIENT, KUBELET_CLIENT, KUBELET_SERVING, Decision, Promises
from k8e.distro.configuration import Configuration

CONFIG = Configuration(data_dir=Path("/nowhere"))
BOOTSTRAP = ("system:bootstrap:abcdef", [tokens.GROUP, "system:authenticated"])
NODES = ["system:nodes", "system:authenticated"]


def node(name: str, address: str) -> dict[str, Any]:
    addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]
    return {"metadata": {"name": name}, "status": {"addresses": addresses}}


CLUSTER = [node("one", "192.0.2.1"), node("two", "192.0.2.2")]


def judge(
    signer: str,
    common: str,
    groups: list[str],
    caller: tuple[str, list[str]],
    *,
    names: tuple[str, ...] = (),
    addresses: tuple[str, ...] = (),
    other: tuple[x509.GeneralName, ...] = (),
    damage: tuple[bytes, bytes] = (b"", b""),
) -> Decision | None:
    key = ec.generate_private_key(ec.SECP256R1())
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    subject = x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    hosts: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
    hosts += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    hosts += other
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    der = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    assert damage[0] in der
    armoured = base64.b64encode(der.replace(*damage) if damage[0] else der)
    head, end = (b"-----%s CERTIFICATE REQUEST-----\n" % word for word in (b"BEGIN", b"END"))
    lines = [armoured[at : at + 64] for at in range(0, len(armoured), 64)]
    spec = {
        "request": base64.b64encode(head + b"\n".join(lines) + b"\n" + end).decode(),
        "signerName": signer,
        "username": caller[0],
        "groups": caller[1],
    }
    return approval.judge({"metadata": {"name": "r"}, "spec": spec}, CLUSTER, CONFIG)


def test_a_token_makes_a_new_node() -> None:
    found = judge(KUBELET_CLIENT, "system:node:three", ["system:nodes"], BOOTSTRAP)
    assert found is not None
    assert found.approved


def test_a_token_does_not_take_the_name_of_a_node() -> None:
    found = judge(KUBELET_CLIENT, "system:node:one", ["system:nodes"], BOOTSTRAP)
    assert found is not None
    assert not found.approved
    assert "node name one is taken" in found.reason


@pytest.mark.parametrize(
    ("common", "groups"),
    [
        ("system:admin", ["system:masters"]),
        ("system:node:three", ["system:nodes", "system:masters"]),
        ("system:node:three", []),
        ("three", ["system:nodes"]),
    ],
)
def test_a_token_makes_nothing_but_nodes(common: str, groups: list[str]) -> None:
    found = judge(KUBELET_CLIENT, common, groups, BOOTSTRAP)
    assert found is not None
    assert not found.approved


def test_a_nodes_own_renewal_is_left_to_kubernetes() -> None:
    caller = ("system:node:one", NODES)
    assert judge(KUBELET_CLIENT, "system:node:one", ["system:nodes"], caller) is None


def serving(
    names: tuple[str, ...], addresses: tuple[str, ...], common: str = "system:node:one"
) -> Decision:
    caller = ("system:node:one", NODES)
    found = judge(
        KUBELET_SERVING, common, ["system:nodes"], caller, names=names, addresses=addresses
    )
    assert found is not None
    return found


def test_a_kubelet_serves_under_its_own_name_and_address() -> None:
    assert serving(("one",), ("192.0.2.1",)).approved


@pytest.mark.parametrize(
    ("names", "addresses", "common"),
    [
        (("two",), ("192.0.2.1",), "system:node:one"),
        (("one", "kubernetes.default.svc"), ("192.0.2.1",), "system:node:one"),
        (("two",), ("192.0.2.2",), "system:node:two"),
        ((), (), "system:node:one"),
    ],
)
def test_a_kubelet_serves_under_no_other_name(
    names: tuple[str, ...], addresses: tuple[str, ...], common: str
) -> None:
    found = serving(names, addresses, common)
    assert not found.approved
    assert not found.waits


def test_an_address_that_the_node_does_not_have_yet_is_waited_for() -> None:
    found = serving(("one",), ("192.0.2.9",))
    assert not found.approved
    assert found.waits


def test_no_node_gets_the_address_of_a_service_or_of_another_node() -> None:
    stolen = node("one", "192.0.2.1")
    for address in ("192.0.2.2", "10.43.0.1"):
        stolen["status"]["addresses"].append({"type": "InternalIP", "address": address})
    CLUSTER[0], before = stolen, CLUSTER[0]
    try:
        assert "another node's" in serving(("one",), ("192.0.2.2",)).reason
        assert "services or pods" in serving(("one",), ("10.43.0.1",)).reason
    finally:
        CLUSTER[0] = before


@pytest.mark.parametrize("component", approval.NODE_COMPONENTS)
def test_a_node_gets_certificates_for_its_own_components_alone(component: str) -> None:
    caller = ("system:node:one", NODES)
    group = [f"k8e:{component}"]
    own = judge(CLIENT, f"k8e:{component}:one", group, caller)
    other = judge(CLIENT, f"k8e:{component}:two", group, caller)
    more = judge(CLIENT, f"k8e:{component}:one", [*group, "system:masters"], caller)
    assert own is not None
    assert own.approved
    for refused in (other, more):
        assert refused is not None
        assert not refused.approved


CURVE_KEY = bytes.fromhex("06072a8648ce3d0201")
NO_KEY = bytes.fromhex("06072a8648ce3d0209")
"""A kind of key that nobody knows: the API server takes such a request all the same."""


@pytest.mark.parametrize("signer", [KUBELET_CLIENT, KUBELET_SERVING, CLIENT])
def test_a_request_that_cannot_be_read_is_denied_and_stops_nothing(signer: str) -> None:
    caller = BOOTSTRAP if signer == KUBELET_CLIENT else ("system:node:one", NODES)
    unknown: dict[str, Any] = {"damage": (CURVE_KEY, NO_KEY)}
    odd: dict[str, Any] = {"other": (x509.UniformResourceIdentifier("spiffe://x"),)}
    for wrong in (unknown, odd):
        found = judge(signer, "system:node:three", ["system:nodes"], caller, **wrong)
        assert found is not None
        assert not found.approved
        assert not found.waits
        assert "cannot be read" in found.reason


def test_requests_of_others_are_not_ours_to_decide() -> None:
    assert judge(CLIENT, "someone", [], ("someone", ["system:authenticated"])) is None
    assert judge("example.org/own", "x", [], BOOTSTRAP) is None


def test_of_two_machines_that_join_under_one_name_only_the_first_gets_it() -> None:
    promises = Promises()
    assert promises.give("three", b"first")
    assert not promises.give("three", b"second")
    assert promises.give("three", b"first"), "a join that was interrupted goes on"
    assert promises.give("four", b"second")
