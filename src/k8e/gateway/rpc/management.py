"""RPCs that manage: approvals, audit, events, ports, login, secrets, snapshots, templates."""

from __future__ import annotations

from typing import Any

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.keys import ClientCertificates
from k8e.gateway.operations import ANY, PUBLIC, Limit, NoRow, WritesRow
from k8e.gateway.rpc.errors import as_text
from k8e.gateway.rpc.method import RpcCaller, encodes, rpc


class ApprovalRpcs:
    """The RPCs about approvals."""

    @encodes("confirm_action")
    async def ConfirmAction(
        self, caller: RpcCaller, request: pb.ConfirmActionRequest
    ) -> pb.ConfirmActionResponse:
        """Register an action and answer at once; with an approval_id, wait for the decision."""
        call = {
            "session_id": request.session_id,
            "action": request.action,
            "approval_id": request.approval_id,
            "timeout": request.timeout,
            "expires": request.expires,
        }
        return _approval(await caller.ask(call))

    @encodes("approve_action")
    async def ApproveAction(
        self, caller: RpcCaller, request: pb.ApproveActionRequest
    ) -> pb.ApproveActionResponse:
        call = {
            "approval_id": request.approval_id,
            "approved": request.approved,
            "reason": request.reason,
            "secret": request.secret,
        }
        answer = await caller.ask(call)
        return pb.ApproveActionResponse(ok=True, advisory=answer["advisory"])

    @encodes("list_approvals")
    async def ListApprovals(
        self, caller: RpcCaller, request: pb.ListApprovalsRequest
    ) -> pb.ListApprovalsResponse:
        call = {"session_id": request.session_id}
        answer = await caller.ask(call)
        return pb.ListApprovalsResponse(approvals=map(_approval, answer["approvals"]))


def _approval(answer: dict[str, Any]) -> pb.ConfirmActionResponse:
    return pb.ConfirmActionResponse(
        approval_id=answer["approval_id"],
        approved=answer["approved"],
        status=answer["status"],
        advisory=answer["advisory"],
        reason=answer["reason"],
        session_id=answer["session_id"],
        action=answer["action"],
        created_at=int(answer["created_at"]),
        expires_at=int(answer["expires_at"]),
    )


class AuditRpcs:
    """The RPCs about the audit trail."""

    @encodes("audit")
    async def GetAudit(self, caller: RpcCaller, request: pb.GetAuditRequest) -> pb.GetAuditResponse:
        call = {item.name: getattr(request, item.name) for item in request.DESCRIPTOR.fields}
        return pb.GetAuditResponse(**await caller.ask(call))

    @encodes("verify_audit")
    async def VerifyAudit(
        self, caller: RpcCaller, request: pb.VerifyAuditRequest
    ) -> pb.VerifyAuditResponse:
        answer = await caller.ask({"expect": request.expect})
        return pb.VerifyAuditResponse(**answer)


class EventRpcs:
    """The RPC about events."""

    @encodes("events")
    async def GetEvents(
        self, caller: RpcCaller, request: pb.GetEventsRequest
    ) -> pb.GetEventsResponse:
        asked = {"session_id": request.session_id, "cursor": request.cursor}
        call = {**asked, "limit": request.limit}
        return pb.GetEventsResponse(**await caller.ask(call))


class ExposureRpcs:
    """The RPCs about exposed ports."""

    @encodes("expose")
    async def ExposeService(
        self, caller: RpcCaller, request: pb.ExposeServiceRequest
    ) -> pb.ExposeServiceResponse:
        call = {"session_id": request.session_id, "port": request.port, "host": request.host}
        answer = await caller.ask(call)
        return pb.ExposeServiceResponse(url=answer["url"])

    @encodes("unexpose")
    async def UnexposeService(
        self, caller: RpcCaller, request: pb.UnexposeServiceRequest
    ) -> pb.UnexposeServiceResponse:
        call = {"session_id": request.session_id, "port": request.port}
        await caller.ask(call)
        return pb.UnexposeServiceResponse(ok=True)

    @encodes("list_exposed")
    async def ListExposed(
        self, caller: RpcCaller, request: pb.ListExposedRequest
    ) -> pb.ListExposedResponse:
        answer = await caller.ask({"session_id": request.session_id})
        services = [
            pb.ExposedService(
                port=item["port"],
                url=item["url"],
                host=item["host"],
                started_at=int(item["started_at"]),
            )
            for item in answer["services"]
        ]
        return pb.ListExposedResponse(services=services)


