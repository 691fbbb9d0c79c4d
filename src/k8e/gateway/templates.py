"""Operations on templates."""

from __future__ import annotations

from typing import Any

from k8e.gateway.arguments import text
from k8e.gateway.operations import ADMIN, AGENT_OR_ADMIN, NoRow, WritesRow, operation
from k8e.model import Principal, Role
from k8e.sessions.service import Sessions
from k8e.sessions.templates import TemplateEntry, Templates


class TemplateCalls:
    """Operations on templates. A template is used by ``create_session``."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=AGENT_OR_ADMIN, audit=NoRow.READS)
    async def list_templates(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.templates.refresh()
        found = self._sessions.templates.listing()
        return {"templates": [_describe(principal, item) for item in found]}

    @operation(roles=AGENT_OR_ADMIN, audit=NoRow.READS)
    async def get_template(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.templates.refresh()
        return _describe(principal, self._sessions.templates.entry(text(call, "name")))

    # For admins alone, because a template can name any path of this machine as a root file system.
    @operation(
        roles=ADMIN, audit=WritesRow("template.applied", ("template.name",), ("name", "digest"))
    )
    async def apply_template(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        applied = await self._sessions.templates.apply(call.get("template"), principal.name)
        return _describe(principal, applied)

    @operation(roles=ADMIN, audit=WritesRow("template.deleted", ("name",), needs_room=False))
    async def delete_template(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.templates.delete(text(call, "name"), principal.name)
        return {}


async def broken_templates(templates: Templates) -> list[dict[str, str]]:
    """The templates that cannot be used, and why."""
    await templates.refresh()
    found = templates.listing()
    return [{"name": item.name, "error": item.error} for item in found if item.error]


def _describe(principal: Principal, entry: TemplateEntry) -> dict[str, Any]:
    """A template as this caller may see it: only administrators see paths of this machine."""
    told: dict[str, Any] = {"name": entry.name, "source": entry.source, "error": entry.error}
    if entry.template is None:
        return told
    recipe = entry.template.to_json()
    if entry.template.rootfs.kind in ("dir", "tar") and Role.ADMIN not in principal.roles:
        recipe["rootfs"] = entry.template.rootfs.kind
    return {**recipe, **told, "digest": entry.template.digest}
