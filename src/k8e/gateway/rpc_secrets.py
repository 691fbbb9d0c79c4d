"""Secrets of users over gRPC. A method here has the name of its RPC."""

from __future__ import annotations

from typing import Any

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.service import Gateway
from k8e.model import Principal


class SecretRpcs:
    """The RPCs about secrets; no answer has a value in it."""

    _gateway: Gateway

    async def SetSecret(
        self, principal: Principal, request: pb.SetSecretRequest
    ) -> pb.SetSecretResponse:
        call = {**_place(request), "value": request.value}
        told = await self._gateway.call_set_secret(principal, call)
        return pb.SetSecretResponse(secret=_secret(told))

    async def ListSecrets(
        self, principal: Principal, request: pb.ListSecretsRequest
    ) -> pb.ListSecretsResponse:
        call = {"tenant": request.tenant_id}
        told = await self._gateway.call_list_secrets(principal, call)
        return pb.ListSecretsResponse(secrets=[_secret(item) for item in told["secrets"]])

    async def DeleteSecret(
        self, principal: Principal, request: pb.DeleteSecretRequest
    ) -> pb.DeleteSecretResponse:
        told = await self._gateway.call_delete_secret(principal, _place(request))
        return pb.DeleteSecretResponse(deleted=told["deleted"])


def _place(request: pb.SetSecretRequest | pb.DeleteSecretRequest) -> dict[str, Any]:
    return {"tenant": request.tenant_id, "name": request.name, "key": request.key}


def _secret(told: dict[str, Any]) -> pb.SecretInfo:
    times = {name: int(told[name]) for name in ("created_at", "updated_at")}
    return pb.SecretInfo(name=told["name"], key=told["key"], tenant_id=told["tenant_id"], **times)
