"""The program of the how-to page works as it stands there."""

from __future__ import annotations

import os

import pytest

from tests.agent_sandbox import upstream
from tests.docs.documents import ROOT, blocks
from tests.gateway import http_gateways

pytestmark = pytest.mark.timeout(300)
PAGE = ROOT / "docs" / "howto" / "agent-sandbox-client.md"
PRINTS = (
    "\nimport contextlib, io\nprinted = io.StringIO()\nwith contextlib.redirect_stdout(printed):\n"
)


def test_the_program_of_the_page_prints_what_it_says() -> None:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    (program,) = [block.text for block in blocks(PAGE) if "SandboxClient" in block.text]
    body = "".join(f"    {line}\n" for line in program.splitlines())
    with http_gateways.started(K8E_RUNTIME="container") as gateway:
        made = gateway.place.json("kubeconfig")
        with upstream.started({"KUBECONFIG": str(made["file"])}) as client:
            told = client.run(f"{PRINTS}{body}\nresult = printed.getvalue()\n")
    assert told == "hello\n\nb'\\x00\\x01'\n"
