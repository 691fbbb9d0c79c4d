"""Standing sessions: what a tenant gets that names no session; made at first use, then found."""

from __future__ import annotations

import asyncio
from typing import Any

from k8e.model import Principal, Session, SessionSpec
from k8e.runtimes.registry import Runtimes
from k8e.sessions import refusals
from k8e.sessions.live import Live
from k8e.sessions.making import Kinship, Maker
from k8e.sessions.store import Store
from k8e.sessions.templating import Templates


class Standing:
    """The part of all sessions that knows which one is a tenant's own."""

    runtimes: Runtimes
    templates: Templates
    _store: Store
    _live: dict[str, Live]
    _maker: Maker

    async def _make(
        self,
        key: str,
        principal: Principal,
        spec: SessionSpec,
        *,
        auto: bool,
        kin: Kinship | None = None,
    ) -> Session:
        raise NotImplementedError

    def auto_now(
        self,
        principal: Principal,
        tenant: str,
        runtime: str = "",
        allowed_hosts: tuple[str, ...] | None = None,
        content: SessionSpec | None = None,
        template: str = "",
    ) -> Session | None:
        """The default session of a tenant, if it has a live one; it must be as it is asked for."""
        asked = self.runtimes.resolve(runtime)
        known = self._store.find_auto(principal.name, tenant)
        live = self._live.get(known.session_id) if known is not None else None
        if known is None or live is None or live.ending is not None:
            return None
        refusals.check_standing(known, asked, allowed_hosts, content, template)
        return known

    async def standing(self, principal: Principal, fields: dict[str, Any]) -> Session:
        """The session of a tenant that names none, as a client describes it; from its template."""
        asked = self._maker.with_defaults(SessionSpec.from_json(fields))
        known = self._standing(principal, asked)
        if known is not None:
            return known
        return await self.auto(principal, asked, await self.templates.specify(fields))

    async def auto(
        self, principal: Principal, asked: SessionSpec, spec: SessionSpec | None = None
    ) -> Session:
        """The session that a tenant gets when it names none; made at first use.

        Args:
            principal: whose it is.
            asked: what it has to be like.
            spec: what it is made of, if that is more.
        """
        spec = self._maker.with_defaults(spec or asked)
        known = self._standing(principal, asked)
        if known is not None:
            return known
        await self._bury(principal, spec.tenant)
        key = f"auto {principal.name} {spec.tenant}"
        made = await self._make(key, principal, spec, auto=True)
        # Another call may have begun it, for another runtime.
        return self._standing(principal, asked) or made

    def _standing(self, principal: Principal, asked: SessionSpec) -> Session | None:
        hosts, template = asked.allowed_hosts, asked.template
        return self.auto_now(principal, asked.tenant, asked.runtime, hosts, asked, template)

    async def _bury(self, principal: Principal, tenant: str) -> None:
        """Wait until a standing session that is being destroyed has made room for the next."""
        known = self._store.find_auto(principal.name, tenant)
        live = self._live.get(known.session_id) if known is not None else None
        if live is not None and live.ending is not None:
            await asyncio.shield(live.ending)
