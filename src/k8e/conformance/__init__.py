"""Behaviours that every runtime must show: through its contract, and as sessions of a gateway.

``run(runtime)`` checks them all. A new runtime is done when nothing fails here.
"""

from k8e.conformance.behaviour import ALL, Behaviour, BrokenPromise, NotApplicable
from k8e.conformance.promises import (
    archives,
    attacks,
    audit,
    callers,
    confinement,
    contexts,
    disk,
    ending,
    file_refusals,
    files,
    host_secrets,
    kernel,
    lifecycle,
    limits,
    mazes,
    network,
    noise,
    output,
    pause,
    policies,
    pool,
    ports,
    programs,
    subagents,
    terminals,
    warm,
)
from k8e.conformance.runner import BehaviourResult, Verdict, check, choose, known_gap, results, run
from k8e.conformance.stage import Stage, staged

__all__ = [
    "ALL",
    "Behaviour",
    "BehaviourResult",
    "BrokenPromise",
    "NotApplicable",
    "Stage",
    "Verdict",
    "check",
    "choose",
    "known_gap",
    "results",
    "run",
    "staged",
]

_PARTS = (
    programs,
    ending,
    output,
    terminals,
    warm,
    contexts,
    files,
    file_refusals,
    mazes,
    ports,
    confinement,
    attacks,
    kernel,
    host_secrets,
    limits,
    noise,
    disk,
    pool,
    lifecycle,
    subagents,
    pause,
    network,
    policies,
    archives,
    callers,
    audit,
)
"""Importing a part adds its behaviours."""
