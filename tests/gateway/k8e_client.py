"""A client that does on the wire what K8E's published Python SDK does, and nothing more.

No metadata, no deadlines, gRPC's default message sizes, the root certificate from K8E_SANDBOX_CERT,
the endpoint from K8E_SANDBOX_ENDPOINT, one session made at first use and destroyed at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc


class Result(NamedTuple):
    stdout: str
    stderr: str
    exit_code: int


class K8EClient:
    def __init__(self, tenant_id: str = "") -> None:
        root = Path(os.environ["K8E_SANDBOX_CERT"]).read_bytes()
        credentials = grpc.ssl_channel_credentials(root_certificates=root)
        endpoint = os.environ["K8E_SANDBOX_ENDPOINT"]
        self._channel = grpc.secure_channel(endpoint, credentials)
        self._stub = pb_grpc.SandboxServiceStub(self._channel)
        self._tenant_id = tenant_id
        self.default_session = ""

    def __enter__(self) -> K8EClient:
        return self

    def __exit__(self, *_: object) -> None:
        if self.default_session and not self._tenant_id:
            self.destroy_session(self.default_session)
        self._channel.close()

    def run(self, code: str, language: str = "bash") -> Result:
        if not self.default_session:
            request = pb.CreateSessionRequest(runtime_class="gvisor", tenant_id=self._tenant_id)
            self.default_session = self._stub.CreateSession(request).session_id
        command = f"python3 -c {code!r}" if language == "python" else code
        return self.exec(self.default_session, command)

    def exec(self, session_id: str, command: str, timeout: int = 30) -> Result:
        request = pb.ExecRequest(
            session_id=session_id, command=command, timeout=timeout, workdir="/workspace"
        )
        answer = self._stub.Exec(request)
        return Result(answer.stdout, answer.stderr, answer.exit_code)

    def exec_stream(self, session_id: str, command: str, timeout: int = 300) -> Iterator[str]:
        request = pb.ExecRequest(
            session_id=session_id, command=command, timeout=timeout, workdir="/workspace"
        )
        for answer in self._stub.ExecStream(request):
            yield answer.chunk

    def create_session(self, runtime_class: str = "gvisor") -> str:
        request = pb.CreateSessionRequest(
            runtime_class=runtime_class, allowed_hosts=[], tenant_id=""
        )
        return self._stub.CreateSession(request).session_id

    def destroy_session(self, session_id: str) -> None:
        self._stub.DestroySession(pb.DestroySessionRequest(session_id=session_id))

    def write_file(self, session_id: str, path: str, content: str) -> None:
        self._stub.WriteFile(pb.WriteFileRequest(session_id=session_id, path=path, content=content))

    def read_file(self, session_id: str, path: str) -> str:
        return self._stub.ReadFile(pb.ReadFileRequest(session_id=session_id, path=path)).content

    def list_files(self, session_id: str, since: int = 0) -> list[str]:
        request = pb.ListFilesRequest(session_id=session_id, since=since)
        return [item.path for item in self._stub.ListFiles(request).files]

    def pip_install(self, session_id: str, packages: list[str]) -> str:
        request = pb.PipInstallRequest(session_id=session_id, packages=packages)
        return self._stub.PipInstall(request).output

    def is_healthy(self) -> bool:
        """How every K8E client finds out whether a gateway answers."""
        try:
            self.destroy_session("healthcheck-probe-noop")
        except grpc.RpcError as error:
            return "not found" in str(error)
        return True
