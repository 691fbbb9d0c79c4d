"""How a machine becomes a node: by a token that pins the cluster, and certificates of its own.

The token is sent only after the server has shown a certificate of the authority that it pins.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import email.utils
import hashlib
import json
import logging
import os
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from k8e import errors
from k8e.distro import approval, certificates, cluster_objects, kubeconfigs, tokens
from k8e.distro.certificates import Authority, Subject
from k8e.distro.configuration import Configuration
from k8e.distro.layout import Layout, write_private
from k8e.distro.node import Node
from k8e.kubernetes.api import Api, ApiError, Object, by_certificate, entries, section

log = logging.getLogger(__name__)

DIAL_SECONDS = 10.0
SIGN_SECONDS = 60.0
MOST_SKEW = 60.0
"""Seconds by which clocks may differ: certificates and tokens are judged by them."""
_WHOAMI = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_CURRENT = "kubelet-client-current.pem"
_JOINING = "joining.key"
"""The key of a node that joins, kept until it has: an interrupted join goes on where it was."""


async def join(config: Configuration) -> Node:
    """Everything that this node needs to know and to have; what it has already is kept."""
    layout = config.layout
    if (layout.pki / _CURRENT).exists() and layout.cluster.exists():
        check_same_cluster(config)
        _check_not_expired(layout)
        _check_same_name(config)
        write_kubelet_config(layout, config.server)  # the server may have moved
        return _node(config, json.loads(layout.cluster.read_bytes()))
    token = tokens.parse(config.token)
    authority = await asyncio.to_thread(pinned_authority, config.server, token)
    write_private(layout.pki / "server-ca.crt", authority.public_bytes(serialization.Encoding.PEM))
    await asyncio.to_thread(check_clock, config.server)
    context = ssl.create_default_context(cafile=str(layout.pki / "server-ca.crt"))
    await asyncio.to_thread(check_server, config.server, context)
    api = Api(config.server, context, token=token.bare)
    await _check_token(api, token)
    told: dict[str, Any] = json.loads(
        (await api.get(cluster_objects.CLUSTER_PATH))["data"]["cluster.json"]
    )
    write_private(layout.pki / "client-ca.crt", told["client_ca"])
    await _become_node(api, config)
    write_private(layout.cluster, json.dumps(told))
    (layout.pki / _JOINING).unlink()  # last: whoever asks again for the name has the same key
    api.close()
    return _node(config, told)


def check_same_cluster(config: Configuration) -> None:
    """Refuse a token of another cluster than the one that this machine has joined."""
    if not config.token:
        return
    token = tokens.parse(config.token)
    own = certificates.fingerprint(certificates.read(config.layout.pki / "server-ca.crt"))
    if token.authority != own:
        raise errors.Conflict(
            f"this machine has joined the cluster with the CA {own[:12]}…, and the token is for "
            f"{token.authority[:12]}…",
            hint="k8e agent uninstall first, then join the other cluster",
        )


def _check_not_expired(layout: Layout) -> None:
    """A node that was away for longer than its certificate lives cannot come back by itself."""
    end = certificates.expires(layout.pki / _CURRENT)
    if end <= datetime.datetime.now(datetime.UTC):
        raise errors.Denied(
            f"the certificate of this node has expired ({end:%Y-%m-%d})",
            hint="on the server: kubectl delete node; here: k8e agent uninstall, then join again",
        )


def _check_same_name(config: Configuration) -> None:
    """A machine that is called otherwise than when it joined has no right to its new name."""
    current = certificates.read(config.layout.pki / _CURRENT)
    if not certificates.is_for(current, _identity(config.node_name)):
        names = current.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        own = str(names[0].value).removeprefix("system:node:") if names else "another node"
        raise errors.Conflict(
            f"this machine has joined as {own}, and is called {config.node_name} now",
            hint=f"--node-name {own} keeps it that node; to join under the new name: k8e agent "
            f"uninstall here, and kubectl delete node {own} on the server",
        )


def _identity(node: str) -> Subject:
    return Subject(f"system:node:{node}", ("system:nodes",))


def _node(config: Configuration, told: dict[str, Any]) -> Node:
    return Node(
        layout=config.layout,
        name=config.node_name,
        address=config.node_ip,
        server=config.server.rstrip("/"),
        cni=told["cni"],
        cluster_cidr=told["cluster_cidr"],
        service_cidr=told["service_cidr"],
        cluster_dns=told["cluster_dns"],
        cluster_domain=told["cluster_domain"],
        labels=config.node_label,
        taints=config.node_taint,
        allow_swap=config.allow_swap,
    )


# The server.


def pinned_authority(server: str, token: tokens.Token) -> x509.Certificate:
    """The certificate of the authority that the token pins, as the server shows it."""
    shown = _shown_chain(server)
    marks = [hashlib.sha256(data).hexdigest() for data in shown]
    for data, mark in zip(shown, marks, strict=True):
        if mark == token.authority:
            return x509.load_der_x509_certificate(data)  # only what is pinned is looked into
    told = ", ".join(f"{mark[:12]}…" for mark in marks[1:]) or "none"
    raise errors.Denied(
        f"{server} is not the cluster of this token: it shows the CA {told}, the token pins "
        f"{token.authority[:12]}…",
        hint="check the address; a cluster that was made anew has new tokens. No token was sent",
    )


def _shown_chain(server: str) -> list[bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only looked at
    try:
        plain = socket.create_connection(_address(server), DIAL_SECONDS)
        with plain, context.wrap_socket(plain) as secure:
            return _chain(secure)
    except OSError as error:
        raise errors.InvalidRequest(
            f"cannot reach the server {server}: {error}",
            hint="check the address, that the server runs, and that no firewall is between",
        ) from None


def _chain(secure: ssl.SSLSocket) -> list[bytes]:
    public: Any = getattr(secure, "get_unverified_chain", None)  # Python 3.13
    if public is not None:
        return list(public())
    inner: Any = getattr(secure, "_sslobj")  # noqa: B009 - older ones have it there alone
    return [
        ssl.PEM_cert_to_DER_cert(found.public_bytes()) for found in inner.get_unverified_chain()
    ]


def _address(server: str) -> tuple[str, int]:
    parts = urlsplit(server)
    return parts.hostname or "", parts.port or 6443


def check_server(server: str, context: ssl.SSLContext) -> None:
    """Whether the server proves who it is; before it has, it gets no token."""
    host, port = _address(server)
    try:
        with socket.create_connection((host, port), DIAL_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OTHER_NAME:
            raise errors.Denied(
                f"the server's certificate is not for {host}: {error.verify_message}",
                hint=f"name it as it names itself; or start it with k8e server --tls-san {host}. "
                "No token was sent",
            ) from None
        raise errors.Denied(
            f"{server} cannot prove that it is of this token's cluster: {error.verify_message}",
            hint="somebody may be between; or its certificate has expired: start it again. "
            "No token was sent",
        ) from None
    except OSError as error:
        raise errors.InvalidRequest(
            f"the server {server} broke the connection off: {error}",
            hint="see k8e status there, then start this again",
        ) from None


_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def check_clock(server: str) -> None:
    """Compare clocks by the date of an answer, before certificates seem not yet valid."""
    lenient = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    lenient.check_hostname = False
    lenient.verify_mode = ssl.CERT_NONE  # its clock is what is asked for; nothing is told
    host, port = _address(server)
    request = f"GET /version HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        plain = socket.create_connection((host, port), DIAL_SECONDS)
        with plain, lenient.wrap_socket(plain) as secure:
            secure.sendall(request.encode())
            head = secure.recv(1 << 14).decode("latin-1")
    except OSError:
        return  # whoever comes next tells it better
    for line in head.splitlines():
        name, _, value = line.partition(":")
        if name.lower() == "date":
            _compare_clocks(value.strip())


def _compare_clocks(date: str) -> None:
    try:
        there = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return
    skew = time.time() - there
    if abs(skew) > MOST_SKEW:
        way = "ahead of" if skew > 0 else "behind"
        raise errors.InvalidRequest(
            f"the clock of this machine is {abs(skew):.0f} s {way} the server's",
            hint="set it, such as by NTP; certificates and tokens are judged by it",
        )


async def _check_token(api: Api, token: tokens.Token) -> None:
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        await api.call("POST", _WHOAMI, review)
    except ApiError as error:
        if error.status != 401:
            raise
        raise errors.Denied(
            f"the cluster does not know the token {token.id}.…: it is wrong, deleted or expired",
            hint="make one on the server: k8e token create",
        ) from None


# Certificates.


async def _become_node(api: Api, config: Configuration) -> None:
    """The kubelet's first certificate; later ones it gets by itself."""
    layout = config.layout
    key = certificates.own_key(layout.pki / _JOINING)
    request = certificates.request(key, _identity(config.node_name))
    signed = await sign(api, request, approval.KUBELET_CLIENT, f"join-{config.node_name}")
    store_kubelet_certificate(layout, signed + certificates.private_pem(key))
    write_kubelet_config(layout, config.server)


