"""REST is declared once: routes call operations that exist, and all else is made from them."""

from __future__ import annotations

import html.parser
import json
import re

from k8e.gateway.service import OPERATIONS
from k8e.gateway.tokens import ALLOWED, READING, USING
from k8e.rest import openapi, page, routes, sandboxes
from k8e.rest.routes import ROUTES
from k8e.sessions import conversations
from k8e.sessions.operations import OPERATIONS as OF_GUESTS


def test_every_route_calls_declared_operations_alone() -> None:
    for route in ROUTES:
        assert route.calls
        assert set(route.calls) <= set(OPERATIONS) | OF_GUESTS, route


def test_a_token_can_allow_operations_that_exist_on_one_session() -> None:
    assert READING < USING < ALLOWED <= set(OPERATIONS) | OF_GUESTS
    assert all(OPERATIONS[name].session for name in ALLOWED if name in OPERATIONS)


def test_no_two_routes_are_the_same() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    for route in ROUTES:
        segments = [part.replace("{", "").replace("}", "") for part in route.path.split("/")[1:]]
        assert routes.find(segments).routes[route.method] is route


def test_labels_of_conversations_are_those_of_the_gateway() -> None:
    ours = sandboxes.CONVERSATION_LABEL, sandboxes.USER_LABEL
    assert ours == conversations.OF_ONE_SANDBOX


def test_the_description_has_every_route_and_refers_to_what_it_has() -> None:
    told = json.loads(openapi.document("x"))
    assert told["openapi"] == "3.1.0"
    known = {
        (method.upper(), path) for path, methods in told["paths"].items() for method in methods
    }
    assert known == {(route.method, route.path) for route in ROUTES}
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)))
    assert referred == set(told["components"]["schemas"])


def test_the_page_has_every_route_and_nothing_from_elsewhere() -> None:
    told = page.document("x")

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "img", "link", "iframe", "object", "form")
            for name, value in attrs:
                assert not name.startswith("on")
                if name in ("href", "src"):
                    assert str(value).startswith(("#", "/openapi.json"))

    Reader().feed(told)
    assert all(f"id={route.name}" in told for route in ROUTES)
    assert "http://" not in told
    assert "https://" not in told
