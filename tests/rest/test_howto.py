"""The TypeScript of the page "your first conversation"; tests/docs runs the rest of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from k8e import settings
from tests.docs.documents import ROOT, blocks
from tests.rest.gateways import PATIENCE, Rest

PAGE = ROOT / "docs" / "howto" / "first-conversation.md"
TSX = settings.default_home() / "tools/node_modules/tsx/dist/cli.mjs"

pytestmark = pytest.mark.timeout(300)


def test_the_program_of_the_page_prints_what_it_says(rest: Rest, tmp_path: Path) -> None:
    if not TSX.exists():
        pytest.skip("tsx is not installed")
    found = list(blocks(PAGE))
    [place] = [index for index, block in enumerate(found) if block.language == "ts"]
    program = tmp_path / "first.mts"
    program.write_text(found[place].text, "utf-8")
    keyed = rest.key("typescript")
    key = keyed.http.headers["authorization"].removeprefix("Bearer ")
    done = subprocess.run(
        ["node", str(TSX), str(program)],
        env={**os.environ, "REST_URL": rest.gateway.root, "K8E_SANDBOX_APIKEY": key},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout.decode() == found[place + 1].text, done.stderr.decode()
    assert keyed.told("GET", "/sandbox") == {"sandboxes": [], "cursor": None}