def store_kubelet_certificate(layout: Layout, pair: bytes) -> None:
    """Where the kubelet finds its certificate, and puts the next one."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H-%M-%S")
    path = layout.pki / f"kubelet-client-{stamp}.pem"
    write_private(path, pair)
    scratch = layout.pki / ".current"
    scratch.unlink(missing_ok=True)
    os.symlink(path, scratch)  # noqa: PTH211 - the kubelet expects a link
    scratch.replace(layout.pki / _CURRENT)


def has_kubelet_certificate(layout: Layout, signer: Authority, subject: Subject) -> bool:
    """Whether the kubelet's current certificate is this cluster's, this node's, and still valid."""
    current = layout.pki / _CURRENT
    if not current.exists():
        return False
    try:
        found = certificates.read(current)
        found.verify_directly_issued_by(signer.certificate)
    except (errors.StateUnusable, InvalidSignature, ValueError, TypeError):
        return False
    now = datetime.datetime.now(datetime.UTC)
    return certificates.is_for(found, subject) and now < found.not_valid_after_utc


def write_kubelet_config(layout: Layout, server: str) -> None:
    current = layout.pki / _CURRENT
    found = kubeconfigs.by_files(
        server, authority=layout.pki / "server-ca.crt", certificate=current, key=current
    )
    kubeconfigs.write(layout.agent / "kubelet.kubeconfig", found)


