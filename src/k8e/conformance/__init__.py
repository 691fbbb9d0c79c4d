"""Behaviours that every runtime must show: through its contract, and as sessions of a gateway.

``run(runtime)`` checks them all. A new runtime is done when nothing fails here.
"""

from k8e.conformance import (
    archives,
    attacks,
    confinement,
    contexts,
    control,
    ending,
    executing,
    exposed,
    filing,
    hoarding,
    hosts,
    keeping,
    languages,
    life,
    limits,
    more_contexts,
    names,
    network,
    nodes,
    output,
    pausing,
    policies,
    ports,
    refusals,
    settling,
    sharing,
    strict,
    terminals,
    warmth,
)
from k8e.conformance.behaviours import ALL, Behaviour, Broken, NotApplicable
from k8e.conformance.running import Result, Verdict, check, choose, known_gap, results, run
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
    "choose",
    "known_gap",
    "results",
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
    hosts,
    limits,
    hoarding,
    settling,
    life,
    sharing,
    pausing,
    network,
    names,
    strict,
    policies,
    archives,
    control,
    exposed,
    keeping,
)
"""Importing a part adds its behaviours."""
