"""Secrets of users: set, listed by name, deleted, and given to sessions as variables.

A secret belongs to a principal and one of its tenants. No call ever returns a value; of course a
program in a session that got it can print it.

Values are encrypted by ChaCha20-Poly1305, each bound to its place, so that rows cannot be swapped.
The key is a file beside the database, or one that the operator names (K8E_SECRETS_KEY_FILE): a copy
of the database alone is useless. A file of its own: it is written seldom, and deleted values must
be gone.
"""

from __future__ import annotations

import asyncio
import os
import secrets as random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8e import database, errors
from k8e.model import SecretRef, check_secret_name, check_tenant

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305


MIGRATIONS = (
    """
    CREATE TABLE secrets (
        owner      TEXT NOT NULL,
        tenant     TEXT NOT NULL,
        name       TEXT NOT NULL,
        key        TEXT NOT NULL,
        value      BLOB NOT NULL,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (owner, tenant, name, key)
    ) STRICT;
    CREATE TABLE cipher (one INTEGER PRIMARY KEY CHECK (one = 1), proof BLOB NOT NULL) STRICT;
    """,
)
_COLUMNS = "owner, tenant, name, key, created_at, updated_at"


@dataclass(frozen=True)
class Secret:
    """A secret of an owner, without its value."""

    owner: str
    tenant: str
    name: str
    key: str
    """A secret has one value or several, each under a key."""
    created_at: float
    updated_at: float

    def to_json(self) -> dict[str, Any]:
        """The fields that its owner may see."""
        return {
            "name": self.name,
            "key": self.key,
            "tenant_id": self.tenant,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
        }


class SecretStore:
    """The secrets of one gateway; their values are opened by :mod:`k8e.sessions.secrets` alone."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=True)
        self._db.execute("PRAGMA secure_delete=ON")

    def close(self) -> None:
        self._db.close()

    def put(self, secret: Secret, value: bytes) -> None:
        """Store a value, in place of an older one."""
        self._db.execute(
            "INSERT INTO secrets (owner, tenant, name, key, value, created_at, updated_at)"
            " VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET value=excluded.value,"
            " updated_at=excluded.updated_at",
            (
                secret.owner,
                secret.tenant,
                secret.name,
                secret.key,
                value,
                secret.created_at,
                secret.updated_at,
            ),
        )
        self._sweep()

    def value(self, owner: str, tenant: str, name: str, key: str) -> bytes | None:
        query = "SELECT value FROM secrets WHERE owner=? AND tenant=? AND name=? AND key=?"
        row = self._db.execute(query, (owner, tenant, name, key)).fetchone()
        return None if row is None else bytes(row[0])

    def listing(self, owner: str, tenant: str = "") -> list[Secret]:
        """The secrets of an owner, by tenant and name; of one tenant, if it is given."""
        condition, values = "owner=?", (owner,)
        if tenant:
            condition, values = "owner=? AND tenant=?", (owner, tenant)
        query = f"SELECT {_COLUMNS} FROM secrets WHERE {condition} ORDER BY tenant, name, key"  # noqa: S608 - our constants
        return [Secret(*row) for row in self._db.execute(query, values)]

    def count(self, owner: str) -> int:
        query = "SELECT count(*) FROM secrets WHERE owner=?"
        return int(self._db.execute(query, (owner,)).fetchone()[0])

    def delete(self, owner: str, tenant: str, name: str, key: str = "") -> int:
        """Remove a secret, or one value of it; return how many values there were."""
        condition, values = "owner=? AND tenant=? AND name=?", [owner, tenant, name]
        if key:
            condition, values = f"{condition} AND key=?", [*values, key]
        done = self._db.execute(f"DELETE FROM secrets WHERE {condition}", values)  # noqa: S608 - our constants
        self._sweep()
        return done.rowcount

    def evict(self, owner: str) -> int:
        """Remove all secrets of an owner."""
        done = self._db.execute("DELETE FROM secrets WHERE owner=?", (owner,))
        self._sweep()
        return done.rowcount

    def owners(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT DISTINCT owner FROM secrets")}

    def is_empty(self) -> bool:
        return self._db.execute("SELECT 1 FROM secrets LIMIT 1").fetchone() is None

    def _sweep(self) -> None:
        """Remove old values from the write-ahead log as well."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # The proof that a key is the right one.

    def proof(self) -> bytes | None:
        row = self._db.execute("SELECT proof FROM cipher").fetchone()
        return None if row is None else bytes(row[0])

    def set_proof(self, proof: bytes) -> None:
        self._db.execute("REPLACE INTO cipher (one, proof) VALUES (1, ?)", (proof,))


