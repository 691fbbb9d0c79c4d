"""The card that anybody may read: where calls go, and what to show."""

from __future__ import annotations

import json

import pytest
from a2a.types import a2a_pb2 as pb
from google.protobuf.json_format import ParseDict

from k8e import __version__
from k8e.a2a import card


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1:8811", "http://127.0.0.1:8811/a2a"),
        ("localhost:1", "http://localhost:1/a2a"),
        ("localhost", "http://localhost/a2a"),
        ("[::1]:8811", "http://[::1]:8811/a2a"),
        ("[::1]", "http://[::1]/a2a"),
        ("agents.example", "https://agents.example/a2a"),
        ("agents.example:8443", "https://agents.example:8443/a2a"),
        ("[2001:db8::1]", "https://[2001:db8::1]/a2a"),
    ],
)
def test_card_gives_the_url_by_which_its_reader_came(host: str, url: str) -> None:
    found = json.loads(card.document(host))
    assert found["url"] == url
    assert [item["url"] for item in found["supportedInterfaces"]] == [url, url]


def test_card_says_which_credential_calls_need_and_nothing_of_this_installation() -> None:
    text = card.document("localhost:8811")
    found = ParseDict(json.loads(text), pb.AgentCard(), ignore_unknown_fields=True)
    assert found.security_schemes["bearer"].http_auth_security_scheme.scheme == "bearer"
    assert found.capabilities.streaming
    assert __version__ not in text
