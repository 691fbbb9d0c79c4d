"""The cluster in which sandboxes run: its API, our rights in it, and what sandboxes share."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from pathlib import Path
from urllib.parse import quote

from k8e import errors
from k8e.kubernetes.api import (
    NOT_FOUND,
    Api,
    ApiError,
    Object,
    TokenFile,
    entries,
    read_kubeconfig,
    section,
)
from k8e.runtimes.kubernetes import objects
from k8e.runtimes.kubernetes.authority import LinkAuthority
from k8e.runtimes.kubernetes.identity import TokenVerifier
from k8e.runtimes.kubernetes.pods import Pods
from k8e.runtimes.kubernetes.records import Records
from k8e.runtimes.leftovers import Leftovers
from k8e.settings import Settings

IN_CLUSTER = "in-cluster"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_AT_ONCE = 8
_MOST_IDLE_TEMPLATES = 16
_RIGHTS = (
    (objects.EXTENSIONS, "sandboxclaims", "create delete get list"),
    (objects.EXTENSIONS, "sandboxtemplates", "create delete get list patch"),
    (objects.EXTENSIONS, "sandboxwarmpools", "create delete get list patch"),
    (objects.AGENTS, "sandboxes", "delete"),
    ("", "pods", "delete get list watch"),
    ("", "serviceaccounts", "create get patch"),
    ("networking.k8s.io", "networkpolicies", "create get patch"),
)
_OF_CLUSTER = (("node.k8s.io", "runtimeclasses", "get list"),)
_PATHS = ("/.well-known/openid-configuration", "/openid/v1/jwks")


def connect(kubeconfig: str) -> Api:
    """A caller of the API server: by a kubeconfig, or in a pod by its service account."""
    if kubeconfig == IN_CLUSTER:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise errors.InvalidRequest(
                "this is no pod, so K8E_KUBECONFIG cannot be in-cluster",
                hint="set K8E_KUBECONFIG to the path of a kubeconfig",
            )
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        context = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        return Api(server, context, token=TokenFile(_ACCOUNT / "token"), most_idle=_AT_ONCE)
    try:
        server, identity, token = read_kubeconfig(Path(kubeconfig))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise errors.InvalidRequest(
            f"the kubeconfig {kubeconfig} cannot be used: {error}",
            hint="K8E_KUBECONFIG names it; kubectl --kubeconfig should work with it",
        ) from None
    # The names of claims are chosen before, so a second POST of one conflicts and does no harm.
    return Api(server, identity, token=token, most_idle=_AT_ONCE, reuse_for_posts=True)


class Cluster:
    """What the runtimes of one gateway share of their cluster."""

    def __init__(self, settings: Settings, leftovers: Leftovers) -> None:
        self.settings = settings
        self.leftovers = leftovers
        self.namespace = settings.sandbox_namespace
        self.records = Records(settings.data_dir / "pods")
        self.verifier = TokenVerifier(self._keys)
        self._made: dict[str, None] = {}  # templates, the one that was asked for last at the end
        self._earlier: list[str] = []  # of the gateway before us, not used since
        self._is_founded = False
        self._making = asyncio.Lock()

    @functools.cached_property
    def api(self) -> Api:
        return connect(self.settings.kubeconfig)

    @functools.cached_property
    def authority(self) -> LinkAuthority:
        return LinkAuthority(self.settings.data_dir / "pods")

    @functools.cached_property
    def pods(self) -> Pods:
        return Pods(self.api, self.namespace, self.authority.fingerprint)

    async def _keys(self) -> tuple[str, Object]:
        """The name of the issuer of tokens, and its keys."""
        told, keys = await asyncio.gather(*map(self.api.get, _PATHS))
        return str(told.get("issuer") or ""), keys

    def path(self, plural: str, name: str = "", *, group: str = "extensions") -> str:
        """Where objects of the sandboxes' namespace are."""
        groups = {
            "extensions": f"/apis/{objects.EXTENSIONS_VERSION}",
            "agents": f"/apis/{objects.AGENTS}/v1beta1",
            "core": "/api/v1",
        }
        base = f"{groups[group]}/namespaces/{quote(self.namespace, safe='')}/{plural}"
        return f"{base}/{quote(name, safe='')}" if name else base

    # What is there before a sandbox.

    async def prepare(self, recipe: objects.Recipe) -> None:
        """Have the template and the pool of a recipe, and before them what keeps pods apart."""
        name = objects.name_of(recipe)
        if name not in self._made:
            async with self._making:
                if not self._is_founded:
                    await self._found()
                # The template first: a pool without one tells everybody so.
                await self.api.apply(objects.template(recipe))
                await self.api.apply(objects.pool(recipe))
                self._made[name] = None
                self._earlier = [item for item in self._earlier if item != name]
                await self._prune()
        self._made[name] = self._made.pop(name, None)

    async def _prune(self) -> None:
        """Delete templates that no sandbox is made of, but the last few: clients choose limits.

        A launch has written down which it needs before it looks whether that is there.
        """
        used = self.records.templates()
        idle = [name for name in (*self._earlier, *self._made) if name not in used]
        for name in idle[:-_MOST_IDLE_TEMPLATES]:
            if name in self.records.templates():
                continue  # somebody needs it by now
            self._made.pop(name, None)
            self._earlier = [item for item in self._earlier if item != name]
            for plural in ("sandboxwarmpools", "sandboxtemplates"):
                await self.delete(plural, name)

    async def delete(self, plural: str, name: str, *, group: str = "extensions") -> None:
        """Delete an object with what it owns; nothing happens where there is none."""
        path = self.path(plural, name, group=group)
        try:
            await self.api.call("DELETE", f"{path}?propagationPolicy=Background")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    async def _found(self) -> None:
        where = f"/api/v1/namespaces/{quote(self.namespace, safe='')}"
        if await self.api.find(where) is None:
            await self.api.apply(objects.new_namespace(self.namespace))
        for wanted in objects.foundation(self.namespace):
            await self.api.apply(wanted)
        selector = quote(objects.selector(self.authority.fingerprint), safe="")
        listed = await self.api.list(f"{self.path('sandboxtemplates')}?labelSelector={selector}")
        self._earlier = [str(item["metadata"]["name"]) for item in listed]
        self._is_founded = True

    def forget(self) -> None:
        """Make everything anew when it is needed next: somebody may have removed it."""
        self._made.clear()
        self._is_founded = False

    # What a probe asks.

    async def runtime_class(self, name: str) -> Object | None:
        return await self.api.find(f"/apis/node.k8s.io/v1/runtimeclasses/{quote(name, safe='')}")

    async def runtime_classes(self) -> list[str]:
        found = await self.api.list("/apis/node.k8s.io/v1/runtimeclasses")
        return sorted(item["metadata"]["name"] for item in found)

    async def serves_claims(self) -> bool:
        """Whether the cluster knows agent-sandbox's resources."""
        try:
            await self.api.get(f"/apis/{objects.EXTENSIONS_VERSION}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return False
        return True

    async def network(self) -> str:
        """The name of the network that enforces policies, if it is one that we know."""
        known = {"cilium.io": "Cilium", "crd.projectcalico.org": "Calico"}
        groups = entries(await self.api.get("/apis"), "groups")
        return next((known[item["name"]] for item in groups if item["name"] in known), "")

    async def missing_rights(self) -> list[str]:
        """What we would have to be allowed, and are not."""
        asked: list[tuple[str, Object]] = []
        for rights, namespace in ((_RIGHTS, self.namespace), (_OF_CLUSTER, "")):
            for group, resource, verbs in rights:
                for verb in verbs.split():
                    told = {"group": group, "resource": resource, "verb": verb}
                    told |= {"namespace": namespace} if namespace else {}
                    asked.append((f"{verb} {resource}", {"resourceAttributes": told}))
        for path in _PATHS:
            told = {"path": path, "verb": "get"}
            asked.append((f"get {path}", {"nonResourceAttributes": told}))
        gate = asyncio.Semaphore(_AT_ONCE)
        answers = await asyncio.gather(*(self._may(spec, gate) for _, spec in asked))
        return [what for (what, _), may in zip(asked, answers, strict=True) if not may]

    async def _may(self, spec: Object, gate: asyncio.Semaphore) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": spec,
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        async with gate:
            found = await self.api.call("POST", path, body)
        return section(found, "status").get("allowed") is True

    async def server_address(self) -> tuple[str, int]:
        """Where pods would find the API server: what no sandbox may reach."""
        service = await self.api.get("/api/v1/namespaces/default/services/kubernetes")
        return str(service["spec"]["clusterIP"]), int(service["spec"]["ports"][0]["port"])
