"""Tables of the kernel that sandboxes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.runtimes import host


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "OPEN_FILES", tmp_path / "file-max")
    return tmp_path / "file-max"


@pytest.mark.parametrize(
    ("before", "after"),
    [("2465610", str(1 << 40)), ("9223372036854775807", "9223372036854775807"), ("?", "?")],
)
def test_a_table_that_one_sandbox_could_fill_is_enlarged(
    table: Path, before: str, after: str
) -> None:
    table.write_text(before)
    host.enlarge_kernel_tables()
    assert table.read_text() == after


def test_a_host_that_has_no_such_table_is_left_alone(table: Path) -> None:
    host.enlarge_kernel_tables()
    assert not table.exists()
