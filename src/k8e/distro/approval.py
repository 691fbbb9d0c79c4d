"""Which certificate requests of nodes are approved, and why others are not.

Kubernetes' own approver would give a bootstrap token the name of any node. Renewals of a node's own
client certificate are left to it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from k8e import errors
from k8e.distro import tokens
from k8e.distro.configuration import Configuration
from k8e.kubernetes.api import Api, Object, entries

log = logging.getLogger(__name__)

CLIENT = "kubernetes.io/kube-apiserver-client"
KUBELET_CLIENT = "kubernetes.io/kube-apiserver-client-kubelet"
KUBELET_SERVING = "kubernetes.io/kubelet-serving"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
NODE_COMPONENTS = ("cilium", "kube-proxy")
"""Components of a node that have certificates of their own, with fewer rights than the node's."""
_PROMISE_SECONDS = 300.0
_NODE = "system:node:"
_NODES = "system:nodes"


@dataclass(frozen=True)
class Decision:
    """What becomes of a request: approved, denied, or waiting for something to change."""

    approved: bool
    reason: str
    waits: bool = False


def component_user(component: str, node: str) -> str:
    return f"k8e:{component}:{node}"


def component_group(component: str) -> str:
    return f"k8e:{component}"


def judge(request: Object, nodes: list[Object], config: Configuration) -> Decision | None:
    """The decision on a request; None if it is not ours to decide."""
    spec = request["spec"]
    signer, user = str(spec["signerName"]), str(spec.get("username", ""))
    groups = set(spec.get("groups") or [])
    is_node = user.startswith(_NODE) and _NODES in groups
    joins = signer == KUBELET_CLIENT and tokens.GROUP in groups
    if not joins and not (is_node and signer in (KUBELET_SERVING, CLIENT)):
        return None
    try:
        asked = _read(str(spec["request"]))
    except (*_MALFORMED, *errors.UNREADABLE) as error:
        return Decision(False, f"the request cannot be read: {error}")
    if joins:
        return _join(asked, nodes)
    if signer == KUBELET_SERVING:
        return _serving(asked, user, nodes, config)
    return _component(user.removeprefix(_NODE), asked)


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    common: str
    organizations: tuple[str, ...]
    names: frozenset[str]
    addresses: frozenset[str]
    key: bytes


