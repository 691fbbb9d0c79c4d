"""A gateway with REST, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator
from typing import Any

import httpx2
import pytest

from tests.gateway import http_gateways
from tests.gateway.http_gateways import HttpGateway

PATIENCE = 60.0
OPEN = {"user_id": "ada", "conversation_id": "c-1"}


class Rest:
    """REST of one gateway, for somebody who shows this credential; for none, our own user."""

    def __init__(
        self, gateway: HttpGateway, stack: contextlib.ExitStack, credential: str = ""
    ) -> None:
        """``stack`` closes its connections."""
        self.gateway = gateway
        self._stack = stack
        headers = {"authorization": f"Bearer {credential}"} if credential else {}
        client = httpx2.Client(base_url=gateway.root, headers=headers, timeout=PATIENCE)
        self.http = stack.enter_context(client)

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        content = {"json": body} if body is not None else {}
        return self.http.request(method, path, **content, **more)

    def told(self, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        answer = self.ask(method, path, body, **more)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def refused(self, status: int, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """The problem of a request that must fail."""
        return problem(self.ask(method, path, body, **more), status)

    def open(self, conversation: str, user: str = "ada", **more: Any) -> dict[str, Any]:
        body = {"user_id": user, "conversation_id": conversation, **more}
        return self.told("POST", "/sandbox", body)

    def run(self, sandbox_id: str, command: str, **more: Any) -> dict[str, Any]:
        body = {"command": command, **more}
        return self.told("POST", f"/sandbox/{sandbox_id}/exec", body)

    def with_token(self, token: str) -> Rest:
        return Rest(self.gateway, self._stack, token)

    def key(self, name: str, role: str = "agent") -> Rest:
        caller = self.gateway.key(name, role)
        return self.with_token(caller.headers["authorization"].partition(" ")[2])


def problem(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """A refusal: a problem with all its parts, whatever refused."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert {"title", "status", "detail", "code", "hint", "request_id"} <= set(told)
    assert told["status"] == status
    assert told["request_id"] == answer.headers["x-request-id"]
    assert told["detail"]
    return told


def rows(gateway: HttpGateway, request_id: str) -> list[dict[str, Any]]:
    """The audit rows of a request; there must be one at least."""
    deadline = time.monotonic() + PATIENCE
    while True:
        listed = gateway.place.cli("audit", "--limit", "1000", "--json").stdout.decode()
        found = [json.loads(line) for line in listed.splitlines() if request_id in line]
        if found:
            return found
        assert time.monotonic() < deadline, listed


@contextlib.contextmanager
def started(**environ: str) -> Generator[Rest]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    usual = {"K8E_RUNTIME": "container", "K8E_HTTP_TRUST_LOCAL": "1"}
    with (
        http_gateways.started(**{**usual, **environ}) as gateway,
        contextlib.ExitStack() as stack,
    ):
        yield Rest(gateway, stack)