MAX_VALUE = 16 << 10  # bytes
MAX_SECRETS = 1000  # values of one owner
MAX_RESOLVED = 64 << 10  # bytes of all secrets of one session
KEY_FILE = "secrets.key"
KEY_BYTES = 32
_NONCE_BYTES = 12
_PROOF = b"k8e secrets"
_KEY_HINT = "put the file back; or, to give all secrets up, remove it together with secrets.db"


class Secrets:
    """All secrets of this gateway, on one event loop."""

    def __init__(self, data_dir: Path, key_file: str = "") -> None:
        self._store = SecretStore(data_dir / "secrets.db")
        self._own_key = data_dir / KEY_FILE
        self._given_key = Path(key_file) if key_file else None
        self._lock = asyncio.Lock()
        self._loaded: ChaCha20Poly1305 | None = None

    def close(self) -> None:
        self._store.close()

    # Managing.

    async def set(self, owner: str, tenant: str, name: str, key: str, value: str) -> Secret:
        """Store a value in place of an older one; sessions that have the old one keep it."""
        _check_place(tenant, name, key)
        data = _checked_value(value)
        cipher = await self._cipher()
        known = self._store.value(owner, tenant, name, key) is not None
        if not known and self._store.count(owner) >= MAX_SECRETS:
            raise errors.LimitExceeded(
                f"there are {MAX_SECRETS} secrets already, the most that one owner may have",
                hint="k8e secret delete NAME removes one",
            )
        nonce = random.token_bytes(_NONCE_BYTES)
        sealed = nonce + cipher.encrypt(nonce, data, _place(owner, tenant, name, key))
        now = time.time()
        made = Secret(owner, tenant, name, key, now, now)
        self._store.put(made, sealed)
        return made

    def listing(self, owner: str, tenant: str = "") -> list[Secret]:
        """The names and keys of secrets, without their values."""
        return self._store.listing(owner, check_tenant(tenant) if tenant else "")

    def delete(self, owner: str, tenant: str, name: str, key: str = "") -> int:
        """Remove a secret, or one value of it; return how many values were removed."""
        _check_place(tenant, name, key or name)
        gone = self._store.delete(owner, tenant, name, key)
        if not gone:
            raise errors.SecretNotFound(
                f"secret {_shown(name, key)} of tenant {tenant} not found",
                hint="k8e secret list shows the names of yours",
            )
        return gone

    def evict(self, owner: str) -> None:
        """Remove the secrets of an owner that was removed."""
        self._store.evict(owner)

    def owners(self) -> set[str]:
        return self._store.owners()

    # Using.

    async def resolve(self, owner: str, tenant: str, refs: tuple[SecretRef, ...]) -> dict[str, str]:
        """The variables that a session of this owner and tenant gets for its references."""
        if not refs:
            return {}
        cipher = await self._cipher()
        found: dict[str, str] = {}
        for ref in refs:
            sealed = self._store.value(owner, tenant, ref.secret_name, ref.key)
            if sealed is None:
                # Not SecretNotFound: K8E's clients take NOT_FOUND for a session that is gone.
                raise errors.InvalidRequest(
                    f"secret {_shown(ref.secret_name, ref.key)} of tenant {tenant}, for the "
                    f"variable {ref.env_var}, does not exist",
                    hint=f"k8e secret set {ref.secret_name} {ref.key} --tenant {tenant}",
                )
            place = _place(owner, tenant, ref.secret_name, ref.key)
            found[ref.env_var] = _opened(cipher, sealed, place).decode()
        if sum(map(len, found.values())) > MAX_RESOLVED:
            raise errors.InvalidRequest(
                f"the secrets of one session have at most {MAX_RESOLVED} bytes together"
            )
        return found

    # The key.

    async def _cipher(self) -> ChaCha20Poly1305:
        async with self._lock:
            if self._loaded is None:
                # Loading cryptography takes a while, and most gateways never need it.
                loaded = await asyncio.to_thread(self._load, new=self._store.is_empty())
                self._prove(loaded)
                self._loaded = loaded
            return self._loaded

    def _load(self, *, new: bool) -> ChaCha20Poly1305:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        path = self._given_key or self._own_key
        try:
            key = path.read_bytes()
        except FileNotFoundError:
            if self._given_key is not None or not new:
                raise errors.StateUnusable(
                    f"the key of the secrets, {path}, is gone", hint=_KEY_HINT
                ) from None
            key = _new_key(path)
        except OSError as error:
            raise errors.StateUnusable(
                f"the key of the secrets, {path}, cannot be read: {error.strerror}", hint=_KEY_HINT
            ) from None
        if len(key) != KEY_BYTES:
            raise errors.StateUnusable(
                f"the key of the secrets, {path}, has {len(key)} bytes instead of {KEY_BYTES}",
                hint="head -c 32 /dev/urandom makes one, as long as there are no secrets",
            )
        return ChaCha20Poly1305(key)

    def _prove(self, cipher: ChaCha20Poly1305) -> None:
        """Refuse a key that is not the one of before: no secret could be read with it."""
        proof = self._store.proof()
        if proof is None or self._store.is_empty():
            nonce = random.token_bytes(_NONCE_BYTES)
            self._store.set_proof(nonce + cipher.encrypt(nonce, _PROOF, b""))
            return
        try:
            _opened(cipher, proof, b"")
        except errors.StateUnusable:
            raise errors.StateUnusable(
                "the secrets were written with another key than this gateway has", hint=_KEY_HINT
            ) from None


