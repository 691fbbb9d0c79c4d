"""The reference is complete: what the code has, the documents name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import k8e
from k8e import errors, settings
from k8e.guest import spawn, wire
from k8e.sessions import operations
from tests.docs.documents import ROOT

REFERENCE = ROOT / "docs" / "reference"
FRAMES = (
    "CALL STDIN STDIN_END CREDIT CANCEL DATA END RESULT ERROR OUT ERR EXIT SHOW GOODBYE HELLO "
    "WELCOME PROOF IDENTITY LINK_KEY"
).split()
SIZES = "MAX_REQUEST MAX_REPLY CHUNK WINDOW MAX_CODE".split()


def page(name: str) -> str:
    return (REFERENCE / name).read_text("utf-8")


def rows(text: str) -> Iterator[list[str]]:
    """The rows of all tables, cell by cell, without the marks of code."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")]


def test_command_line_page_is_what_the_parser_says() -> None:
    script = ROOT / "docs" / "generate.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("field", dataclasses.fields(settings.Settings), ids=lambda item: item.name)
def test_setting_is_documented(field: dataclasses.Field[Any]) -> None:
    found = {row[0]: row for row in rows(page("settings.md"))}
    assert field.name in found, f"docs/reference/settings.md has no row for {field.name}"
    row = found[field.name]
    assert row[1] == settings._variable(field.name)  # pyright: ignore[reportPrivateUsage]
    if field.default is not dataclasses.MISSING:
        default = field.default
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert row[2].replace(",", "") == (shown or "empty")


def all_errors() -> list[type[errors.K8eError]]:
    leaves = [
        item for item in errors.K8eError.__subclasses__() if item.__module__ == errors.__name__
    ]
    return [errors.K8eError, *leaves]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda item: item.__name__)
def test_error_is_documented(kind: type[errors.K8eError]) -> None:
    found = {row[0]: row for row in rows(page("errors.md"))}
    assert kind.code in found, f"docs/reference/errors.md has no row for {kind.code}"
    row = found[kind.code]
    assert row[1:4] == [kind.__name__, kind.grpc_status, str(kind.exit_code)]


@pytest.mark.parametrize("name", FRAMES)
def test_frame_is_documented(name: str) -> None:
    kinds = {row[1]: row[0] for row in rows(page("protocol.md")) if len(row) > 1}
    assert kinds.get(name) == str(getattr(wire, name))


def test_no_frame_is_forgotten() -> None:
    numbers = {
        name
        for name, value in vars(wire).items()
        if name.isupper() and type(value) is int and value < 64
    }
    assert numbers - {"HEADER_SIZE", "MAX_DEPTH"} == set(FRAMES)


@pytest.mark.parametrize("name", SIZES)
def test_size_is_documented(name: str) -> None:
    value = getattr(wire, name)
    shown = f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    found = {row[0]: row for row in rows(page("protocol.md"))}
    assert found[name][1] == shown


def test_operations_are_documented() -> None:
    text = page("protocol.md")
    missing = [op for op in [*operations.OPERATIONS, "bind", *_gateway()] if f"`{op}`" not in text]
    assert not missing


def _gateway() -> list[str]:
    from k8e.gateway.service import OPERATIONS

    return list(OPERATIONS)


def test_languages_are_documented() -> None:
    text = page("cli.md") + page("sdk.md")
    assert not [name for name in spawn.ALIASES if f"`{name}`" not in text]


def test_public_names_of_the_sdk_are_documented() -> None:
    text = page("sdk.md")
    public = getattr(k8e, "__all__", [])
    assert public
    missing = [name for name in public if name not in text]
    for kind in (k8e.SandboxClient, k8e.AsyncSandboxClient):
        methods = [item for item in dir(kind) if not item.startswith("_")]
        missing += [item for item in methods if not re.search(rf"`{item}\b", text)]
    assert not missing


def test_sdk_page_names_only_what_exists() -> None:
    heads = [row[0] for row in rows(page("sdk.md"))]
    calls = [re.match(r"(\w+)\(", head) for head in heads]
    names = [found[1] for found in calls if found]
    assert names
    known = {*dir(k8e.SandboxClient), *dir(k8e.Sandbox), *dir(k8e)}
    assert not [name for name in names if name not in known]


def test_settings_file_of_the_page_is_accepted(tmp_path: Path) -> None:
    text = page("settings.md")
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert example
    (tmp_path / "config.toml").write_text(example[1], "utf-8")
    settings.load({"K8E_DATA_DIR": str(tmp_path)})
