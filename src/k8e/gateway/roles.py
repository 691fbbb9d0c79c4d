"""Which role each operation needs. What is not named here is an agent's."""

from __future__ import annotations

from k8e import errors
from k8e.model import Principal, Role

ANYBODY = Principal("anybody", frozenset())
PUBLIC = frozenset({"GetCACert"})
"""RPCs for callers that nobody knows."""

_ANY = frozenset(Role)
_ADMIN = frozenset({Role.ADMIN})
_AGENT = frozenset({Role.AGENT})
_AGENT_OR_ADMIN = frozenset({Role.AGENT, Role.ADMIN})
_OPERATIONS = {
    "status": _ANY,
    "doctor": _ANY,
    "approver": _ANY,
    "list_approvals": _ANY,
    "get_approval": _ANY,
    "approve_action": frozenset({Role.APPROVER, Role.ADMIN}),
    "audit": _ANY,  # those who are no admins see their own
    "verify_audit": _ADMIN,
    "set_approver": _ADMIN,
    "metrics": _ADMIN,
    "stop": _ADMIN,
    "pool": _ADMIN,
    "set_pool": _ADMIN,
    "drain_pool": _ADMIN,
    "create_api_key": _ADMIN,
    "list_api_keys": _ADMIN,
    "delete_api_key": _ADMIN,
    "list_templates": _AGENT_OR_ADMIN,
    "get_template": _AGENT_OR_ADMIN,
    "apply_template": _ADMIN,
    "delete_template": _ADMIN,
    "pull_image": _ADMIN,
    "list_images": _ADMIN,
    "remove_image": _ADMIN,
    "prune_images": _ADMIN,
}
_RPCS = {
    "Login": _ANY,
    "Run": _ANY,  # each of its operations is looked at by itself
    "ListApprovals": _ANY,
    "ApproveAction": _OPERATIONS["approve_action"],
    "ListTemplates": _OPERATIONS["list_templates"],
    "GetTemplate": _OPERATIONS["get_template"],
    "ApplyTemplate": _OPERATIONS["apply_template"],
    "DeleteTemplate": _OPERATIONS["delete_template"],
    "GetAudit": _OPERATIONS["audit"],
    "VerifyAudit": _OPERATIONS["verify_audit"],
}


def check(principal: Principal, operation: str) -> None:
    """Refuse an operation of the gateway, or (with an empty name) of a guest."""
    _check(principal, _OPERATIONS.get(operation, _AGENT), operation or "using a session")


def check_rpc(principal: Principal, name: str) -> None:
    _check(principal, _RPCS.get(name, _AGENT), name)


def _check(principal: Principal, needed: frozenset[Role], what: str) -> None:
    if not needed & principal.roles:
        wanted = " or ".join(sorted(needed))
        raise errors.Denied(
            f"{what} needs the role {wanted}; {principal.name} has not got it",
            hint="k8e sandbox api-key create NAME --role ROLE makes a key that has",
        )