_MALFORMED = (
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What cryptography raises, beside ValueError, for requests that the API server takes."""


def _read(text: str) -> Asked:
    """All of a request at once: whoever asks may send what cannot be read in any of its parts."""
    parsed = x509.load_pem_x509_csr(base64.b64decode(text))
    common, organizations = _subject(parsed)
    names, addresses = _alternatives(parsed)
    key = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return Asked(common, organizations, names, addresses, key)


def _subject(parsed: x509.CertificateSigningRequest) -> tuple[str, tuple[str, ...]]:
    names = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    groups = parsed.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if len(names) != 1:
        raise ValueError("it has not one common name")
    return str(names[0].value), tuple(str(group.value) for group in groups)


def _join(asked: Asked, nodes: list[Object]) -> Decision:
    if asked.organizations != (_NODES,) or not asked.common.startswith(_NODE):
        return Decision(False, "a joining machine can become a node and nothing else")
    name = asked.common.removeprefix(_NODE)
    if any(node["metadata"]["name"] == name for node in nodes):
        return Decision(
            False,
            f"the node name {name} is taken; choose another with --node-name, or, if that node is "
            f"gone for good: kubectl delete node {name}",
        )
    return Decision(True, "a new node, by a token")


def _component(node: str, asked: Asked) -> Decision:
    for component in NODE_COMPONENTS:
        own = (component_user(component, node), (component_group(component),))
        if (asked.common, asked.organizations) == own:
            return Decision(True, f"{component} of a node")
    return Decision(False, "a node gets certificates for its own components alone")


def _serving(asked: Asked, user: str, nodes: list[Object], config: Configuration) -> Decision:
    """A kubelet's certificate as a server: for its own name and addresses alone."""
    if (asked.common, asked.organizations) != (user, (_NODES,)):
        return Decision(False, "it is not made out to the node that asks")
    own = user.removeprefix(_NODE)
    found = [node for node in nodes if node["metadata"]["name"] == own]
    if not found:
        return Decision(False, "its node is not there yet", waits=True)
    names, addresses = asked.names, asked.addresses
    if any(name != own for name in names):
        return Decision(False, f"it names {', '.join(sorted(names))}, not only its node")
    if addresses - _addresses(found):
        return Decision(False, "its node does not have these addresses yet", waits=True)
    others = _addresses(node for node in nodes if node["metadata"]["name"] != own)
    internal = [
        ipaddress.ip_network(config.service_cidr),
        ipaddress.ip_network(config.cluster_cidr),
    ]
    for address in addresses:
        if address in others:
            return Decision(False, f"the address {address} is another node's")
        if any(ipaddress.ip_address(address) in network for network in internal):
            return Decision(False, f"the address {address} is one of services or pods")
    if not addresses and not names:
        return Decision(False, "it names neither a node nor an address")
    return Decision(True, "a node's own name and addresses")


def _alternatives(
    parsed: x509.CertificateSigningRequest,
) -> tuple[frozenset[str], frozenset[str]]:
    try:
        found = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset(), frozenset()
    names = frozenset(found.get_values_for_type(x509.DNSName))
    addresses = frozenset(str(item) for item in found.get_values_for_type(x509.IPAddress))
    if len(names) + len(addresses) != len(list(found)):
        raise ValueError("it has names that are neither hosts nor addresses")
    return names, addresses


def _addresses(nodes: Iterable[Object]) -> set[str]:
    return {
        str(address["address"])
        for node in nodes
        for address in entries(node, "status", "addresses")
        if address["type"] in ("InternalIP", "ExternalIP")
    }


class Promises:
    """Names of nodes that were given to a machine and are not there yet."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[float, bytes]] = {}

    def give(self, node: str, key: bytes) -> bool:
        """Promise a name to whoever has a key; False if somebody else has been promised it."""
        now = time.monotonic()
        self._given = {name: given for name, given in self._given.items() if given[0] > now}
        _, owner = self._given.setdefault(node, (now + _PROMISE_SECONDS, key))
        return owner == key


class Approver:
    """Follows requests and nodes, and decides."""

    def __init__(self, api: Api, config: Configuration) -> None:
        self._api = api
        self._config = config
        self._nodes: dict[str, Object] = {}
        self._waiting: dict[str, Object] = {}
        self._promises = Promises()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            known = asyncio.Event()
            tasks.create_task(self._follow_nodes(known))
            tasks.create_task(self._follow_requests(known))

    async def _follow_nodes(self, known: asyncio.Event) -> None:
        async with contextlib.aclosing(self._api.follow("/api/v1/nodes")) as changes:
            async for change, node in changes:
                if change == "SYNCED":
                    known.set()
                    continue
                name = node["metadata"]["name"]
                if change == "DELETED":
                    self._nodes.pop(name, None)
                    continue
                # Much of a node, such as its list of images, is of no interest and long.
                addresses = node.get("status", {}).get("addresses")
                self._nodes[name] = {"metadata": {"name": name}, "status": {"addresses": addresses}}
                for request in list(self._waiting.values()):
                    await self._decide(request)

    async def _follow_requests(self, known: asyncio.Event) -> None:
        await known.wait()
        async with contextlib.aclosing(self._api.follow(REQUESTS)) as changes:
            async for change, request in changes:
                if change in ("ADDED", "MODIFIED"):
                    if not entries(request, "status", "conditions"):
                        await self._decide(request)
                elif change == "DELETED":
                    self._waiting.pop(request["metadata"]["name"], None)

    async def _decide(self, request: Object) -> None:
        name = request["metadata"]["name"]
        try:
            decision = judge(request, await self._known_nodes(request), self._config)
            if decision is None:
                return
            if decision.waits:
                self._waiting[name] = request
                return
            self._waiting.pop(name, None)
            decision = self._promise(request, decision)
            log.info(
                "certificate request %s %s: %s",
                name,
                "approved" if decision.approved else "denied",
                decision.reason,
            )
            await self._api.call("PUT", f"{REQUESTS}/{name}/approval", _answered(request, decision))
        except errors.UNREADABLE as error:  # also the API's; one request stops no other
            log.warning("certificate request %s: %s", name, error)

    def _promise(self, request: Object, decision: Decision) -> Decision:
        """Give a new node's name to one machine, though two ask before the first is there."""
        if not decision.approved or request["spec"]["signerName"] != KUBELET_CLIENT:
            return decision
        asked = _read(request["spec"]["request"])
        node = asked.common.removeprefix(_NODE)
        if self._promises.give(node, asked.key):
            return decision
        return Decision(
            False,
            f"another machine is joining as {node}; choose another name with --node-name, or try "
            f"again in {_PROMISE_SECONDS / 60:g} minutes",
        )

    async def _known_nodes(self, request: Object) -> list[Object]:
        """Who joins is judged by what is there at this moment, not by what we have heard of."""
        if request["spec"]["signerName"] == KUBELET_CLIENT:
            return await self._api.list("/api/v1/nodes")
        return list(self._nodes.values())


def _answered(request: Object, decision: Decision) -> Object:
    condition: dict[str, Any] = {
        "type": "Approved" if decision.approved else "Denied",
        "status": "True",
        "reason": "K8e",
        "message": decision.reason,
    }
    status = {**request.get("status", {}), "conditions": [condition]}
    return {**request, "status": status}
