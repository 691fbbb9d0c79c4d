"""Templates over gRPC. A method here has the name of its RPC."""

from __future__ import annotations

from typing import Any

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.rpc_errors import as_text
from k8e.gateway.templating import TemplateCalls
from k8e.model import Principal

_LIMITS = ("cpus", "memory", "pids", "disk", "inodes", "open_files", "output")
_NOTHING = "none"  # the word for an empty list, which gRPC cannot tell from an absent one


class TemplateRpcs:
    """The RPCs about templates."""

    def __init__(self, calls: TemplateCalls) -> None:
        self._templates = calls

    async def ListTemplates(
        self, principal: Principal, request: pb.ListTemplatesRequest
    ) -> pb.ListTemplatesResponse:
        told = await self._templates.call_list_templates(principal, {})
        return pb.ListTemplatesResponse(templates=map(_template, told["templates"]))

    async def GetTemplate(
        self, principal: Principal, request: pb.GetTemplateRequest
    ) -> pb.Template:
        call = {"name": request.name}
        return _template(await self._templates.call_get_template(principal, call))

    async def ApplyTemplate(
        self, principal: Principal, request: pb.ApplyTemplateRequest
    ) -> pb.Template:
        call = {"template": _recipe(request.template)}
        return _template(await self._templates.call_apply_template(principal, call))

    async def DeleteTemplate(
        self, principal: Principal, request: pb.DeleteTemplateRequest
    ) -> pb.DeleteTemplateResponse:
        await self._templates.call_delete_template(principal, {"name": request.name})
        return pb.DeleteTemplateResponse(ok=True)


def _recipe(message: pb.Template) -> dict[str, Any]:
    """A recipe as files have it; what is empty is not said."""
    limits = {key: getattr(message.limits, key) for key in _LIMITS}
    found: dict[str, Any] = {
        "name": message.name,
        "description": message.description,
        "runtime": message.runtime_class,
        "rootfs": message.rootfs,
        "limits": {key: value for key, value in limits.items() if value},
        "env": dict(message.env),
        "labels": dict(message.labels),
        "allowed_hosts": list(message.allowed_hosts),
        "lifetime": message.lifetime,
        "idle_timeout": message.idle_timeout,
    }
    found = {key: value for key, value in found.items() if value}
    if message.HasField("warm"):
        found["warm"] = {item.language: list(item.modules) for item in message.warm.interpreters}
    if message.HasField("pool_min"):
        found.setdefault("pool", {})["min"] = message.pool_min
    if message.HasField("pool_max"):
        found.setdefault("pool", {})["max"] = message.pool_max
    return found


def _template(told: dict[str, Any]) -> pb.Template:
    warm = [
        pb.WarmInterpreter(language=language, modules=modules)
        for language, modules in told.get("warm", {}).items()
    ]
    pool = told.get("pool", {})
    hosts = told.get("allowed_hosts")
    return pb.Template(
        name=as_text(told["name"]),
        description=told.get("description", ""),
        runtime_class=told.get("runtime", ""),
        rootfs=told.get("rootfs", ""),
        limits=pb.TemplateLimits(**told.get("limits", {})),
        env=told.get("env"),
        labels=told.get("labels"),
        allowed_hosts=[_NOTHING] if hosts == [] else hosts,
        lifetime=told.get("lifetime", 0),
        idle_timeout=told.get("idle_timeout", 0),
        warm=pb.TemplateWarmth(interpreters=warm) if "warm" in told else None,
        pool_min=pool.get("min"),
        pool_max=pool.get("max"),
        source=told["source"],
        error=as_text(told["error"]),
        digest=told.get("digest", ""),
    )
