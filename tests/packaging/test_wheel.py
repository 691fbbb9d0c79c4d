"""The wheel: light, and the base installation needs no other package."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import k8e._version

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(REPO)], check=True)
    (path,) = folder.iterdir()
    return zipfile.ZipFile(path)


def test_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {
        "k8e",
        "sandbox_client.py",
        "agentic_sandbox_client.py",
        f"k8e-{k8e._version.__version__}.dist-info",
    }
    parts = [*(REPO / "src/k8e").rglob("*.py"), *(REPO / "src/k8e").rglob("*.md")]
    source = {str(path.relative_to(REPO / "src")) for path in parts}
    assert source <= set(wheel.namelist())
    assert sum(info.compress_size for info in wheel.infolist()) < 2 << 20  # 2 MiB


def test_base_installation_needs_a_client_s_packages_only(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == k8e._version.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = metadata.get_all("Requires-Dist") or []
    base = {re.split(r"[^\w.-]", item)[0] for item in needed if "extra == " not in item}
    assert base == {"grpcio", "protobuf", "pyyaml"}
