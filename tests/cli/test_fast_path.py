"""The quick way of ``k8e sandbox run``: little imported, the same options as the full parser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k8e import settings
from k8e.cli import fast, parser
from k8e.client import local
from tests.places import Place

SOURCE = str(Path(fast.__file__).parents[2])
SLOW = {"argparse", "asyncio", "dataclasses", "json", "os", "re", "selectors", "socket", "typing"}


def test_a_run_imports_nothing_slow(place: Place, session_id: str) -> None:
    # The script that install.sh writes: no site module, no user paths.
    script = f"import sys; sys.path.insert(0, {SOURCE!r}); from k8e.cli import main; code = main()"
    flags = ["sandbox", "run", "--session-id", session_id, "--lang", "bash", "echo hello"]
    done = subprocess.run(
        [sys.executable, "-ISc", f"{script}; print(*sys.modules, file=sys.stderr)", *flags],
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert '"stdout":"hello\\n"' in done.stdout
    imported = set(done.stderr.split())
    assert "k8e.guest.wire" in imported
    assert imported & SLOW == set()
    assert sum(name.startswith("k8e") for name in imported) <= 8


@pytest.mark.parametrize(
    "arguments",
    [
        ["echo hello"],
        ["--lang", "python", "print(1)", "--timeout=5"],
        ["--raw", "--session-id", "s", "--tenant=t", "x", "--runtime", "container"],
        ["--env", "A=1", "--env=B=2=3", "--cwd", "/tmp", "--", "-x"],
        ["multi\nline ü \udcff"],
        ["x", "--allowed-hosts", "a.example, b.example:443,", "--allowed-hosts=*.c.example"],
        ["--allowed-hosts=", "x"],
    ],
)
def test_both_parsers_understand_the_same(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def note(options: dict[str, Any]) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(fast, "execute", note)
    assert parser.main(["sandbox", "run", *arguments]) == 0
    assert fast.parse(arguments) == seen[0]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-"],
        ["--help"],
        ["a", "b"],
        ["--lang"],
        ["--env", "novalue", "x"],
        ["--timeout", "soon", "x"],
        ["--manifest", "m", "x"],
        ["-i", "cat"],
        ["--file", "x"],
    ],
)
def test_what_the_quick_parser_does_not_know_it_leaves_alone(arguments: list[str]) -> None:
    assert fast.parse(arguments) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"K8E_RUN_DIR": "/tmp/somewhere"},
        {"XDG_RUNTIME_DIR": "/run/user/1000"},
    ],
)
def test_the_quick_path_looks_where_the_settings_say(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("K8E_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for uid in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        monkeypatch.setattr(local.posix, "geteuid", lambda uid=uid: uid)
        assert local.default_socket() == os.fsencode(settings.load().socket)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", '"plain"'),
        ('q"\\\n\t\x01', '"q\\"\\\\\\n\\t\\u0001"'),
        ("<é&>", '"\\u003cé\\u0026\\u003e"'),
    ],
)
def test_text_is_quoted_as_go_does(text: str, expected: str) -> None:
    assert fast.quote(text) == expected
