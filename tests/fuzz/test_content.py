"""What sessions are made of, and what comes out of them: manifests, templates, archives, images."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import tempfile
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from k8e import errors, manifests, templates
from k8e.cli import sessions as cli_manifests
from k8e.images import manifest, registry
from k8e.images.unpack import Unpackers
from k8e.sessions.archives import TarListing
from tests.fuzz.running import fuzz
from tests.fuzz.values import JSON, damaged, fields
from tests.images.building import Archive, Built

MANIFEST = b"""entries:
- file: {path: a/b.txt, content: "x", mode: "0644"}
- dir: {path: c}
- gitRepo: {path: r, repo: "https://h.example/r", ref: main}
"""
TEMPLATE = b"""name: x
description: d
limits: {memory: 512M, cpus: 1.5}
env: {A: b}
allowed_hosts: [a.example, strict]
rootfs: "image:r.example/x:y"
lifetime: 60
"""


@fuzz(80)
@given(damaged(MANIFEST) | st.binary(max_size=60))
@example(b"[" * 5000)
@example(b"a: &a [*a]")
@example(b"- &a [&b [*a, *b], *b]")
def test_a_manifest_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(errors.K8eError):
        manifests.from_json(cli_manifests._parse(data, "m"))  # pyright: ignore[reportPrivateUsage]


@fuzz(60)
@given(
    st.lists(
        fields("file dir gitRepo path repo ref content mode content_base64".split()), max_size=3
    )
)
def test_entries_of_clients_are_read_or_refused(entries: list[Any]) -> None:
    with contextlib.suppress(errors.K8eError):
        assert manifests.from_json(entries).digest is not None


@fuzz(80)
@given(damaged(TEMPLATE) | st.binary(max_size=60), st.sampled_from(["x.yaml", "x.toml"]))
@example(b"[" * 5000, "x.yaml")
@example(b"a = " + b"[" * 5000, "x.toml")
@example(b"x: 2001-99-99", "x.yaml")
@example(b"x: !!python/object:os.system y", "x.yaml")
def test_a_template_is_read_or_refused_and_says_the_same_again(data: bytes, name: str) -> None:
    try:
        found = templates.parse(templates.load(data, name), "x", name)
    except errors.K8eError:
        return
    assert templates.parse(json.loads(json.dumps(found.to_json())), "x") == found


def test_a_template_of_nothing_but_references_takes_no_time() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join(['*' + before] * 9)}]")
    began = time.thread_time()
    for key in ("env: {A: *i}", "description: *i", "limits: *i", "name: *i"):
        found = templates.load("\n".join([*lines, key]).encode(), "x.yaml")
        with pytest.raises(errors.K8eError):
            templates.parse({name: found[name] for name in found if len(name) > 1}, "x")
    assert time.thread_time() - began < 2


# Archives.


def archive() -> bytes:
    made = Archive().folder("d").file("d/f", b"content" * 20).link("d/l", "f").hard_link("h", "d/f")
    return made.fifo("p").file("d/.wh.gone").plain()


TAR = archive()


@pytest.mark.skipif(os.geteuid() != 0, reason="the images of root's gateway")
@fuzz(25)
@given(damaged(TAR[:3000]).map(lambda data: data + TAR[3000:]) | st.binary(max_size=600))
@example(TAR)
@example(b"\x1f\x8b" + b"\0" * 100)
def test_an_archive_is_unpacked_inside_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "around", "target")
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        with open(Path(place, "archive"), "w+b") as file:
            file.write(data)
            file.seek(0)
            with contextlib.suppress(errors.ImageUnusable):
                assert Unpackers().unpack(file, folder, 1 << 20, 100).entries <= 100
        assert [path.name for path in folder.parent.iterdir()] == ["target"]
        assert {path.name for path in Path(place).iterdir()} == {"archive", "around"}


@fuzz(60)
@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([b"./a\n", b"./d/\n", b"tar: x\n", b"\n"]))
)
def test_what_tar_says_is_counted_however_it_is_cut(pieces: list[bytes]) -> None:
    whole, cut = TarListing(), TarListing()
    whole.add(b"".join(pieces))
    for piece in pieces:
        cut.add(piece)
    assert (cut.files, cut.rest.text()) == (whole.files, whole.rest.text())


def test_a_line_of_tar_without_end_takes_neither_time_nor_memory() -> None:
    listing = TarListing()
    began = time.thread_time()
    for _ in range(300_000):
        listing.add(b"x")
    assert time.thread_time() - began < 3


# Registries.

BUILT = Built([Archive().file("f", b"text")])


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    blobs, found = BUILT.parts()
    manifest = json.loads(found[-1][1])
    return manifest, json.loads(blobs[manifest["config"]["digest"]])


GOOD_MANIFEST, GOOD_CONFIG = documents()
KIND = BUILT.parts()[1][-1][0]


@fuzz(100)
@given(
    damaged(json.dumps(GOOD_MANIFEST).encode())
    | fields(["manifests", "layers", "config", "mediaType", "rootfs"], JSON).map(
        lambda value: json.dumps({**GOOD_MANIFEST, **value}).encode()
    ),
    damaged(json.dumps(GOOD_CONFIG).encode())
    | fields(["rootfs", "config", "os", "architecture"], JSON).map(
        lambda value: json.dumps({**GOOD_CONFIG, **value}).encode()
    ),
)
@example(b"[" * 100_000, b"{}")
@example(b'{"manifests": [[], 5, {"platform": 3}]}', b'{"rootfs": {"diff_ids": [[]]}}')
def test_what_registries_say_of_images_is_read_or_refused(body: bytes, config: bytes) -> None:
    with contextlib.suppress(errors.K8eError):
        document = manifest.parse(body, "it")
        manifest.refuse_ambiguous(document)
        if manifest.is_index(document, KIND):
            manifest.choose(document, "amd64")
        else:
            manifest.manifest(document, KIND)
    with contextlib.suppress(errors.K8eError):
        found = manifest.config(manifest.parse(config, "it"), 1)
        assert all(map(manifest.is_digest, found.diff_ids))


@contextlib.contextmanager
def saying(data: bytes) -> Generator[str]:
    """A server that answers every request with these bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(data)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - as it has it

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


