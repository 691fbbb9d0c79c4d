"""Pods for tests without a kubelet: the guest of pods as a process of this computer, on loopback.

It has mounts and process ids of its own, as ``plain.py`` gives them, an address of its own below
127.0.0.0/8, and a token that a stand-in for the API server signs in the API server's form.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from k8e.guest.pod import POD_PORT, SILENCED
from k8e.runtimes import guest_package, rootfs
from k8e.runtimes.host import GUEST_PYTHON
from k8e.runtimes.kubernetes import objects
from k8e.runtimes.kubernetes.identity import AUDIENCE, PodIdentity

ISSUER = "https://kubernetes.default.svc.cluster.local"
START_SECONDS = 20.0
_OWN = ("--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
_START = """
set -e
cd "$1"; shift
for lent in $LENT; do mount --rbind "$lent" ".$lent"; done
mount -t proc proc proc
mount --rbind /dev dev
for name in run tmp home workspace; do mount -t tmpfs -o mode=755 "$name" "$name"; done
mount --bind tmp var/tmp
mkdir -p run/k8e/guest run/k8e/identity run/k8e/python
mount --bind "$PYTHON" run/k8e/python
mount --bind "$GUEST" run/k8e/guest
mount --bind "$IDENTITY" run/k8e/identity
exec chroot . /usr/bin/env -i PATH=/usr/bin:/bin LANG=C.UTF-8 IMAGE=yes \
  K8E_LINK_ADDRESS="$ADDRESS" K8E_LINK_AUTHORITY="$AUTHORITY" KUBERNETES_PORT=tcp \
  $SILENCED "$@"
"""
_numbers = itertools.count(os.getpid() << 4 & 0xFFF0)


class Issuer:
    """Signs tokens as the API server does."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        self.asked = 0

    async def fetch(self) -> tuple[str, dict[str, Any]]:
        """Name and keys, as the API server tells them."""
        self.asked += 1
        numbers = self._key.public_key().public_numbers()
        key = {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": "one"}
        key |= {"n": _words(_bytes(numbers.n)), "e": _words(_bytes(numbers.e))}
        return ISSUER, {"keys": [key]}

    def token(self, pod: PodIdentity, *, kid: str = "one", **claims: Any) -> bytes:
        """The token of a pod; ``claims`` replace some of it."""
        now = int(time.time())
        bound = {
            "namespace": pod.namespace,
            "pod": {"name": pod.name, "uid": pod.uid},
            "serviceaccount": {"name": pod.account, "uid": "u"},
        }
        told = {"iss": ISSUER, "aud": [AUDIENCE], "iat": now, "nbf": now, "exp": now + 600}
        told |= {"sub": f"system:serviceaccount:{pod.namespace}:{pod.account}"}
        told |= {"kubernetes.io": bound} | claims
        signed = f"{_words(_json({'alg': 'RS256', 'kid': kid}))}.{_words(_json(told))}".encode()
        made = self._key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
        return signed + b"." + _words(made).encode()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8)


def _words(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def new_address() -> str:
    """An address of loopback that no other pod has."""
    number = next(_numbers) & 0xFFFF
    return f"127.77.{number >> 8}.{number & 255 or 1}"


@functools.cache
def _packed() -> Path:
    """What the image with the guest has in it; removed with this process."""
    folder = tempfile.TemporaryDirectory(prefix="k8e-pods-")
    atexit.register(folder.cleanup)
    Path(folder.name).chmod(0o755)
    guest_package.pack_for_pods(Path(folder.name), GUEST_PYTHON)
    return Path(folder.name)


class PodProcess:
    """A pod of one container."""

    def __init__(self, folder: Path, authority: str, address: str = "") -> None:
        self.address = address or new_address()
        self.identity = folder / "identity"
        self.identity.mkdir(parents=True)
        self._folder, self._authority = folder, authority
        self._process: subprocess.Popen[bytes] | None = None

    def show(self, token: bytes, *, mode: int = 0o400) -> None:
        """Put a token where the kubelet would."""
        scratch = self.identity / "new"
        scratch.write_bytes(token)
        scratch.chmod(mode)
        scratch.rename(self.identity / "token")

    def start(self) -> None:
        """Start the container; its guest listens when this returns, or has ended."""
        packed = _packed()
        root = rootfs.make_skeleton(self._folder / "root")
        places = {
            "LENT": " ".join(rootfs.bound_folders()),
            "GUEST": str(packed / "guest"),
            "PYTHON": str(packed / "python"),
            "IDENTITY": str(self.identity),
            "ADDRESS": self.address,
            "AUTHORITY": self._authority,
            "SILENCED": " ".join(f"{name}={value}" for name, value in SILENCED.items()),
            "PATH": os.environ["PATH"],
        }
        program = [*objects.PYTHON, f"{objects.GUEST_FOLDER}/{objects.GUEST_FILE}"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *_OWN, "sh", "-c", _START, "pod", str(root), *program],
                env=places,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while self.running:
            with contextlib.suppress(OSError):
                socket.create_connection((self.address, POD_PORT), 1).close()
                return
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(START_SECONDS)


@contextlib.contextmanager
def pod_process(folder: Path, authority: str) -> Generator[PodProcess]:
    made = PodProcess(folder, authority)
    try:
        yield made
    finally:
        made.stop()
