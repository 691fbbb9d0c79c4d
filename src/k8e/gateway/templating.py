"""The gateway's calls about templates, for local clients and for gRPC."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.model import Principal, Role
from k8e.sessions.service import Sessions
from k8e.sessions.templating import Entry


class TemplateCalls:
    """The part of the gateway that answers for templates. Using one is creating a session."""

    sessions: Sessions

    async def call_list_templates(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        await self.sessions.templates.refresh()
        found = self.sessions.templates.listing()
        return {"templates": [_told(principal, item) for item in found]}

    async def call_get_template(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self.sessions.templates.refresh()
        return _told(principal, self.sessions.templates.entry(text(call, "name")))

    async def call_apply_template(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        _check(principal)
        applied = await self.sessions.templates.apply(call.get("template"), principal.name)
        return _told(principal, applied)

    async def call_delete_template(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        _check(principal)
        await self.sessions.templates.delete(text(call, "name"), principal.name)
        return {}

    async def broken_templates(self) -> list[dict[str, str]]:
        """Those that cannot be used, and why."""
        await self.sessions.templates.refresh()
        found = self.sessions.templates.listing()
        return [{"name": item.name, "error": item.error} for item in found if item.error]


def _check(principal: Principal) -> None:
    # A template can name any path of this machine as a root file system.
    if Role.ADMIN not in principal.roles:
        raise errors.Denied("changing templates needs the admin role")


def _told(principal: Principal, entry: Entry) -> dict[str, Any]:
    """What a caller may know: paths of this machine are its administrators' own business."""
    told: dict[str, Any] = {"name": entry.name, "source": entry.source, "error": entry.error}
    if entry.template is None:
        return told
    recipe = entry.template.to_json()
    if entry.template.rootfs.kind in ("dir", "tar") and Role.ADMIN not in principal.roles:
        recipe["rootfs"] = entry.template.rootfs.kind
    return {**recipe, **told, "digest": entry.template.digest}
