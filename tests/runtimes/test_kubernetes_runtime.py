"""Sandboxes in pods through the life of a gateway: launches that are given up, and adoption."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest

from k8e import errors, link, settings
from k8e.model import Limits, SandboxSpec
from k8e.runtimes.host import Host
from k8e.runtimes.kubernetes import objects, pods
from k8e.runtimes.kubernetes.identity import PodIdentity
from k8e.runtimes.kubernetes.link import Dialler
from k8e.runtimes.kubernetes.records import PodRecord
from k8e.runtimes.kubernetes.runtime import Kubernetes
from k8e.runtimes.registry import Runtimes
from tests.runtimes.cluster_api import ClusterApi, cluster_api
from tests.runtimes.pods import Issuer, pod_process

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="it makes namespaces"),
]
SECONDS = 20.0
NAME = "sb-one"
CLAIM = "uid-of-the-claim"


class Gateway:
    """A gateway's runtime of pods, and the cluster that it has."""

    def __init__(self, api: ClusterApi, runtime: Kubernetes, issuer: Issuer) -> None:
        self.api, self.runtime, self.issuer = api, runtime, issuer


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[Gateway]:
    issuer = Issuer()
    for name in ("d", "r", "api"):
        (tmp_path / name).mkdir()
    async with cluster_api(tmp_path / "api", issuer) as (api, kubeconfig):
        environ = {
            "K8E_DATA_DIR": str(tmp_path / "d"),
            "K8E_RUN_DIR": str(tmp_path / "r"),
            "K8E_KUBECONFIG": str(kubeconfig),
            "K8E_SANDBOX_IMAGE": "registry.example/python:3",
        }
        host = Host(settings.load(environ))
        runtime = Runtimes(host).all["gvisor"]
        assert isinstance(runtime, Kubernetes)
        try:
            yield Gateway(api, runtime, issuer)
        finally:
            await runtime.cluster.pods.stop()
            runtime.cluster.api.close()
            host.close()


async def test_one_that_is_adopted_twice_has_one_link_that_nobody_takes_away(
    gateway: Gateway, tmp_path: Path
) -> None:
    cluster, namespace = gateway.runtime.cluster, gateway.runtime.cluster.namespace
    key = secrets.token_bytes(link.KEY_SIZE)
    cluster.records.save(
        PodRecord(NAME, "gvisor", Limits(), key.hex(), "k8e-1", CLAIM, NAME, "uid-of-the-pod")
    )
    labels = {objects.AUTHORITY: cluster.authority.fingerprint, objects.CLAIM_UID: CLAIM}
    with pod_process(tmp_path / "pod", cluster.authority.pem) as pod:
        identity = PodIdentity(namespace, objects.ACCOUNT, NAME, "uid-of-the-pod")
        pod.show(gateway.issuer.token(identity))
        gateway.api.put_pod(
            {
                "metadata": {
                    "namespace": namespace,
                    "name": NAME,
                    "uid": identity.uid,
                    "labels": labels,
                },
                "status": {
                    "phase": "Running",
                    "podIP": pod.address,
                    "containerStatuses": [{"name": "sandbox", "state": {"running": {}}}],
                },
            }
        )
        pod.start()
        await give_key(pod.address, key, gateway.runtime, identity)
        (first,) = await gateway.runtime.adopt()
        await first.connect()
        (second,) = await gateway.runtime.adopt()
        live = await second.connect()
        with pytest.raises(errors.GuestFailed, match="adopted by another"):
            await first.connect()
        assert first.link is None
        await link.request(live, {"op": "ping"})
        assert await second.connect() is live
        await second.kill()
    assert gateway.runtime.remains() == set()


async def give_key(address: str, key: bytes, runtime: Kubernetes, pod: PodIdentity) -> None:
    """Be the gateway that launched the sandbox, and is gone now."""
    cluster = runtime.cluster
    dialler = Dialler(
        address,
        context=cluster.authority.context,
        verify=partial(cluster.verifier.verify, pod=pod),
        key=key,
        is_taken=False,
    )
    dialler.start()
    await dialler.ready(SECONDS)
    dialler.close(errors.SandboxDied("its gateway ended"))


async def test_a_launch_that_is_given_up_while_its_claim_is_made_leaves_no_claim(
    gateway: Gateway,
) -> None:
    gateway.api.lets.clear()
    spec = SandboxSpec(sandbox_id=NAME, limits=Limits(), runtime="gvisor")
    launch = asyncio.create_task(gateway.runtime.launch(spec))
    await asyncio.wait_for(gateway.api.asked.wait(), SECONDS)
    launch.cancel()
    done, _ = await asyncio.wait([launch], timeout=0.3)
    assert not done, "whoever deletes a claim before it is made deletes nothing"
    gateway.api.lets.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(launch, SECONDS)
    claims = [path for path in gateway.api.objects if "/sandboxclaims/" in path]
    assert (claims, gateway.runtime.remains()) == ([], set())


async def test_an_answer_that_nobody_understands_does_not_end_the_following_of_pods(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "AGAIN_SECONDS", 0.01)
    cluster = gateway.runtime.cluster
    one = {
        "metadata": {
            "namespace": cluster.namespace,
            "name": NAME,
            "uid": "u",
            "labels": {objects.CLAIM_UID: CLAIM},
        },
        "status": {"phase": "Running"},
    }
    gateway.api.put_pod(one)
    await cluster.pods.synced(SECONDS)
    gone = asyncio.Event()

    cluster.pods.watch(CLAIM, lambda found: gone.set() if found is None else None)
    gateway.api.objects.clear()  # while nobody follows
    await gateway.api.say_to_all("ADDED", {"kind": "Pod", "is": "no pod"})
    await asyncio.wait_for(gone.wait(), SECONDS)
    assert cluster.pods.get(CLAIM) is None