class LoginRpcs:
    """The RPCs by which a client gets a certificate."""

    def __init__(self, certificates: ClientCertificates) -> None:
        self._certificates = certificates

    @rpc(roles=ANY, audit=WritesRow("key.login", ("device",), ("days",)))
    async def Login(self, caller: RpcCaller, request: pb.LoginRequest) -> pb.LoginResponse:
        """A client certificate for the caller's key."""

        async def issue() -> dict[str, Any]:
            certificates, device = self._certificates, request.device_name
            issued = await certificates.issue(caller.principal, request.csr, device)
            return issued._asdict()

        issued = await caller.record({"device": request.device_name}, issue)
        return pb.LoginResponse(
            cert=issued["certificate"], ca_cert=issued["ca"], valid_days=issued["days"]
        )

    @rpc(roles=PUBLIC, audit=NoRow.READS, limit=Limit.NONE)
    async def GetCACert(
        self, caller: RpcCaller, request: pb.GetCACertRequest
    ) -> pb.GetCACertResponse:
        """Our CA's certificate, for every caller: clients check its fingerprint in another way."""
        return pb.GetCACertResponse(cert=self._certificates.ca_certificate())


class SecretRpcs:
    """The RPCs about secrets; no answer contains a value."""

    @encodes("set_secret")
    async def SetSecret(
        self, caller: RpcCaller, request: pb.SetSecretRequest
    ) -> pb.SetSecretResponse:
        call = {**_place(request), "value": request.value}
        answer = await caller.ask(call)
        return pb.SetSecretResponse(secret=_secret(answer))

    @encodes("list_secrets")
    async def ListSecrets(
        self, caller: RpcCaller, request: pb.ListSecretsRequest
    ) -> pb.ListSecretsResponse:
        call = {"tenant": request.tenant_id}
        answer = await caller.ask(call)
        return pb.ListSecretsResponse(secrets=[_secret(item) for item in answer["secrets"]])

    @encodes("delete_secret")
    async def DeleteSecret(
        self, caller: RpcCaller, request: pb.DeleteSecretRequest
    ) -> pb.DeleteSecretResponse:
        answer = await caller.ask(_place(request))
        return pb.DeleteSecretResponse(deleted=answer["deleted"])


def _place(request: pb.SetSecretRequest | pb.DeleteSecretRequest) -> dict[str, Any]:
    return {"tenant": request.tenant_id, "name": request.name, "key": request.key}


def _secret(answer: dict[str, Any]) -> pb.SecretInfo:
    times = {name: int(answer[name]) for name in ("created_at", "updated_at")}
    return pb.SecretInfo(
        name=answer["name"], key=answer["key"], tenant_id=answer["tenant_id"], **times
    )


class SnapshotRpcs:
    """The RPCs about snapshots. Those that were saved here have one layer: their archive."""

    @encodes("put_snapshot")
    async def SnapshotPut(
        self, caller: RpcCaller, request: pb.SnapshotPutRequest
    ) -> pb.SnapshotPutResponse:
        call = {"name": request.name, "layers": list(request.layers)}
        answer = await caller.ask(call)
        return pb.SnapshotPutResponse(name=answer["name"], layers=len(answer["layers"]))

    @encodes("get_snapshot")
    async def SnapshotGet(
        self, caller: RpcCaller, request: pb.SnapshotGetRequest
    ) -> pb.SnapshotGetResponse:
        answer = await caller.ask({"name": request.name})
        return pb.SnapshotGetResponse(name=answer["name"], layers=answer["layers"])

    @encodes("list_snapshots")
    async def SnapshotList(
        self, caller: RpcCaller, request: pb.SnapshotListRequest
    ) -> pb.SnapshotListResponse:
        answer = await caller.ask({})
        return pb.SnapshotListResponse(names=[item["name"] for item in answer["snapshots"]])


