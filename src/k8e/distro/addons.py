"""Add-ons of every cluster: DNS, metrics, storage, runtime classes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from string import Template

from k8e.distro import manifests, runtime_classes
from k8e.distro.components import COMPONENTS
from k8e.distro.configuration import Configuration
from k8e.distro.runtime_classes import Runtime
from k8e.kubernetes.api import Object

_FOLDER = Path(__file__).parent / "addon_manifests"
_FILES = {"coredns": "coredns", "metrics-server": "metrics-server", "local-path": "local-path"}


def objects(config: Configuration, runtimes: Iterable[Runtime]) -> list[Object]:
    """All enabled add-ons, and a RuntimeClass for each runtime that was found."""
    found = [runtime_classes.runtime_class(runtime) for runtime in runtimes]
    if config.cni == "cilium":
        found += read("cilium-guard", config)
    for name, file in _FILES.items():
        if name not in config.disable:
            found += read(file, config)
    return found


def read(name: str, config: Configuration) -> list[Object]:
    """The objects of one of our own manifests."""
    text = (_FOLDER / f"{name}.yaml").read_text("utf-8")
    values = {"domain": config.cluster_domain, "dns": config.cluster_dns}
    values["storage"] = str(config.data_dir / "storage")
    values |= {image.replace("-", "_"): reference for image, reference in references().items()}
    return manifests.objects(Template(text).substitute(values), name)


def references() -> dict[str, str]:
    """The names by which pods ask for the images that come with the components."""
    return {
        image.name: component.reference(image)
        for component in COMPONENTS
        for image in component.images
    }
