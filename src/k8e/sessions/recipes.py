"""What sandboxes are made of, whether they are started for a session or ahead of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from k8e.model import DEFAULT_TEMPLATE, Limits, Rootfs, SessionSpec, Warm
from k8e.templates import Template


@dataclass(frozen=True)
class Recipe:
    """All that a sandbox is made of; those of one recipe are interchangeable."""

    template: str
    runtime: str
    limits: Limits = field(default_factory=Limits)
    rootfs: Rootfs = field(default_factory=Rootfs)
    warm: Warm = (("python", ()),)


def of_template(template: Template, runtime: str) -> Recipe:
    """What waits for sessions of a template."""
    return Recipe(template.name, runtime, template.full_limits, template.rootfs, template.warm)


def of_session(spec: SessionSpec, runtime: str) -> Recipe:
    """What is started for one session."""
    name = spec.template or DEFAULT_TEMPLATE
    return Recipe(name, runtime, spec.limits, spec.rootfs, spec.warm)
