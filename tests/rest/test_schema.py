"""What schemathesis makes of the description: nothing that it sends gets another answer.

It sends valid and invalid requests, as somebody with an API key, to a gateway that runs.
"""

# What schemathesis and a body are made of has no static type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth

from k8e.rest import openapi
from k8e.rest.routes import ROUTES
from tests.rest import gateways
from tests.rest.gateways import Rest

pytestmark = pytest.mark.timeout(300)

EXAMPLES = 12
"""For each route and mode; always the same ones."""
SCHEMA = schemathesis.openapi.from_dict(openapi.describe())
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def keyed() -> Generator[Rest]:
    """Somebody with a key, where nobody is let in without one."""
    with gateways.started(K8E_HTTP_TRUST_LOCAL="0") as rest:
        yield rest.key("tester")


@pytest.fixture
def known(keyed: Rest) -> str:
    """A sandbox, so that not all that is sent ends at one that is not there."""
    return str(keyed.open("schema")["sandbox_id"])


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_no_request_gets_an_answer_that_is_not_described(
    keyed: Rest, known: str, route: Any
) -> None:
    operation = SCHEMA[route.path][route.method]
    strategy = operation.as_strategy() | operation.as_strategy(
        generation_mode=GenerationMode.NEGATIVE
    )
    headers = {"Authorization": keyed.http.headers["authorization"]}
    ours = {"sandbox_id": known} if route.names else {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @_given(strategy)
    def attempt(case: Any) -> None:
        _tame(case)
        wrong = _wrong_parts(case)
        assume(wrong != {"header"})  # the credential, and that is ours
        if ours and "path" not in wrong and len(str(case.path_parameters["sandbox_id"])) % 2:
            case.path_parameters.update(ours)
        case.call_and_validate(
            base_url=keyed.gateway.root,
            headers=headers,
            timeout=gateways.PATIENCE,
            # After some requests without a credential the answer is 429; test_sandboxes.py has it.
            excluded_checks=[ignored_auth],
        )

    attempt()


def _wrong_parts(case: Any) -> set[str]:
    """What of a request is not as described: ``path``, ``query``, ``header``, ``body``."""
    parts = case.meta.components.items()
    return {where.value for where, part in parts if part.mode is GenerationMode.NEGATIVE}


def _tame(case: Any) -> None:
    """What it runs must end soon, and what no schema can say must be right.

    A cursor is only good if an answer gave it; runtimes are those of the machine; what a token may
    do depends on its audience; what may be reached has a language of its own: see tests/egress.
    """
    if case.query:
        case.query.pop("cursor", None)
    body: Any = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("timeout"), (int, float)):
        body["timeout"] = min(body["timeout"], 2)
    if case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    for name in ("runtime", "remove", "operations"):
        body.pop(name, None)
    for name in ("allowed_hosts", "add"):
        if isinstance(body.get(name), list):
            body[name] = ["example.com" if isinstance(word, str) else word for word in body[name]]


def _given(strategy: Any) -> Any:
    from hypothesis import given

    return given(case=strategy)
