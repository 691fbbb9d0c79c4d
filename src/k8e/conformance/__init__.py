"""Behaviours that every runtime must show, checked through the runtime contract alone.

``run(runtime)`` checks them all. A new runtime is done when nothing fails here.
"""

from k8e.conformance import (
    attacks,
    bounds,
    confinement,
    contexts,
    ending,
    executing,
    filing,
    languages,
    life,
    limits,
    more_contexts,
    nodes,
    noise,
    output,
    pausing,
    ports,
    refusals,
    settling,
    sharing,
    terminals,
    warmth,
)
from k8e.conformance.behaviours import ALL, Behaviour, Broken, NotApplicable
from k8e.conformance.running import Result, Verdict, check, run
from k8e.conformance.stage import Stage, staged

__all__ = [
    "ALL",
    "Behaviour",
    "Broken",
    "NotApplicable",
    "Result",
    "Stage",
    "Verdict",
    "check",
    "run",
    "staged",
]

_PARTS = (
    executing,
    ending,
    output,
    terminals,
    warmth,
    contexts,
    more_contexts,
    nodes,
    languages,
    filing,
    refusals,
    ports,
    confinement,
    attacks,
    limits,
    bounds,
    noise,
    settling,
    life,
    sharing,
    pausing,
)
"""Importing a part adds its behaviours."""