async def sign(api: Api, request: bytes, signer: str, name: str) -> bytes:
    """Have a request signed by the cluster; the certificate as PEM."""
    usages = ["digital signature", "client auth"]
    digest = hashlib.sha256(request).hexdigest()[:12]
    wanted: Object = {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": f"k8e-{name}-{digest}"},
        "spec": {
            "request": base64.b64encode(request).decode(),
            "signerName": signer,
            "usages": usages,
        },
    }
    made = await api.call("POST", approval.REQUESTS, wanted)
    selector = f"metadata.name={made['metadata']['name']}"
    try:
        signed = await api.wait_until(
            approval.REQUESTS, _is_answered, seconds=SIGN_SECONDS, fieldSelector=selector
        )
    except TimeoutError:
        raise errors.TimedOut(
            f"the cluster has not signed this node's certificate within {SIGN_SECONDS:g} s",
            hint="see k8e status on the server; then start this again, it goes on from here",
        ) from None
    for condition in entries(signed, "status", "conditions"):
        if condition["type"] in ("Denied", "Failed"):
            raise errors.Conflict(
                f"the cluster refuses this node: {condition.get('message', 'no reason given')}",
                hint="after that, start k8e agent again",
            )
    return base64.b64decode(signed["status"]["certificate"])


def _is_answered(request: Object) -> bool:
    conditions = entries(request, "status", "conditions")
    refused = any(item["type"] in ("Denied", "Failed") for item in conditions)
    return refused or bool(section(request, "status").get("certificate"))


def node_api(node: Node) -> Api:
    """The node's own access, with no more rights than a node has."""
    current = node.layout.pki / _CURRENT
    return by_certificate(node.server, authority=node.authority, certificate=current, key=current)


def has_component_certificate(node: Node, component: str) -> bool:
    """Whether a component has a certificate that serves, were it the last hour."""
    crt = (node.layout.pki / component).with_suffix(".crt")
    return crt.exists() and certificates.expires(crt) > datetime.datetime.now(datetime.UTC)


async def component_certificate(node: Node, component: str) -> datetime.datetime:
    """The certificate and kubeconfig of a component of this node; when they are to be renewed."""
    path = node.layout.pki / component
    crt, key_file = path.with_suffix(".crt"), path.with_suffix(".key")
    now = datetime.datetime.now(datetime.UTC)
    if not crt.exists() or certificates.renewal_time(certificates.read(crt)) <= now:
        key = certificates.own_key(key_file)
        user = approval.component_user(component, node.name)
        subject = Subject(user, (approval.component_group(component),))
        api = node_api(node)
        name = f"{component}-{node.name}-{int(now.timestamp())}"
        signed = await sign(api, certificates.request(key, subject), approval.CLIENT, name)
        api.close()
        write_private(crt, signed)
    write_component_config(node, component)
    return certificates.renewal_time(certificates.read(crt))


def write_component_config(node: Node, component: str) -> None:
    path = node.layout.pki / component
    found = kubeconfigs.by_files(
        node.server,
        authority=node.authority,
        certificate=path.with_suffix(".crt"),
        key=path.with_suffix(".key"),
    )
    kubeconfigs.write(node.kubeconfig_of(component), found)
