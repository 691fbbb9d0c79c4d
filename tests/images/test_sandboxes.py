"""Sandboxes of both runtimes whose root is an image, an archive or a folder."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from k8e import settings
from k8e.conformance.sandbox import Outcome, Sandbox
from k8e.model import Limits, Rootfs, SandboxSpec, new_id
from k8e.runtimes import mounts
from k8e.runtimes.base import Binding
from k8e.runtimes.host import GUEST_PYTHON, Host
from k8e.runtimes.registry import Runtimes
from tests.images import registries
from tests.images.building import Archive, Built, busybox

RUNTIMES = ("container", "gvisor")
USERS = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder() -> Generator[Path]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with tempfile.TemporaryDirectory(prefix="k8e-", dir="/tmp") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def new_host(folder: Path) -> Host:
    """What a gateway has; a second one is what its successor has."""
    config = settings.load({"K8E_DATA_DIR": str(folder / "d"), "K8E_RUN_DIR": str(folder / "r")})
    for part, mode in ((config.data_dir, 0o711), (config.run_dir, 0o700)):
        part.mkdir(exist_ok=True)
        part.chmod(mode)
    host = Host(config)
    host.prepare()
    return host


@pytest.fixture(scope="module")
def host(folder: Path) -> Generator[Host]:
    umask = os.umask(0o077)  # as a gateway has it
    host = new_host(folder)
    yield host
    host.close()
    os.umask(umask)
    assert mounts.mounts_below(folder) == []


@contextlib.asynccontextmanager
async def launched(host: Host, runtime: str, kind: str, source: str) -> AsyncGenerator[Sandbox]:
    spec = SandboxSpec(new_id("sb"), Limits(), runtime, rootfs=Rootfs(kind, source))
    guest = await Runtimes(host).all[runtime].launch(spec)
    try:
        await guest.bind(Binding(env={"GREETING": "hello"}))
        yield Sandbox(guest)
    finally:
        await guest.kill()


def equation(line: str) -> tuple[str, str, str]:
    return line.partition("=")


async def sh(sandbox: Sandbox, script: str) -> Outcome:
    return await sandbox.run(["/bin/sh", "-c", script])


@pytest.fixture(scope="module")
def tools(registry: str) -> str:
    """An image with busybox, whose upper layers change what is below."""
    base = busybox(registries.program("busybox")).file("etc/passwd", USERS).file("etc/old", b"old")
    base.folder("data").file("data/below", b"x").file("etc/changed", b"before")
    base.file("app/mine", b"private", uid=1000, mode=0o600).file("app/roots", b"x", mode=0o600)
    upper = Archive().file("etc/.wh.old").file("etc/changed", b"after").folder("data")
    upper.file("data/.wh..wh..opq").file("data/above", b"y").device("dev/mem", 1, 1)
    # Places where k8e mounts something: whatever is there must not lead it elsewhere.
    upper.link("workspace", "/etc").link("tmp", "/").link("run", "/bin").link("home", "/data")
    image = Built([base, upper], env=["PATH=/special:/bin", "HOME=/root", "LANG=C", "MARK=image"])
    image.push(registry, "tools", "1")
    return f"{registry}/tools:1"


async def test_an_image_without_python_and_libc_runs_programs(
    host: Host, runtime: str, tools: str
) -> None:
    async with launched(host, runtime, "image", tools) as sandbox:
        done = await sh(sandbox, "id -un; uname; cat /etc/changed; ls /data; ls /etc/old")
        assert done.stdout.decode() == "user\nLinux\nafterabove\n", done.story()
        done = await sh(sandbox, "cat /app/mine; cat /app/roots")
        assert done.stdout == b"private"
        assert b"denied" in done.stderr
        await sandbox.write("/workspace/f", b"written")
        assert (await sh(sandbox, "cat /workspace/f; echo x > /etc/new")).stdout == b"written"
        assert await sandbox.read("/workspace/f") == b"written"
        done = await sh(sandbox, "env")
        env = {key: value for key, _, value in map(equation, done.text.splitlines())}
        assert env["PATH"] == "/special:/bin:/home/user/.local/bin:/run/k8e/guest/bin"
        assert (env["MARK"], env["GREETING"], env["HOME"]) == ("image", "hello", "/home/user")
        assert (env["LANG"], env["SHELL"]) == ("C", "/bin/sh")


async def test_the_image_knows_our_user_beside_its_own(
    host: Host, runtime: str, tools: str
) -> None:
    async with launched(host, runtime, "image", tools) as sandbox:
        names = [line.split(":")[0] for line in (await sh(sandbox, "cat /etc/passwd")).text.split()]
        assert names == ["root", "user", "nobody", "app"]
        done = await sh(sandbox, "cat /etc/hostname /etc/resolv.conf; cd /tmp && pwd; pwd -P")
        assert done.text.startswith("sandbox\nnameserver ")
        assert done.text.endswith("/tmp\n/tmp\n"), done.story()


async def test_tsx_is_there_for_images_with_node_and_says_what_is_missing_in_others(
    host: Host, runtime: str, tools: str, registry: str
) -> None:
    async with launched(host, runtime, "image", tools) as sandbox:
        done = await sh(sandbox, "tsx /workspace/_k8e_run.ts")
        assert (done.code, done.stdout) == (127, b""), done.story()
        assert b"there is no node on PATH" in done.stderr
    node = b'#!/bin/sh\n[ "$1" = --import ] && [ -f "$2" ] && echo "node runs $3"\n'
    image = busybox(registries.program("busybox")).file("special/node", node, mode=0o755)
    Built([image], env=["PATH=/special:/bin"]).push(registry, "node", "1")
    async with launched(host, runtime, "image", f"{registry}/node:1") as sandbox:
        done = await sh(sandbox, "tsx /workspace/_k8e_run.ts")
        assert done.stdout == b"node runs /workspace/_k8e_run.ts\n", done.story()


@pytest.mark.parametrize("language", ["python", "bash", "node"])
async def test_a_language_that_the_image_has_not_is_said_to_be_missing(
    host: Host, tools: str, language: str
) -> None:
    async with launched(host, "container", "image", tools) as sandbox:
        with pytest.raises(FileNotFoundError, match="the image has no"):
            await sandbox.run(language=language, code=b"1")


async def test_an_image_with_one_static_program_runs_it(
    host: Host, runtime: str, registry: str
) -> None:
    program = registries.program("busybox")
    Built([Archive().program(program, "busybox")], env=[]).push(registry, "static", "1")
    async with launched(host, runtime, "image", f"{registry}/static:1") as sandbox:
        done = await sandbox.run(["/busybox", "echo", "alone"])
        assert (done.code, done.stdout) == (0, b"alone\n"), done.story()
        with pytest.raises(FileNotFoundError):
            await sh(sandbox, "echo there is no shell")


ZIP = Path(GUEST_PYTHON).resolve().name.replace(".", "") + ".zip"
PRELOADED = """
#include <fcntl.h>
__attribute__((constructor)) static void start(void) { open("/tmp/preloaded", O_CREAT, 0666); }
"""


def preloaded(folder: Path) -> Path:
    """A library that leaves a mark wherever it is loaded."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a library with")
    library = folder / "preloaded.so"
    argv = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(argv, input=PRELOADED.encode(), check=True, timeout=60)
    return library


