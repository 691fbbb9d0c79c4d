"""Pulling from a real registry, and from hostile ones."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from k8e import errors, settings
from k8e.images import registry
from k8e.images.manifest import parse_reference
from k8e.images.service import Images
from tests.images import registries
from tests.images.building import DOCKER, OTHER, Archive, Built, digest

Answer = tuple[int, dict[str, str], bytes]
Serve = Callable[[Callable[[BaseHTTPRequestHandler], Answer]], str]


@pytest.fixture
def serve() -> Generator[Serve]:
    """Starts web servers that say what a test wants; their hosts."""
    with ExitStack() as stack:

        def start(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> str:
            server = registries.serve(answer)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"127.0.0.1:{server.server_port}"

        yield start


def small(text: bytes = b"text") -> Built:
    return Built([Archive().file("f", text)])


def fetch(host: str, name: str = "tools", **options: Any) -> tuple[str, dict[str, Any]]:
    """The digest and the configuration of an image, straight from a registry."""
    client = registry.Registry(host, plain=False, **options)
    manifest, found = client.manifest(parse_reference(f"{host}/{name}:1"))
    return found, client.config(name, manifest.config)


# A real one.


@pytest.mark.parametrize("kind", ["oci", "docker"])
@pytest.mark.parametrize("indexed", [False, True], ids=["alone", "for-platforms"])
def test_every_kind_of_manifest_is_understood(registry: str, kind: str, indexed: bool) -> None:
    image = small()
    image.kind, image.indexed = kind, indexed
    name = f"kinds/{kind}-{indexed}".lower()
    pushed = image.push(registry, name, "1")
    found, config = fetch(registry, name)
    assert found == pushed
    assert config["architecture"] == "amd64"


def test_an_image_for_other_machines_is_refused_by_name(serve: Serve) -> None:
    listed = {
        "mediaType": DOCKER + "distribution.manifest.list.v2+json",
        "manifests": [{"digest": digest(b""), "size": 0, "platform": OTHER}],
    }
    host = serve(lambda _: (200, {}, json.dumps(listed).encode()))
    with pytest.raises(errors.ImageUnusable, match="only for linux/none"):
        fetch(host)


def test_an_image_that_is_not_there_is_said_to_be_not_there(registry: str) -> None:
    with pytest.raises(errors.ImageNotFound):
        fetch(registry, "nobody/has-this")


async def test_a_digest_in_the_reference_is_what_comes(registry: str, images: Images) -> None:
    first = small(b"first").push(registry, "moving", "1")
    small(b"second").push(registry, "moving", "1")
    pulled = await images.pull(f"{registry}/moving:1@{first}")
    assert pulled.digest == first
    assert (images.store.layer(pulled.layers[0]) / "f").read_bytes() == b"first"
    newest = await images.pull(f"{registry}/moving:1")
    assert newest.digest != first


def test_a_password_from_the_operators_file_is_used(tmp_path: Path) -> None:
    with registries.running(tmp_path / "r", registries.with_password(tmp_path)) as host:
        small().push(host, "tools", "1", registries.BASIC)
        with pytest.raises(errors.Denied) as caught:
            fetch(host)
        assert "K8E_REGISTRY_CREDENTIALS" in caught.value.hint
        wrong = base64.b64encode(b"k8e:wrong").decode()
        with pytest.raises(errors.Denied, match="refuses the password"):
            fetch(host, credentials=wrong)
        file = registries.docker_config(tmp_path / "config.json", host)
        fetch(host, credentials=registry.find(str(file), host))


def test_a_token_is_asked_for_and_used(tmp_path: Path) -> None:
    tokens = registries.Tokens(tmp_path)
    try:
        with registries.running(tmp_path / "r", tokens.auth()) as host:
            small().push(host, "tools", "1", "Bearer " + tokens.make("pull", "push"))
            with pytest.raises(errors.Denied):
                fetch(host)
            tokens.asked.clear()
            file = registries.docker_config(tmp_path / "config.json", host)
            fetch(host, credentials=registry.find(str(file), host))
        assert len(tokens.asked) == 1, "one token does for all calls"
        assert "service=tests" in tokens.asked[0]
        assert "scope=repository%3Atools%3Apull" in tokens.asked[0]
    finally:
        tokens.close()


# Hostile ones.


def manifest_of(image: Built) -> bytes:
    return image.parts()[1][-1][1]


def honest(image: Built, request: BaseHTTPRequestHandler) -> Answer:
    """What a registry with one image answers."""
    blobs, manifests = image.parts()
    kind, body = manifests[-1]
    if "/manifests/" in request.path:
        return 200, {"Content-Type": kind}, body
    wanted = request.path.rpartition("/")[2]
    return (200, {}, blobs[wanted]) if wanted in blobs else (404, {}, b"")


async def pull(images: Images, host: str) -> None:
    async with asyncio.timeout(30):
        await images.pull(f"{host}/tools:1")


async def test_a_layer_with_another_digest_is_refused(serve: Serve, images: Images) -> None:
    image, other = small(b"good"), small(b"evil")
    evil = other.layers[0].gzipped()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        status, headers, body = honest(image, request)
        layer = body.startswith(b"\x1f\x8b")
        return status, headers, evil[: len(body)].ljust(len(body), b"\0") if layer else body

    with pytest.raises(errors.ImageUnusable, match="its digest is"):
        await pull(images, serve(answer))
    assert await images.listing() == []


async def test_a_layer_that_is_not_what_the_configuration_says_is_refused(
    serve: Serve, images: Images
) -> None:
    image = small(b"good")
    blobs, [(kind, body)] = image.parts()
    manifest = json.loads(body)
    evil = Archive().file("f", b"evil").gzipped()
    manifest["layers"][0] |= {"digest": digest(evil), "size": len(evil)}
    blobs[digest(evil)] = evil

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if "/manifests/" in request.path:
            return 200, {"Content-Type": kind}, json.dumps(manifest).encode()
        return 200, {}, blobs[request.path.rpartition("/")[2]]

    with pytest.raises(errors.ImageUnusable, match="not what the image says"):
        await pull(images, serve(answer))


async def test_a_manifest_with_another_digest_is_refused(serve: Serve, images: Images) -> None:
    host = serve(lambda request: honest(small(), request))
    with pytest.raises(errors.ImageUnusable, match="the manifest is not what it should be"):
        await images.pull(f"{host}/tools:1@{digest(b'another')}")


async def test_a_layer_that_goes_on_too_long_is_cut_off(serve: Serve, images: Images) -> None:
    def answer(request: BaseHTTPRequestHandler) -> Answer:
        status, headers, body = honest(small(), request)
        return status, headers, body + bytes(1 << 20) if body.startswith(b"\x1f\x8b") else body

    with pytest.raises(errors.ImageUnusable, match="larger than its manifest says"):
        await pull(images, serve(answer))


async def test_a_broken_connection_is_tried_again(serve: Serve, images: Images) -> None:
    asked: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        status, headers, body = honest(small(), request)
        if body.startswith(b"\x1f\x8b"):
            asked.append(request.path)
            if len(asked) == 1:
                return status, {"Content-Length": str(len(body)), "Connection": "close"}, body[:20]
        return status, headers, body

    await pull(images, serve(answer))
    assert len(asked) == 2


def test_an_answer_without_end_is_cut_off(serve: Serve) -> None:
    host = serve(lambda _: (200, {}, b" " * (registry.MOST_DOCUMENT + 1)))
    with pytest.raises(errors.ImageUnusable, match="more than"):
        fetch(host)


def test_a_password_does_not_follow_a_redirect_to_another_host(serve: Serve) -> None:
    image, seen = small(), list[str | None]()

    def elsewhere(request: BaseHTTPRequestHandler) -> Answer:
        seen.append(request.headers.get("Authorization"))
        return honest(image, request)

    other = serve(elsewhere)

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if request.headers.get("Authorization") != registries.BASIC:
            return 401, {"WWW-Authenticate": 'Basic realm="tests"'}, b""
        if "/blobs/" in request.path:
            return 307, {"Location": f"http://{other}{request.path}"}, b""
        return honest(image, request)

    fetch(serve(answer), credentials=registries.BASIC.removeprefix("Basic "))
    assert seen == [None]


def test_a_password_does_not_go_where_the_target_of_a_redirect_says(serve: Serve) -> None:
    seen: list[str | None] = []

    def thief(request: BaseHTTPRequestHandler) -> Answer:
        seen.append(request.headers.get("Authorization"))
        return 200, {}, b'{"token": "x"}'

    realm = f'Bearer realm="http://{serve(thief)}/token"'
    other = serve(lambda _: (401, {"WWW-Authenticate": realm}, b""))
    host = serve(lambda request: (307, {"Location": f"http://{other}{request.path}"}, b""))
    with pytest.raises(errors.ImageUnusable, match="a host that asks who we are"):
        fetch(host, credentials=registries.BASIC.removeprefix("Basic "))
    assert seen == []


@pytest.mark.parametrize("where", ["http://other.example/x", "http://127.0.0.1/x"])
def test_a_registry_without_tls_sends_us_without_it_only_to_itself(where: str) -> None:
    client = registry.Registry("r.example:5000", plain=True)
    check = client._check_address  # pyright: ignore[reportPrivateUsage]
    check("http://r.example:6000/token")
    check("https://other.example/x")
    with pytest.raises(errors.ImageUnusable, match="not to https"):
        check(where)


@pytest.mark.parametrize("part", ["header", "body"])
def test_an_answer_that_comes_byte_by_byte_ends_in_time(
    serve: Serve, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if part == "body":
            request.send_response(200)
            request.send_header("Content-Length", "100000")
            request.end_headers()
        with contextlib.suppress(OSError):
            while not over.wait(0.05):
                request.wfile.write(b"x")
        return 200, {}, b""

    host = serve(answer)
    client = registry.Registry(host, plain=False)
    client._scheme = "http"  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(registry, "DOCUMENT_SECONDS", 0.5)
    try:
        with pytest.raises(errors.ImageUnusable, match=r"took more than 0\.5 s"):
            client.manifest(parse_reference(f"{host}/tools:1"))
    finally:
        over.set()


def test_what_is_both_a_list_and_an_image_is_refused(serve: Serve) -> None:
    both = json.loads(manifest_of(small())) | {"manifests": []}
    host = serve(lambda _: (200, {}, json.dumps(both).encode()))
    with pytest.raises(errors.ImageUnusable, match="both a list of images and an image"):
        fetch(host)


@pytest.mark.parametrize("where", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x/"])
def test_a_redirect_to_something_else_than_the_web_is_refused(serve: Serve, where: str) -> None:
    host = serve(lambda _: (302, {"Location": where}, b""))
    with pytest.raises(errors.ImageUnusable, match="not to https"):
        fetch(host)


def test_redirects_in_a_circle_end(serve: Serve) -> None:
    host = serve(lambda request: (302, {"Location": request.path}, b""))
    with pytest.raises(errors.ImageUnusable, match="again and again"):
        fetch(host)


def test_a_token_from_a_place_without_tls_is_refused_where_the_registry_has_it() -> None:
    client = registry.Registry("r.example", plain=False)
    with pytest.raises(errors.ImageUnusable, match="not to https"):
        client._token({"realm": "http://evil.example/token"})  # pyright: ignore[reportPrivateUsage]


def test_without_tls_only_loopback_and_listed_registries_are_used(serve: Serve) -> None:
    host = serve(lambda request: honest(small(), request))
    assert registry.is_loopback(host)
    assert registry.is_loopback("localhost:5000")
    assert registry.is_loopback("[::1]:5000")
    assert not registry.is_loopback("r.example:5000")
    assert not registry.is_loopback("localhost.evil.example")
    assert not registry.is_loopback("10.0.0.1")


def nowhere(_: str) -> bool:
    return False


def test_a_registry_without_tls_that_is_not_listed_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = serve(lambda request: honest(small(), request))
    monkeypatch.setattr(registry, "is_loopback", nowhere)
    with pytest.raises(errors.ImageUnusable, match="does not speak TLS") as caught:
        fetch(host)
    assert "K8E_INSECURE_REGISTRIES" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mediaType": "application/vnd.strange"}, "manifest is of the kind"),
        ({"layers": [{"mediaType": DOCKER + "image.rootfs.foreign.diff.tar.gzip"}]}, "layer is of"),
        ({"layers": "none"}, "does not fit its layers"),
        ({"config": 5}, "config has no sha256 digest"),
        ({"config": {"digest": "sha256:../../x", "size": 1}}, "config has no sha256 digest"),
        ({"config": {"digest": digest(b""), "size": -1}}, "config has no size"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    serve: Serve, images: Images, change: dict[str, Any], said: str
) -> None:
    image = small()
    body = json.dumps(json.loads(manifest_of(image)) | change).encode()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if "/manifests/" in request.path:
            return 200, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}, body
        return honest(image, request)

    host = serve(answer)
    with pytest.raises(errors.ImageUnusable, match=said):
        asyncio.run(images.pull(f"{host}/tools:1"))


def test_what_is_no_json_is_refused(serve: Serve) -> None:
    for body in (b"", b"[]", b"{", b"[" * 100_000):
        host = serve(lambda _, body=body: (200, {}, body))
        with pytest.raises(errors.ImageUnusable):
            fetch(host)


async def test_an_image_that_is_too_large_is_refused_before_it_is_fetched(
    serve: Serve, place: Path
) -> None:
    asked: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        asked.append(request.path)
        return honest(small(), request)

    folders = {"K8E_DATA_DIR": str(place / "d"), "K8E_RUN_DIR": str(place / "r")}
    limited = Images(settings.load(folders | {"K8E_MAX_IMAGE_BYTES": "10"}))
    limited.prepare()
    with pytest.raises(errors.ImageUnusable, match="more than 10 bytes"):
        await pull(limited, serve(answer))
    limited.close()
    assert not [path for path in asked if "/blobs/" in path]


# The operator's file.


def test_a_file_that_is_not_there_means_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.find("", "r.example") == ""
    with pytest.raises(errors.InvalidRequest, match="is not there"):
        registry.find(str(tmp_path / "missing"), "r.example")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"auths": 5}', '{"auths": {"r.example": {"auth": "!"}}}']
)
def test_a_file_that_cannot_be_understood_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(errors.InvalidRequest, match=r"config\.json"):
        registry.find(str(file), "r.example")


def test_a_password_is_for_its_registry_only(tmp_path: Path) -> None:
    auth = base64.b64encode(b"a:b").decode()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"auths": {"https://r.example/v1/": {"auth": auth}, "s:5": {}}}))
    assert registry.find(str(file), "r.example") == auth
    assert registry.find(str(file), "s:5") == ""
    assert registry.find(str(file), "r.example.evil") == ""
