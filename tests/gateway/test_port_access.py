"""Who may use an exposed service, judged request by request; no sandbox is needed for that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.gateway.ports import access
from k8e.gateway.ports.access import (
    Admitted,
    Greeted,
    Headers,
    PortAccess,
    PortRefusal,
    VisitRequest,
)

TOKEN = b"a2b3c4d5e6f7a2b3c4d5e6f7a2b3c4d5e6f7a2b3"
DOOR = PortAccess(b"127.7.8.9:700", TOKEN, b"key")
OTHER = PortAccess(b"127.7.8.9:701", TOKEN[::-1], b"another key")
USER = "1000"
COOKIE = DOOR.cookie_value(USER)
QUERY = b"/?k8e-token=" + TOKEN
HOST = (b"Host", DOOR.authority)
SHOWN = (b"X-K8e-Token", TOKEN)
BROWSER = [
    (b"User-Agent", b"Mozilla/5.0"),
    (b"Accept", b"text/html,*/*;q=0.8"),
]


def judge(
    target: bytes = b"/", *headers: tuple[bytes, bytes], method: bytes = b"GET", host: bool = True
) -> access.Verdict:
    given = [HOST, *headers] if host else list(headers)
    return access.judge(DOOR, VisitRequest(method, target, given, USER))


def admitted(
    target: bytes, *headers: tuple[bytes, bytes], method: bytes = b"GET"
) -> access.Admitted:
    verdict = judge(target, *headers, method=method)
    assert isinstance(verdict, Admitted), verdict
    return verdict


def refused(verdict: access.Verdict, status: int = 403) -> str:
    assert isinstance(verdict, PortRefusal), verdict
    assert verdict.status == status
    return verdict.text


def fetched(site: bytes, mode: bytes, dest: bytes) -> Headers:
    """What a browser says of where a request comes from."""
    return [(b"Sec-Fetch-Site", site), (b"Sec-Fetch-Mode", mode), (b"Sec-Fetch-Dest", dest)]


# The token.


def test_the_token_opens_the_door_in_the_query_in_the_header_and_in_the_cookie() -> None:
    assert admitted(QUERY).target == b"/"
    assert admitted(b"/x", SHOWN).target == b"/x"
    cookie = (b"Cookie", b"a=1; " + DOOR.cookie + b"=" + COOKIE)
    assert admitted(b"/x?y=1", cookie).target == b"/x?y=1"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"/", []),
        (b"/?k8e-token=", []),
        (b"/?k8e-token=" + TOKEN[:-1], []),
        (b"/?k8e-token=" + TOKEN + b"a", []),
        (b"/?k8e-token=" + TOKEN.upper(), []),
        (b"/?k8e-token=" + OTHER.token, []),
        (b"/k8e-token=" + TOKEN, []),
        (b"/?other=" + TOKEN, []),
        (b"/", [(b"X-K8e-Token", OTHER.token)]),
        (b"/", [(b"X-K8e-Token", b"")]),
        (b"/", [(b"X-K8e-Token", b"\xff\xfe")]),
        (b"/", [(b"Authorization", b"Bearer " + TOKEN)]),
        (b"/", [(b"Cookie", OTHER.cookie + b"=" + OTHER.cookie_value(USER))]),
        (b"/", [(b"Cookie", OTHER.cookie + b"=" + COOKIE)]),
        (b"/", [(b"Cookie", DOOR.cookie + b"=" + OTHER.cookie_value(USER))]),
        (b"/", [(b"Cookie", DOOR.cookie + b"=" + DOOR.cookie_value("1001"))]),
        (b"/", [(b"Cookie", DOOR.cookie + b"=" + DOOR.cookie_value(""))]),
        (b"/", [(b"Cookie", DOOR.cookie + b"=" + TOKEN)]),
        (b"/", [(b"Cookie", DOOR.cookie + b"=\xff")]),
        (b"/", [(b"X-K8e-Token", COOKIE)]),
        (b"/?k8e-token=" + COOKIE, []),
        (b"/", [(b"Cookie", DOOR.cookie)]),
        (b"/", [(b"Referer", DOOR.url)]),
    ],
)
def test_without_the_right_token_nothing_passes_and_the_way_to_get_it_is_told(
    target: bytes, headers: Headers
) -> None:
    assert "k8e sandbox exposed" in refused(judge(target, *headers))


def test_a_good_token_counts_whatever_else_is_shown() -> None:
    admitted(b"/?k8e-token=old&k8e-token=" + TOKEN)
    admitted(b"/?k8e-token=old", SHOWN)
    stale = (b"Cookie", DOOR.cookie + b"=old; " + DOOR.cookie + b"=" + COOKIE)
    admitted(b"/", stale)


def test_each_service_has_a_cookie_of_its_own_name() -> None:
    assert DOOR.cookie != OTHER.cookie
    assert DOOR.cookie.startswith(b"k8e-700-")
    assert TOKEN not in DOOR.cookie


def test_a_cookie_tells_neither_the_token_nor_the_cookie_of_another_service_or_user() -> None:
    moved = PortAccess(OTHER.authority, TOKEN, DOOR.cookie_key)
    others = [OTHER.cookie_value(USER), moved.cookie_value(USER), DOOR.cookie_value("1001")]
    assert COOKIE not in [TOKEN, *others]
    assert len(COOKIE) == 64


# The host.


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b"rebound.example"],
        [b"rebound.example:700"],
        [b"127.7.8.9"],
        [b"127.7.8.9:701"],
        [b"localhost:700"],
        [DOOR.authority, DOOR.authority],
        [DOOR.authority, b"rebound.example"],
        [b"user@127.7.8.9:700"],
        [b""],
    ],
)
def test_another_host_is_refused_even_with_the_token(hosts: list[bytes]) -> None:
    named = [(b"Host", host) for host in hosts]
    assert "127.7.8.9:700" in refused(judge(QUERY, *named, SHOWN, host=False), 421)


def test_a_whole_url_may_be_asked_for_if_it_is_ours() -> None:
    assert admitted(b"http://127.7.8.9:700/a?b=1", SHOWN).target == b"/a?b=1"
    assert admitted(b"http://127.7.8.9:700?b=1", SHOWN).target == b"/?b=1"
    assert admitted(b"HTTP://127.7.8.9:700", SHOWN).target == b"/"
    for target in (b"http://rebound.example/", b"http://127.7.8.9:7000/", b"http://127.7.8.9/"):
        refused(judge(target, SHOWN), 421)


def test_targets_that_are_no_paths_are_refused() -> None:
    assert admitted(b"*", SHOWN, method=b"OPTIONS").target == b"*"
    for target in (b"*", b"x", b"https://127.7.8.9:700/", b"ftp://x/", b"?k8e-token=" + TOKEN):
        refused(judge(target, SHOWN), 400)
    refused(judge(b"127.7.8.9:700", SHOWN, method=b"CONNECT"), 405)


# Other sites.


@pytest.mark.parametrize(
    "headers",
    [
        fetched(b"cross-site", b"cors", b"empty"),
        fetched(b"cross-site", b"no-cors", b"image"),
        fetched(b"cross-site", b"no-cors", b"script"),
        fetched(b"cross-site", b"navigate", b"iframe"),
        fetched(b"cross-site", b"navigate", b"object"),
        fetched(b"cross-site", b"websocket", b"websocket"),
        fetched(b"same-site", b"cors", b"empty"),
        fetched(b"something-new", b"cors", b"empty"),
        [(b"Origin", b"https://evil.example")],
        [(b"Origin", b"http://127.7.8.9:701")],
        [(b"Origin", b"http://127.7.8.9")],
        [(b"Origin", b"null")],
        [(b"Origin", DOOR.origin), (b"Origin", b"https://evil.example")],
        [(b"Sec-Fetch-Site", b"same-origin"), (b"Sec-Fetch-Site", b"cross-site")],
        [(b"Sec-Fetch-Site", b"same-origin"), (b"Origin", b"https://evil.example")],
        [(b"Sec-Fetch-Site", b"none"), (b"Origin", b"null")],
    ],
)
@pytest.mark.parametrize("target", [QUERY, b"/"])
def test_other_sites_pages_can_do_nothing_even_with_the_token(
    target: bytes, headers: Headers
) -> None:
    assert "k8e sandbox exposed" in refused(judge(target, SHOWN, *headers))
    refused(judge(target, SHOWN, *headers, method=b"POST"))


def test_a_link_on_another_site_works_only_with_the_token_in_it_and_only_as_a_page() -> None:
    navigation = fetched(b"cross-site", b"navigate", b"document")
    greeted = judge(b"/a?k8e-token=" + TOKEN + b"&b=1", *navigation)
    assert greeted == Greeted(b"http://127.7.8.9:700/a?b=1", by_page=True, client=USER)
    refused(judge(b"/a", SHOWN, *navigation))
    refused(judge(QUERY, *navigation, method=b"POST"))


def test_the_services_own_pages_may_do_everything() -> None:
    for mode in (b"cors", b"no-cors", b"same-origin", b"websocket"):
        headers = fetched(b"same-origin", mode, b"empty")
        admitted(b"/", SHOWN, (b"Origin", DOOR.origin), *headers, method=b"POST")
    # A form on a page with `Referrer-Policy: no-referrer`, such as many frameworks send.
    form = [(b"Sec-Fetch-Site", b"same-origin"), (b"Origin", b"null")]
    admitted(b"/", SHOWN, *form, method=b"POST")
    admitted(b"/", SHOWN, *fetched(b"none", b"navigate", b"document"))


def test_service_workers_which_would_see_the_token_are_refused() -> None:
    text = refused(judge(b"/sw.js", SHOWN, (b"Service-Worker", b"script")))
    assert "ervice worker" in text


# Browsers.


@pytest.mark.parametrize(
    "headers", [[*BROWSER], [*BROWSER, *fetched(b"none", b"navigate", b"document")]]
)
def test_a_browser_gets_a_cookie_and_an_address_without_the_token(headers: Headers) -> None:
    greeted = judge(b"/p?a=1&k8e-token=" + TOKEN + b"&b=%26", *headers)
    assert greeted == Greeted(b"http://127.7.8.9:700/p?a=1&b=%26", by_page=False, client=USER)
    assert isinstance(greeted, Greeted)
    page = access.greeting(DOOR, greeted)
    assert page.status == 303
    found = dict(page.headers)
    assert found[b"Location"] == b"http://127.7.8.9:700/p?a=1&b=%26"
    name, _, rest = found[b"Set-Cookie"].partition(b"=")
    assert name == DOOR.cookie
    assert rest.split(b"; ") == [COOKIE, b"Path=/", b"HttpOnly", b"SameSite=Strict"]
    assert found[b"Referrer-Policy"] == b"no-referrer"
    assert found[b"Cache-Control"] == b"no-store"


def test_a_redirect_never_leads_to_another_host() -> None:
    greeted = judge(b"//evil.example/?k8e-token=" + TOKEN, *BROWSER)
    assert isinstance(greeted, Greeted)
    assert greeted.location == b"http://127.7.8.9:700//evil.example/"


def test_the_page_for_other_sites_links_is_not_to_be_broken_out_of() -> None:
    target = b"/'\"><script>alert(1)</script>;url=http://evil.example?k8e-token=" + TOKEN
    greeted = judge(target, *fetched(b"cross-site", b"navigate", b"document"))
    assert isinstance(greeted, Greeted)
    page = access.greeting(DOOR, greeted)
    assert page.status == 200
    assert b"<script" not in page.body
    assert b"url=http://127.7.8.9:700/&#x27;&quot;&gt;" in page.body
    assert TOKEN not in page.body
    assert dict(page.headers)[b"Content-Security-Policy"] == b"default-src 'none'"


def test_programs_and_pages_that_fetch_get_no_redirect() -> None:
    admitted(QUERY, (b"Accept", b"*/*"), (b"User-Agent", b"curl/8"))
    admitted(QUERY, *BROWSER, *fetched(b"same-origin", b"cors", b"empty"))
    admitted(QUERY, *BROWSER, method=b"POST")


# What the sandbox sees.


def test_the_sandbox_sees_neither_query_header_cookie_nor_referer_of_ours() -> None:
    seen = admitted(
        b"/a?x=1&k8e-token=" + TOKEN + b"&%6B8e-token=" + TOKEN + b"&y=2",
        SHOWN,
        (b"Cookie", b"one=1; " + DOOR.cookie + b"=" + COOKIE + b"; two=2"),
        (b"cookie", OTHER.cookie + b"=" + OTHER.cookie_value(USER)),
        (b"Referer", DOOR.origin + b"/b?k8e-token=" + TOKEN + b"&z=3"),
        (b"Authorization", b"Bearer " + TOKEN),
        (b"X-Original-Url", DOOR.url),
        (b"Accept", b""),
    )
    assert seen.target == b"/a?x=1&y=2"
    assert seen.headers == [
        HOST,
        (b"Cookie", b"one=1; two=2"),
        (b"Referer", DOOR.origin + b"/b?z=3"),
        (b"Accept", b""),
        (b"Connection", b"close"),
    ]


def test_a_token_that_would_stay_in_the_address_is_refused() -> None:
    for target in (b"/" + TOKEN, b"/?a=1;k8e-token=" + TOKEN, b"/?x=" + TOKEN):
        refused(judge(target, SHOWN), 400)
    refused(judge(b"/" + TOKEN + b"?k8e-token=" + TOKEN, *BROWSER), 400)


NAMES = st.sampled_from(
    [b"Cookie", b"Referer", b"X-K8e-Token", b"Origin", b"Connection", b"X-Any", b"Upgrade", b"TE"]
)
BITS = st.sampled_from(
    [
        *(TOKEN, DOOR.cookie, DOOR.origin, b"k8e-token=", b"%6b8e-token", b"=", b";", b"; ", b"&"),
        *(b"?", b"#", b"%3D", b"/", b"a", b" ", b",", b"close", b"upgrade", b"websocket", b"x-any"),
    ]
)
PARTS = st.sampled_from([b"a=1", b"b", b"k8e-token=x", b"K8E-Token", b"%6b8e-token=y", b""])
TEXTS = st.lists(BITS, max_size=8).map(b"".join)


@given(
    target=TEXTS.map(lambda text: b"/" + text.replace(b" ", b"")),
    headers=st.lists(st.tuples(NAMES, TEXTS), max_size=6),
)
def test_nothing_that_passes_has_the_token_anywhere(target: bytes, headers: Headers) -> None:
    verdict = judge(target, SHOWN, *headers)
    if isinstance(verdict, Admitted):
        assert TOKEN not in verdict.target
        assert all(TOKEN not in value for _, value in verdict.headers)
        assert not [name for name, _ in verdict.headers if name.lower() == b"x-k8e-token"]
        assert not [name for name, _ in access.cookies(verdict.headers) if name[:4] == b"k8e-"]


@given(st.lists(PARTS))
def test_what_is_not_the_token_stays_in_the_query_as_it_was(parts: list[bytes]) -> None:
    target = b"/p?" + b"&".join(parts)
    kept = [part for part in parts if not part.lower().startswith((b"k8e-token", b"%6b8e-token"))]
    found = access.without_token(target)
    assert found == (target if kept == parts else b"/p" + (b"?" + b"&".join(kept) if kept else b""))


# Headers for one connection only.


def test_headers_for_one_connection_only_go_no_further() -> None:
    seen = admitted(
        b"/",
        SHOWN,
        (b"Connection", b"keep-alive, X-Secret"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Proxy-Authorization", b"Basic x"),
        (b"TE", b"trailers"),
        (b"Upgrade", b"h2c"),
        (b"X-Secret", b"1"),
        (b"X-Kept", b"1"),
    )
    assert seen.headers == [HOST, (b"X-Kept", b"1"), (b"Connection", b"close")]
    assert not seen.websocket


def test_a_chunked_request_stays_one_and_has_no_length() -> None:
    chunked = (b"Transfer-Encoding", b"chunked")
    seen = admitted(b"/", SHOWN, chunked, (b"Content-Length", b"5"), method=b"POST")
    assert seen.headers == [HOST, chunked, (b"Connection", b"close")]


def test_a_websocket_is_the_only_upgrade() -> None:
    asked = [(b"Connection", b"keep-alive, Upgrade"), (b"Upgrade", b"WebSocket")]
    seen = admitted(b"/", SHOWN, *asked, (b"Sec-WebSocket-Key", b"x"))
    assert seen.websocket
    assert seen.headers[-2:] == [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    for upgrade in (b"h2c", b"websocket, h2c", b"TLS/1.0"):
        headers = [(b"Connection", b"Upgrade"), (b"Upgrade", upgrade)]
        assert not admitted(b"/", SHOWN, *headers).websocket


def test_answers_lose_what_is_ours_or_for_one_connection_and_nothing_else() -> None:
    given_headers = [
        (b"Server", b"x"),
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"7"),
        (b"Set-Cookie", b"app=1; Path=/"),
        (b"Set-Cookie", DOOR.cookie + b"=evil"),
        (b"set-cookie", b" K8E-anything=evil"),
        (b"Set-Cookie", b"=" + DOOR.cookie + b"=evil"),
        (b"Access-Control-Allow-Origin", b"*"),
    ]
    assert access.answer_headers(given_headers) == [
        (b"Server", b"x"),
        (b"Set-Cookie", b"app=1; Path=/"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"Referrer-Policy", b"same-origin"),
    ]
    chosen = [(b"referrer-policy", b"unsafe-url")]
    assert access.answer_headers(chosen) == chosen


def test_a_refusal_is_plain_text_that_no_page_can_be_made_of() -> None:
    page = access.refusal(PortRefusal(502, "a\r\nb\x1b[31m<script>" + "x" * 5000))
    assert page.body.startswith(b"k8e: a  b [31m<script>xxx")
    assert len(page.body) < 1100
    found = dict(page.headers)
    assert found[b"Content-Type"] == b"text/plain; charset=utf-8"
    assert found[b"X-Content-Type-Options"] == b"nosniff"
    assert b"Set-Cookie" not in found