async def test_no_code_of_an_image_runs_in_the_guest(
    host: Host, runtime: str, registry: str, folder: Path
) -> None:
    layer = busybox(registries.program("busybox"))
    layer.program(preloaded(folder), "lib/preloaded.so")
    layer.file("etc/ld.so.preload", b"/lib/preloaded.so\n")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("encodings/__init__.py", "open('/tmp/imported', 'w')")
    for above in ("run", "run/k8e"):  # where Python would look for its modules
        layer.file(f"{above}/lib/{ZIP}", zipped.getvalue())
    Built([layer]).push(registry, "hostile", "1")
    async with launched(host, runtime, "image", f"{registry}/hostile:1") as sandbox:
        done = await sh(sandbox, "ls /tmp; cat /etc/ld.so.preload; echo $LANG $LC_ALL $TZ")
        assert done.text == "C.UTF-8\n", done.story()


@pytest.fixture(scope="module")
def pythonic(folder: Path, host: Host) -> Path:
    """An archive with a Python of its own, where no system has it: in /usr/local/bin."""
    root = folder / "pythonic"
    library = Path(sys.base_prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    skipped = shutil.ignore_patterns(
        "test", "tests", "*-packages", "config-*", "idlelib", "tkinter", "ensurepip", "__pycache__"
    )
    shutil.copytree(library, root / "usr/local/lib" / library.name, ignore=skipped)
    (root / "usr/local/bin").mkdir()
    interpreter = Path(sys.executable).resolve()
    shutil.copy(interpreter, root / "usr/local/bin/python3")
    linked = [interpreter, *(root / "usr/local/lib" / library.name).glob("lib-dynload/*.so")]
    told = subprocess.run(["ldd", *linked], check=True, capture_output=True, text=True).stdout
    for word in {word for word in told.split() if word.startswith("/") and ".so" in word}:
        file = Path(word.rstrip(":"))
        if file.is_relative_to(root):
            continue
        target = root / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.resolve(), target)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755)
    archive = folder / "pythonic.tar.gz"
    subprocess.run(["tar", "czf", archive, "-C", root, "."], check=True)
    shutil.rmtree(root)
    return archive


