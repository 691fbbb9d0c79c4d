"""What runs of the cluster on this machine, what of it is not as it should be, and why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

from k8e import errors
from k8e.distro import basic_network, launch, supervisor
from k8e.distro.layout import Layout
from k8e.distro.node_services import is_ready
from k8e.kubernetes.api import Api, Object, by_certificate, by_kubeconfig, entries, section

_SECONDS = 10.0
_ENDPOINTS = "/apis/cilium.io/v2/ciliumendpoints"
_MOST_ALARMS = 50
_MANY_RESTARTS = 3
_RECENT = 600.0


def read(layout: Layout) -> dict[str, Any]:
    """The cluster as this machine sees it; ``alarms`` is empty if all is well."""
    is_server = (layout.tls / "server-ca.crt").exists()
    pid = launch.running(layout)
    records = supervisor.read_records(layout)
    alarms = [] if pid else [f"k8e {'server' if is_server else 'agent'} does not run"]
    alarms += [alarm for record in records if (alarm := _component_alarm(record))]
    found: dict[str, Any] = {
        "role": "server" if is_server else "agent",
        "pid": pid,
        "components": [_component(record) for record in records],
    }
    try:
        found |= asyncio.run(_ask(layout, alarms, is_server=is_server))
    except (errors.K8eError, TimeoutError, OSError) as error:
        alarms.append(str(error) or f"the API server did not answer in {_SECONDS:g} s")
    return found | {"alarms": alarms[:_MOST_ALARMS]}


def _component(record: supervisor.Record) -> dict[str, Any]:
    running = record.is_running()
    return {
        "name": record.name,
        "running": running,
        "ready": running and record.ready,
        "pid": record.pid if running else 0,
        "uptime_s": int(time.time() - record.since) if running else 0,
        "restarts": record.restarts,
        "last_end": record.last_end,
    }


def _component_alarm(record: supervisor.Record) -> str:
    if not record.is_running():
        return f"{record.name} does not run: {record.last_end or 'it has not started yet'}"
    if record.restarts >= _MANY_RESTARTS and time.time() - record.since < _RECENT:
        return f"{record.name} has started again {record.restarts} times: {record.last_end}"
    return ""


async def _ask(layout: Layout, alarms: list[str], *, is_server: bool) -> dict[str, Any]:
    """What the API tells: a server sees all nodes and endpoints, an agent its own node."""
    async with asyncio.timeout(_SECONDS):
        if is_server:
            return await _ask_as_server(layout, alarms)
        told = json.loads(layout.cluster.read_bytes())
        node = await _own_node(layout)
        return {"cni": told["cni"], "nodes": [_node(node, alarms)]}


async def _ask_as_server(layout: Layout, alarms: list[str]) -> dict[str, Any]:
    api = by_kubeconfig(layout.credentials / "supervisor.kubeconfig")
    with contextlib.closing(api):
        nodes = [_node(item, alarms) for item in await api.list("/api/v1/nodes")]
        told = json.loads((await api.get(_CLUSTER))["data"]["cluster.json"])
        if told["cni"] == "cilium":
            await _look_at_endpoints(api, alarms)
    found: dict[str, Any] = {"cni": told["cni"], "nodes": nodes}
    if told["cni"] == "basic":
        found["warning"] = basic_network.WARNING
    return found


_CLUSTER = "/api/v1/namespaces/kube-system/configmaps/k8e-cluster"


async def _own_node(layout: Layout) -> Object:
    import yaml

    config: Any = yaml.safe_load((layout.agent / "kubelet.kubeconfig").read_bytes())
    current = layout.pki / "kubelet-client-current.pem"
    server = config["clusters"][0]["cluster"]["server"]
    api = by_certificate(
        server, authority=layout.pki / "server-ca.crt", certificate=current, key=current
    )
    with contextlib.closing(api):
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        told = await api.call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
        name = str(told["status"]["userInfo"]["username"]).removeprefix("system:node:")
        return await api.get(f"/api/v1/nodes/{name}")


def _node(item: Object, alarms: list[str]) -> dict[str, Any]:
    name = str(item["metadata"]["name"])
    conditions = entries(item, "status", "conditions")
    bad = [
        f"{found['type']}: {found.get('message', '')}"
        for found in conditions
        if found["status"] != ("True" if found["type"] == "Ready" else "False")
    ]
    if bad or not is_ready(item):
        alarms.append(f"node {name}: {'; '.join(bad) or 'it has not reported yet'}")
    return {
        "name": name,
        "ready": is_ready(item),
        "version": item["status"]["nodeInfo"]["kubeletVersion"],
    }


async def _look_at_endpoints(api: Api, alarms: list[str]) -> None:
    """An endpoint that does not get ready may have an old policy, or none."""
    for item in await api.list(_ENDPOINTS):
        metadata, state = item["metadata"], section(item, "status").get("state") or "unknown"
        if state != "ready":
            node = section(item, "status", "networking").get("node", "an unknown node")
            alarms.append(
                f"the network of pod {metadata['namespace']}/{metadata['name']} ({node}) is "
                f"{state!r}, not ready: its policies may not be in force"
            )