ANSWER = (
    b"HTTP/1.1 401 No\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    b'WWW-Authenticate: Bearer realm="http://127.0.0.1:1/t",service="s",scope="x"\r\n'
    b"Location: /v2/else\r\nTransfer-Encoding: chunked\r\n\r\n{}"
)


@fuzz(12)
@given(
    damaged(ANSWER)
    | damaged(ANSWER.replace(b"401", b"307"))
    | damaged(ANSWER.replace(b"401", b"200"))
)
@example(b"")
@example(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n")
@example(b"HTTP/1.1 307 x\r\nLocation: http://[::1/\r\nContent-Length: 0\r\n\r\n")
@example(b"HTTP/1.1 307 x\r\nLocation: https://127.0.0.1:1\xff/ \x00\r\nContent-Length: 0\r\n\r\n")
@example(
    b'HTTP/1.1 401 x\r\nWWW-Authenticate: Bearer realm="http://[x"\r\nContent-Length: 0\r\n\r\n'
)
def test_a_registry_that_says_anything_is_refused_in_words(data: bytes) -> None:
    with saying(data) as host:
        client = registry.Registry(host, plain=True)
        with contextlib.suppress(errors.K8eError):
            client.manifest(manifest.parse_reference(f"{host}/x:y"))
        blob = manifest.Blob("sha256:" + "0" * 64, 100)
        with contextlib.suppress(errors.K8eError):
            client.config("x", blob)
        with pytest.raises(errors.K8eError):
            client.fetch("x", blob, io.BytesIO(), lambda count: None)


def test_yaml_of_everything_is_what_it_says() -> None:
    """A guard of the tests above: what they damage is good to begin with."""
    assert len(manifests.from_json(yaml.safe_load(MANIFEST)["entries"]).entries) == 3
    assert templates.parse(templates.load(TEMPLATE, "x.yaml"), "x", "x.yaml").lifetime == 60
