"""Leaves the conformance checks out of a wheel: ``K8E_WITHOUT_CONFORMANCE=1 pip install .``."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "K8E_WITHOUT_CONFORMANCE"


class ConformanceHook(BuildHookInterface):
    """Excludes the checks: a sixth of the package, and attacks that not every host needs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get(VARIABLE) == "1":
            self.build_config.target_config["exclude"] = ["/src/k8e/conformance"]
