"""What a Jupyter notebook shows of results, with a real kernel; and that nothing hostile runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from k8e.client import notebook
from tests.places import Place

PATIENCE = 60

CELL = '''
import k8e
sandbox = k8e.Sandbox(runtime="{runtime}")
context = sandbox.context()
code = """
class Frame:
    def __repr__(self): return "frame"
    def _repr_html_(self): return "<table><tr><td>1</td></tr></table><script>steal()</script>"
class Chart:
    def __repr__(self): return "chart"
    def _repr_png_(self): return b"PNG"
print("before")
display(Chart())
Frame()
"""
'''


def run_cells(*cells: str) -> list[list[Any]]:
    """The outputs of each cell, in a kernel of this very Python."""
    sheet: Any = nbformat.v4.new_notebook()  # pyright: ignore[reportUnknownMemberType]
    sheet["cells"] = [nbformat.v4.new_code_cell(cell) for cell in cells]  # pyright: ignore[reportUnknownMemberType]
    nbclient.NotebookClient(sheet, timeout=PATIENCE, kernel_name="python3").execute()
    return [cell["outputs"] for cell in sheet["cells"]]


def test_charts_and_frames_show_in_a_notebook(
    place: Place, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    place.listening()
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", place.endpoint)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    outputs = run_cells(
        CELL.format(runtime=runtime),
        "done = context.run(code)\ndone.results[0]",
        "done.results[1]",
        "done",
        "sandbox.run('echo out; echo err >&2')",
        "sandbox.close()",
    )
    assert outputs[1][0]["data"] == {"text/plain": "chart", "image/png": "UE5H"}
    frame = outputs[2][0]["data"]
    assert frame["text/plain"] == "frame"
    assert "&lt;table&gt;" in frame["text/html"]
    whole = outputs[3][0]["data"]
    assert whole["text/plain"] == "before\nchart\nframe"
    assert 'src="data:image/png;base64,UE5H"' in whole["text/html"]
    assert outputs[4][0]["data"] == {"text/plain": "out\nerr\n"}


def test_nothing_that_a_sandbox_shows_runs_in_the_page() -> None:
    attack = "\"><script>steal()</script><img src=x onerror='steal()'>"
    shown = notebook.bundle(
        {
            "text/plain": attack,
            "text/html": attack,
            "image/svg+xml": f"<svg onload='steal()'>{attack}</svg>",
            "application/javascript": "steal()",
            "text/markdown": attack,
            "text/latex": "\\href{javascript:steal()}{x}",
        }
    )
    assert set(shown) == {"text/plain", "text/html"}
    page = shown["text/html"]
    assert page.startswith('<iframe sandbox="" ')
    assert page.count("<") == 2
    assert page.count(">") == 2
    assert "default-src &#x27;none&#x27;" in page
    joined = notebook.joined(attack, [shown])["text/html"]
    assert "<script>" not in joined
    assert "<img" not in joined
    picture = notebook.bundle({"image/svg+xml": f"<svg onload='steal()'>{attack}</svg>"})
    assert picture["text/html"].startswith('<img src="data:image/svg+xml;base64,')
    assert "steal" not in picture["text/html"]


def test_a_kind_that_cannot_be_shown_is_left_out() -> None:
    assert notebook.bundle({"application/json": "[" * 100_000}) == {}
    assert notebook.bundle({"application/json": '{"a": 1}'}) == {"application/json": {"a": 1}}
    assert notebook.joined("", []) == {"text/plain": ""}
