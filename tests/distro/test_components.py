"""The table of components is sound, and agrees with the modules beside it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from k8e.distro.component_store import RECIPES
from k8e.distro.components import BUSYBOX, COMPONENTS, Component, GoBuild, by_name, needed

INSTALLER = Path(__file__).resolve().parents[2] / "install.sh"
OF_MODULES = [item for item in COMPONENTS if item.module]


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda item: item.name)
def test_a_component_has_a_version_a_licence_a_use_and_a_source(component: Component) -> None:
    assert re.fullmatch(r"v?\d[\w.+-]*", component.version)
    assert component.licence
    assert component.use
    assert component.module or component.debian or component.programs
    assert component.files or component.programs


@pytest.mark.parametrize("component", OF_MODULES, ids=lambda item: item.name)
def test_a_component_is_built_from_the_version_and_checksum_that_is_told(
    component: Component,
) -> None:
    assert component.module
    path, version = component.module.path, component.module.version
    folder = RECIPES / component.name
    required = (folder / "go.mod").read_text("utf-8")
    assert re.search(
        rf"^\s*(require )?{re.escape(path)} {re.escape(version)}\b", required, re.MULTILINE
    )
    sums = (folder / "go.sum").read_text("utf-8").splitlines()
    assert [line for line in sums if line.startswith(f"{path} {version} h1:")]
    for step in component.builds:
        for package in step.programs if isinstance(step, GoBuild) else ():
            imported = [path.read_text("utf-8") for path in folder.glob("*.go")]
            if package == "." or any(f'"{package}"' in text for text in imported):
                continue
            known = re.search(rf"^\s*(tool )?{package}$", required, re.MULTILINE)
            assert known, f"go.mod does not name {package}, so go.sum may lack what it needs"


def test_the_folder_has_a_recipe_for_each_of_them_and_no_other() -> None:
    assert {item.name for item in RECIPES.iterdir()} == {item.name for item in OF_MODULES}


def test_recipes_name_no_address() -> None:
    for path in RECIPES.rglob("*"):
        assert path.is_dir() or not re.search("https?://", path.read_text("utf-8")), path


def test_no_two_components_yield_one_file_or_have_one_name() -> None:
    files = Counter(name for item in COMPONENTS for name in (*item.files, *item.folders))
    assert [name for name, count in files.items() if count > 1] == []
    assert len({item.name for item in COMPONENTS}) == len(COMPONENTS)


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda item: item.name)
def test_an_image_has_only_files_of_its_component_and_a_shell(component: Component) -> None:
    for image in component.images:
        assert set(image.files.values()) <= {*component.files, *BUSYBOX.files}
        assert image.entrypoint or image.command
        assert component.reference(image).count(":") == 1


def test_install_sh_has_the_same_gvisor_and_runc() -> None:
    script = INSTALLER.read_text("utf-8")
    for name, program in (("gvisor", "GVISOR"), ("runc", "RUNC")):
        component = by_name(name)
        assert component.module
        assert f"\n{program}_VERSION={component.module.version}\n" in script
        (checksum,) = re.findall(rf"^{program}_SUM='(.*)'$", script, re.MULTILINE)
        line = f"{component.module.path} {component.module.version} {checksum}\n"
        assert line in (RECIPES / name / "go.sum").read_text("utf-8")


def test_a_small_node_needs_no_cilium_and_a_large_one_no_conntrack() -> None:
    basic, cilium = ({item.name for item in needed(cni)} for cni in ("basic", "cilium"))
    assert "kubernetes" in basic & cilium
    assert basic - cilium == {"conntrack"}
    assert cilium - basic == {"cilium", "clang"}
