"""The approver's secret: what makes an approval more than the asker's own word."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import time
from collections import deque

from k8e import errors
from k8e.sessions.approval_store import ApprovalStore

MIN_SECRET = 12  # characters
MAX_SECRET = 1024
MAX_WRONG = 10  # wrong secrets …
WRONG_SECONDS = 60.0  # … in this time, after which none is tried any more
# 32 MiB and a tenth of a second for each guess.
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}


def _hash(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode("utf-8", "surrogateescape"), salt=salt, **_SCRYPT)


class Approver:
    """Knows whether a caller knows the secret; keeps only a salted hash of it."""

    def __init__(self, store: ApprovalStore) -> None:
        self._store = store
        self._one = asyncio.Lock()  # a flood of guesses takes the memory and the CPU of one
        self._wrong: deque[float] = deque()

    @property
    def configured(self) -> bool:
        return self._store.approver() is not None

    async def configure(self, secret: str, current: str) -> None:
        """Set the secret; replacing one needs the one of before."""
        if not MIN_SECRET <= len(secret) <= MAX_SECRET:
            raise errors.InvalidRequest(
                f"an approver's secret has {MIN_SECRET} to {MAX_SECRET} characters"
            )
        salt = os.urandom(16)
        # One at a time, to the end: of two that come at once, the second needs the first's secret.
        async with self._one:
            if self.configured:
                if not current:
                    raise errors.Conflict(
                        "there is an approver already",
                        hint="k8e approver init --replace asks for the secret of before",
                    )
                await self._compare(current)
            digest = await asyncio.to_thread(_hash, secret, salt)
            self._store.set_approver(salt, digest)

    async def check(self, secret: str) -> None:
        """Return if the secret is right."""
        if not secret:
            raise errors.Denied(
                "this needs the approver's secret",
                hint="set K8E_APPROVER_SECRET, use --secret-file, or answer on a terminal",
            )
        async with self._one:
            await self._compare(secret)

    async def _compare(self, secret: str) -> None:
        self._refuse_floods()
        known = self._store.approver()
        right = (
            known is not None
            and len(secret) <= MAX_SECRET
            and hmac.compare_digest(await asyncio.to_thread(_hash, secret, known[0]), known[1])
        )
        if not right:
            self._wrong.append(time.monotonic())
            raise errors.Denied(
                "this is not the approver's secret",
                hint="it is what k8e approver init printed, or the passphrase given there",
            )

    def _refuse_floods(self) -> None:
        while self._wrong and self._wrong[0] < time.monotonic() - WRONG_SECONDS:
            self._wrong.popleft()
        if len(self._wrong) >= MAX_WRONG:
            raise errors.LimitExceeded(
                f"{MAX_WRONG} wrong secrets within {WRONG_SECONDS:g} s",
                hint="wait a minute; somebody may be guessing",
            )
