"""What the asynchronous client asks of a gateway beside running code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from k8e.client import (
    approvals,
    async_driver,
    audit,
    endpoints,
    events,
    images,
    operations,
    pool,
    requests,
    secrets,
    snapshots,
    templates,
)
from k8e.client.approvals import Approval
from k8e.client.async_caller import AsyncCaller
from k8e.client.audit import AuditFilter, AuditRow
from k8e.client.events import Event
from k8e.client.images import Image
from k8e.client.requests import SessionOptions
from k8e.client.secrets import SecretInfo
from k8e.client.snapshots import Snapshot
from k8e.client.templates import Template


class AsyncGatewayClient(AsyncCaller):
    """Reads and changes a gateway's snapshots, templates, images, secrets and records."""

    def __init__(
        self,
        endpoint: str | None = None,
        tenant_id: str = "",
        *,
        api_key: str | None = None,
        profile: str | None = None,
    ) -> None:
        super().__init__(self._connector(endpoint, api_key, profile))
        self.tenant_id = tenant_id

    def _connector(
        self, endpoint: str | None, api_key: str | None, profile: str | None, /
    ) -> async_driver.Connector:
        return async_driver.connector(endpoints.resolve(endpoint, api_key, profile))

    # The gateway.

    async def status(self) -> dict[str, Any]:
        """The gateway's version, pid, sessions and addresses."""
        return await self._call(operations.call({"op": "status"}))

    async def doctor(self, *, fresh: bool = False) -> dict[str, Any]:
        """Which runtimes and features work on the gateway's host, and how to fix the others."""
        return await self._call(operations.call({"op": "doctor", "fresh": fresh}))

    async def events(self, session_id: str = "", limit: int = events.LIMIT) -> list[Event]:
        """Events of a session, oldest first: the newest ``limit`` ones.

        Without an id, what happened in all sessions of the caller. Of one session, there were older
        ones if the first has a :attr:`Event.seq` above 1. The events of a session that has ended
        can be asked for as long as the session itself: a day.
        """
        return await self._call(events.newest(session_id, limit))

    async def audit(self, **wanted: Unpack[AuditFilter]) -> list[AuditRow]:
        """The newest rows of the audit trail, oldest first; your own, if you are not an admin."""
        requests.check_options(self.audit, wanted, audit.FILTERS)
        return await self._call(audit.rows(wanted))

    async def verify_audit(self, expect: str = "") -> dict[str, Any]:
        """Check that no row was changed or removed; ``expect`` is the head of an earlier check."""
        return await self._call(audit.verify(expect))

    # Approvals.

    async def confirm_action(
        self,
        session_id: str,
        action: str,
        timeout: float = approvals.WAIT,
        *,
        wait: bool = True,
        approval_id: str = "",
        expires: float = 0,
    ) -> Approval:
        """Ask for approval of ``action``, and wait for the decision.

        A yes is good for one action, once. No decision within ``timeout`` seconds raises
        :class:`k8e.errors.TimedOut`.

        Args:
            session_id: the session that the action concerns.
            action: what is to be done, in the words that the approver will read.
            timeout: seconds to wait; 0 means the gateway's own 300.
            wait: False registers the action and returns at once.
            approval_id: wait for what was registered before, with the same session and action.
            expires: seconds in which it can be approved and acted on; 0 means an hour.
        """
        return await self._call(
            approvals.confirm(
                session_id, action, timeout, wait=wait, approval_id=approval_id, expires=expires
            )
        )

    async def approve_action(
        self, approval_id: str, approved: bool = True, reason: str = "", *, secret: str = ""
    ) -> Approval:
        """Decide on an action, once; with the approver's secret, if there is an approver."""
        return await self._call(approvals.decide(approval_id, approved, reason, secret))

    async def get_approval(self, approval_id: str) -> Approval:
        return await self._call(approvals.one({"op": "get_approval", "approval_id": approval_id}))

    async def list_approvals(self, session_id: str = "") -> list[Approval]:
        """Actions that wait for a decision, oldest first."""
        return await self._call(approvals.many({"op": "list_approvals", "session_id": session_id}))

    async def set_approver(self, secret: str, *, current: str = "") -> None:
        """Make approvals need ``secret`` from now on; replacing one needs the ``current`` one."""
        await self._call(
            approvals.is_configured({"op": "set_approver", "secret": secret, "current": current})
        )

    async def has_approver(self) -> bool:
        """Whether approvals need a secret; without one they are advisory."""
        return await self._call(approvals.is_configured({"op": "approver"}))

    # Snapshots.

    async def save_snapshot(self, session_id: str, name: str, *, replace: bool = False) -> Snapshot:
        """Save a session's /workspace, under a name of 1 to 63 letters and digits.

        The session may run on meanwhile; files that change while they are read are warned of.

        Args:
            session_id: what to save.
            name: what to call it; hyphens, dots and underscores may be in it too.
            replace: whether a snapshot of this name is replaced; otherwise that is a Conflict.
        """
        return await self._call(snapshots.save(session_id, name, replace=replace))

    async def list_snapshots(self) -> list[Snapshot]:
        """Your snapshots, oldest first."""
        return await self._call(snapshots.many({"op": "list_snapshots"}))

    async def get_snapshot(self, name: str) -> Snapshot:
        return await self._call(snapshots.one({"op": "get_snapshot", "name": name}))

    async def restore_snapshot(
        self,
        name: str,
        runtime_class: str = "",
        allowed_hosts: Sequence[str] | None = None,
        tenant_id: str = "",
        **options: Unpack[SessionOptions],
    ) -> str:
        """Make a session whose /workspace begins with a snapshot; return its id.

        The other arguments are those of :meth:`create_session`.
        """
        requests.check_session_options(self.restore_snapshot, options)
        tenant = tenant_id or self.tenant_id
        operation = snapshots.restore(name, runtime_class, allowed_hosts, tenant, options)
        return (await self._call(operation)).session_id

    async def delete_snapshot(self, name: str) -> None:
        """Delete a snapshot; sessions that were made from it stay as they are."""
        await self._call(operations.call({"op": "delete_snapshot", "name": name}))

    # Templates, their images, and sandboxes that are kept ready.

    async def list_templates(self) -> list[Template]:
        """All templates, including unusable ones: their ``error`` says why."""
        return await self._call(templates.many())

    async def get_template(self, name: str) -> Template:
        return await self._call(templates.one({"op": "get_template", "name": name}))

    async def apply_template(self, recipe: Mapping[str, Any]) -> Template:
        """Store a recipe under its ``name``, in place of the one before.

        Its keys are those of a template's file. Sessions that were made from it stay as they are.
        Needs the role ``admin``.
        """
        return await self._call(templates.apply(recipe))

    async def delete_template(self, name: str) -> None:
        """Delete a template that was applied by API; sessions that were made from it stay."""
        await self._call(operations.call({"op": "delete_template", "name": name}))

    async def pull_image(self, reference: str) -> Image:
        """Fetch an image from its registry, even if the name is known already: tags move.

        Args:
            reference: ``host[:port]/name[:tag][@digest]``.
        """
        return await self._call(images.pull(reference))

    async def list_images(self) -> list[Image]:
        """The images that the gateway's host has, by name."""
        return await self._call(images.listing())

    async def remove_image(self, reference: str) -> list[str]:
        """Forget an image; return the digests of the unused layers that were removed with it."""
        return await self._call(
            images.removed_layers({"op": "remove_image", "reference": reference})
        )

    async def prune_images(self) -> list[str]:
        """Remove the layers that no image and no sandbox uses; return their digests."""
        return await self._call(images.removed_layers({"op": "prune_images"}))

    async def pool(self) -> list[dict[str, Any]]:
        """The ready sandboxes: a dictionary for each template and runtime."""
        return await self._call(pool.listing())

    async def set_pool(
        self,
        template: str = "",
        runtime: str = "",
        *,
        min_ready: int | None = None,
        max_ready: int | None = None,
        wait: bool = False,
    ) -> dict[str, Any]:
        """Change how many sandboxes are ready, until the gateway ends.

        Args:
            template: of which template; the default one if empty.
            runtime: on which runtime; the usual one if empty.
            min_ready: how many at least.
            max_ready: how many at most.
            wait: return when ``min_ready`` of them are ready.
        """
        return await self._call(pool.set_sizes(template, runtime, min_ready, max_ready, wait))

    async def drain_pool(self, template: str = "") -> int:
        """Replace the ready sandboxes of a template, or all; return how many there were."""
        return await self._call(pool.drain(template))

    # Secrets.

    async def set_secret(
        self, name: str, value: str, *, key: str = "", tenant_id: str = ""
    ) -> SecretInfo:
        """Store a secret, in place of an older one; no call ever returns its value.

        Args:
            name: what sessions ask for.
            value: text of at most 16 KiB.
            key: for a secret with several values; without it, ``value``.
            tenant_id: whose sessions can get it; the client's own tenant by default.
        """
        return await self._call(
            secrets.store(secrets.place(name, key, tenant_id or self.tenant_id), value)
        )

    async def list_secrets(self, tenant_id: str = "") -> list[SecretInfo]:
        """The names of the caller's secrets, of all its tenants or of one."""
        return await self._call(secrets.listing(tenant_id))

    async def delete_secret(self, name: str, *, key: str = "", tenant_id: str = "") -> int:
        """Remove a secret, or one value of it; return how many values were removed.

        Sessions that have it as a variable keep it until they end.
        """
        return await self._call(
            secrets.delete(secrets.place(name, key, tenant_id or self.tenant_id))
        )
