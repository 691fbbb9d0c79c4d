"""Logging in, in K8E's words. A method here has the name of its RPC."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.keeping import KeyCalls
from k8e.model import Principal


class LoginRpcs:
    """The RPCs by which a client gets a certificate."""

    def __init__(self, calls: KeyCalls) -> None:
        self._key_calls = calls

    async def Login(self, principal: Principal, request: pb.LoginRequest) -> pb.LoginResponse:
        """A client certificate for the caller's key."""
        issued = await self._key_calls.issue(principal, request.csr, request.device_name)
        return pb.LoginResponse(cert=issued.certificate, ca_cert=issued.ca, valid_days=issued.days)

    async def GetCACert(
        self, principal: Principal, request: pb.GetCACertRequest
    ) -> pb.GetCACertResponse:
        """Our CA, for anybody: whoever trusts it must know its fingerprint from elsewhere."""
        return pb.GetCACertResponse(cert=self._key_calls.ca_certificate())
