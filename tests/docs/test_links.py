"""Links lead somewhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.documents import ROOT, all_documents, anchors, links

DOCUMENTS = all_documents()
OUTSIDE = {"gvisor.dev", "keepachangelog.com", "semver.org"}
"""Where documents may link to; anything else is better said in our own words."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    dead: list[str] = []
    for line, link in links(document):
        target = urlsplit(link)
        if target.scheme:
            if target.hostname not in OUTSIDE:
                dead.append(f"line {line}: {link} is not one of the known places")
            continue
        path = (document.parent / target.path).resolve() if target.path else document
        if not path.exists():
            dead.append(f"line {line}: {link} does not exist")
        elif target.fragment and target.fragment not in anchors(path):
            dead.append(f"line {line}: {link} has no such heading")
    assert not dead, "\n".join(dead)


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    waiting = list(reached)
    while waiting:
        document = waiting.pop()
        for _, link in links(document):
            target = urlsplit(link)
            path = (document.parent / target.path).resolve()
            if not target.scheme and path.suffix == ".md" and path.exists() and path not in reached:
                reached.add(path)
                waiting.append(path)
    missing = {str(path.relative_to(ROOT)) for path in set(DOCUMENTS) - reached}
    assert not missing - {"AGENTS.md"}