async def test_an_archives_own_python_runs_cold_and_warm(
    host: Host, runtime: str, pythonic: Path
) -> None:
    code = b"import json, os, sys; print(sys.executable, os.getuid())"
    async with launched(host, runtime, "tar", str(pythonic)) as sandbox:
        seen: set[bool] = set()
        for _ in range(200):
            done = await sandbox.run(language="python", code=code)
            assert done.text == "/usr/local/bin/python3 1000\n", done.story()
            seen.add(bool(done.exit["warm"]))
            if seen == {True, False}:
                break
        assert seen == {True, False}, "the first is cold, and then one waits"
        done = await sandbox.run(
            ["python3", "-c", "import ctypes, ssl; print(ssl.OPENSSL_VERSION)"]
        )
        assert done.text.startswith("OpenSSL"), done.story()


async def test_a_folder_is_a_root_that_nobody_can_write(
    host: Host, runtime: str, folder: Path
) -> None:
    root = folder / f"root, {runtime}:1"
    (root / "bin").mkdir(parents=True)
    for path in (root, root / "bin"):
        path.chmod(0o755)
    shutil.copy(registries.program("busybox"), root / "bin/busybox")
    (root / "bin/busybox").chmod(0o755)
    (root / "bin/sh").symlink_to("busybox")
    async with launched(host, runtime, "dir", str(root)) as sandbox:
        done = await sh(sandbox, "echo $((6 * 7)); echo x > /bin/new || busybox touch /new")
        assert done.stdout == b"42\n"
        assert done.code, done.story()
    assert {path.name for path in root.rglob("*")} == {"bin", "busybox", "sh"}


async def test_sandboxes_of_one_image_share_one_mount(host: Host, tools: str, folder: Path) -> None:
    roots = folder / "d/images/roots"
    async with launched(host, "container", "image", tools):
        before = mounts.mounts_below(roots)
        async with launched(host, "gvisor", "image", tools):
            assert mounts.mounts_below(roots) == before


async def test_an_image_that_a_sandbox_uses_outlives_its_removal(
    host: Host, registry: str, folder: Path
) -> None:
    Built([busybox(registries.program("busybox")).file("mark", b"removed")]).push(
        registry, "removed", "1"
    )
    name = f"{registry}/removed:1"
    async with launched(host, "gvisor", "image", name) as sandbox:
        [layer] = (await host.images.pull(name)).layers
        await host.images.remove(name)
        assert layer not in host.roots.prune()
        assert (await sh(sandbox, "cat /mark")).stdout == b"removed"
    assert layer in host.roots.prune()


async def test_a_successor_finds_the_sandbox_and_its_root_again(
    host: Host, runtime: str, tools: str, folder: Path
) -> None:
    spec = SandboxSpec(new_id("sb"), Limits(), runtime, rootfs=Rootfs("image", tools))
    guest = await Runtimes(host).all[runtime].launch(spec)
    await guest.bind(Binding(env={}))
    assert guest.link is not None
    guest.link.close()
    successor = new_host(folder)
    [adopted] = await Runtimes(successor).all[runtime].adopt()
    try:
        assert adopted.sandbox_id == spec.sandbox_id
        done = await sh(Sandbox(adopted), "cat /etc/changed")
        assert done.stdout == b"after"
        await successor.images.remove(tools)
        assert successor.roots.prune() == []
        done = await sh(Sandbox(adopted), "ls /data; echo $MARK")
        assert done.stdout == b"above\nimage\n"
        successor.close()
        assert mounts.mounts_below(folder / "d/images/roots"), "a sandbox lives on"
    finally:
        await adopted.kill()
        host.roots.free(spec.sandbox_id)
