"""A control plane for the tests of the controller, shared by those of one worker."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from tests.cluster.machine import COMPONENTS
from tests.controller.clusters import SandboxCluster
from tests.controller.control_planes import control_plane


@pytest.fixture(scope="session")
def _cluster() -> Generator[SandboxCluster]:
    if os.geteuid() != 0:
        pytest.skip("the programs of a cluster are made for root")
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl"):
        if not (COMPONENTS / "bin" / name).exists():
            pytest.fail(f"{name} is missing: make components")
    with control_plane() as plane, SandboxCluster(plane) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: SandboxCluster) -> Generator[SandboxCluster]:
    """A cluster with a controller, and a namespace of the test's own."""
    with _cluster.new_namespace():
        yield _cluster
