"""Options of an MCP server."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.mcp.client import ToolClient


class McpOptions:
    """The gateway, and the hosts that agents may have."""

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        api_key: str | None = None,
        profile: str | None = None,
        tenant: str = "",
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        self.endpoint = endpoint
        self.api_key = api_key
        self.profile = profile
        self.tenant = tenant
        self.allowed_hosts = allowed_hosts

    def client(self) -> ToolClient:
        """A client of the gateway; it connects when it is first used."""
        from k8e.mcp.client import ToolClient

        return ToolClient(self.endpoint, self.tenant, api_key=self.api_key, profile=self.profile)