def _opened(cipher: ChaCha20Poly1305, sealed: bytes, place: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], place)
    except (InvalidTag, ValueError):
        raise errors.StateUnusable(
            "a secret cannot be read: its row was changed, or written with another key",
            hint="set it again: k8e secret set",
        ) from None


def _new_key(path: Path) -> bytes:
    """Make a key; on the disk before anything is written with it."""
    key = random.token_bytes(KEY_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    scratch = path.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    fd = os.open(scratch, flags, 0o600)
    try:
        os.write(fd, key)
        os.fsync(fd)
    finally:
        os.close(fd)
    scratch.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return key


def _place(owner: str, tenant: str, name: str, key: str) -> bytes:
    """The associated data of a value; none of the parts can have a NUL in it."""
    return "\0".join((owner, tenant, name, key)).encode("utf-8", "surrogateescape")


def _check_place(tenant: str, name: str, key: str) -> None:
    check_tenant(tenant)
    check_secret_name(name, "secret")
    check_secret_name(key, "key of a secret")


def _checked_value(value: str) -> bytes:
    if not value:
        raise errors.InvalidRequest("the value is empty", hint="pass it on stdin")
    if "\0" in value or not database.is_text(value):
        raise errors.InvalidRequest(
            "the value is not text, or has a NUL byte, so a variable cannot hold it",
            hint="encode it, for example with base64",
        )
    data = value.encode()
    if len(data) > MAX_VALUE:
        raise errors.LimitExceeded(f"the value has {len(data)} bytes; the limit is {MAX_VALUE}")
    return data


def _shown(name: str, key: str) -> str:
    return f"{name[:80]!r}" + (f", key {key[:80]!r}," if key else "")


def hidden(values: Mapping[str, str]) -> tuple[str, ...]:
    """The values of a session's secrets that its transcript must not show."""
    return tuple(dict.fromkeys(values.values()))