class SubagentRpcs:
    """The RPCs that make children of sessions, and that pause and resume sessions."""

    @encodes("run_subagent", session="parent_session_id")
    async def RunSubAgent(
        self, caller: RpcCaller, request: pb.RunSubAgentRequest
    ) -> pb.RunSubAgentResponse:
        call = {
            "parent_session_id": request.parent_session_id,
            "agent_type": request.agent_type,
            "workspace_path": request.workspace_path,
        }
        answer = await caller.ask(call)
        return pb.RunSubAgentResponse(session_id=answer["session"]["session_id"])

    @encodes("pause_session")
    async def PauseSession(
        self, caller: RpcCaller, request: pb.PauseSessionRequest
    ) -> pb.PauseSessionResponse:
        await caller.ask({"session_id": request.session_id})
        return pb.PauseSessionResponse(ok=True)

    @encodes("resume_session")
    async def ResumeSession(
        self, caller: RpcCaller, request: pb.ResumeSessionRequest
    ) -> pb.ResumeSessionResponse:
        await caller.ask({"session_id": request.session_id})
        return pb.ResumeSessionResponse(ok=True)


_LIMITS = ("cpus", "memory", "pids", "disk", "inodes", "open_files", "output")
_NOTHING = "none"  # the word for an empty list, which gRPC cannot tell from an absent one


class TemplateRpcs:
    """The RPCs about templates."""

    @encodes("list_templates")
    async def ListTemplates(
        self, caller: RpcCaller, request: pb.ListTemplatesRequest
    ) -> pb.ListTemplatesResponse:
        answer = await caller.ask({})
        return pb.ListTemplatesResponse(templates=map(_template, answer["templates"]))

    @encodes("get_template")
    async def GetTemplate(self, caller: RpcCaller, request: pb.GetTemplateRequest) -> pb.Template:
        call = {"name": request.name}
        return _template(await caller.ask(call))

    @encodes("apply_template")
    async def ApplyTemplate(
        self, caller: RpcCaller, request: pb.ApplyTemplateRequest
    ) -> pb.Template:
        call = {"template": _recipe(request.template)}
        return _template(await caller.ask(call))

    @encodes("delete_template")
    async def DeleteTemplate(
        self, caller: RpcCaller, request: pb.DeleteTemplateRequest
    ) -> pb.DeleteTemplateResponse:
        await caller.ask({"name": request.name})
        return pb.DeleteTemplateResponse(ok=True)


def _recipe(message: pb.Template) -> dict[str, Any]:
    """A template as its file has it, without empty fields."""
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


def _template(answer: dict[str, Any]) -> pb.Template:
    warm = [
        pb.WarmInterpreter(language=language, modules=modules)
        for language, modules in answer.get("warm", {}).items()
    ]
    pool = answer.get("pool", {})
    hosts = answer.get("allowed_hosts")
    return pb.Template(
        name=as_text(answer["name"]),
        description=answer.get("description", ""),
        runtime_class=answer.get("runtime", ""),
        rootfs=answer.get("rootfs", ""),
        limits=pb.TemplateLimits(**answer.get("limits", {})),
        env=answer.get("env"),
        labels=answer.get("labels"),
        allowed_hosts=[_NOTHING] if hosts == [] else hosts,
        lifetime=answer.get("lifetime", 0),
        idle_timeout=answer.get("idle_timeout", 0),
        warm=pb.TemplateWarmth(interpreters=warm) if "warm" in answer else None,
        pool_min=pool.get("min"),
        pool_max=pool.get("max"),
        source=answer["source"],
        error=as_text(answer["error"]),
        digest=answer.get("digest", ""),
    )
