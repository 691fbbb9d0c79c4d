"""One run without a session to look after: the session is made for it and destroyed with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from k8e.client import requests
from k8e.client.asynchronous import async_sandbox_session
from k8e.client.requests import AsyncContent, ExecOptions
from k8e.client.results import ExecResult


async def arun(
    code: str | bytes,
    language: str = "bash",
    timeout: float = 30,
    *,
    runtime_class: str = "",
    allowed_hosts: Sequence[str] | None = None,
    template: str = "",
    endpoint: str | None = None,
    stdin: AsyncContent | None = None,
    **options: Unpack[ExecOptions],
) -> ExecResult:
    """Run source code in a session of its own: ``(await k8e.arun("print(1)", "python")).stdout``.

    A session takes longer to make than a command to run, so for several commands use a
    :class:`k8e.AsyncSandboxClient`.

    Args:
        code: the program.
        language: ``bash``, ``python``, ``node`` or ``ts``.
        timeout: seconds after which it is killed; 0 means never.
        runtime_class: ``gvisor`` or ``container``; by default the best.
        allowed_hosts: what it may reach; see :meth:`k8e.AsyncSandboxClient.create_session`.
        template: what its session is made from; see :meth:`k8e.AsyncSandboxClient.list_templates`.
        endpoint: a gateway elsewhere; by default K8E_SANDBOX_ENDPOINT, or this host's own.
        stdin: what the program reads.
        options: see :class:`ExecOptions`.
    """
    requests.check_exec_options(arun, options)
    made = async_sandbox_session(runtime_class, allowed_hosts, endpoint, template=template)
    async with made as (client, session_id):
        return await client.run(
            code, language, timeout, session_id=session_id, stdin=stdin, **options
        )
