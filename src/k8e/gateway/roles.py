"""Which role each operation needs. What is not named here is nobody's.

So an operation that is added and forgotten here cannot be used by anybody, and a test says so.
"""

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
_DECIDING = frozenset({Role.APPROVER, Role.ADMIN})
_GROUPS = (
    (_ANY, "status doctor approver list_approvals get_approval"),
    (_DECIDING, "approve_action"),
    (_ANY, "audit"),  # those who are no admins see their own
    (_ADMIN, "verify_audit"),
    (_ADMIN, "set_approver metrics stop"),
    (_ADMIN, "pool set_pool drain_pool"),
    (_ADMIN, "create_api_key list_api_keys rotate_api_key delete_api_key"),
    (_AGENT_OR_ADMIN, "list_templates get_template"),
    (_ADMIN, "apply_template delete_template"),
    (_ADMIN, "pull_image list_images remove_image prune_images"),
    (_AGENT, "create_session get_session list_sessions destroy_session extend_session"),
    (_AGENT, "run_subagent pause_session resume_session events confirm_action"),
    (_AGENT, "update_allowed_hosts change_allowed_hosts egress"),
    (_AGENT, "expose unexpose list_exposed"),
    (_AGENT, "set_secret list_secrets delete_secret"),
    (_AGENT, "save_snapshot get_snapshot list_snapshots delete_snapshot put_snapshot"),
)
OPERATIONS = {name: needed for needed, names in _GROUPS for name in names.split()}
"""What the gateway answers itself, and any of which roles it takes."""
_RPC_GROUPS = (
    (_ANY, "Login ListApprovals"),
    (_ANY, "Run"),  # each of its operations is looked at by itself
    (_DECIDING, "ApproveAction"),
    (_ANY, "GetAudit"),
    (_ADMIN, "VerifyAudit"),
    (_AGENT_OR_ADMIN, "ListTemplates GetTemplate"),
    (_ADMIN, "ApplyTemplate DeleteTemplate"),
    (_AGENT, "CreateSession DestroySession GetSession ListSessions PauseSession ResumeSession"),
    (_AGENT, "Exec ExecStream PipInstall PollRun GetTranscript GetProcesses GetEvents"),
    (_AGENT, "WriteFile ReadFile ListFiles RunSubAgent ConfirmAction"),
    (_AGENT, "SnapshotPut SnapshotGet SnapshotList UpdateAllowedHosts GetEgress"),
    (_AGENT, "CreateTerminal TerminalStream TerminalWrite TerminalResize TerminalForeground"),
    (_AGENT, "TerminalSignal TerminalDestroy ExposeService UnexposeService ListExposed"),
    (_AGENT, "CreateContext ListContexts RemoveContext RestartContext InterruptContext"),
    (_AGENT, "ExecuteCode"),
    (_AGENT, "SetSecret ListSecrets DeleteSecret"),
)
RPCS = {name: needed for needed, names in _RPC_GROUPS for name in names.split()}
"""The same for the calls of ``sandbox.v1`` that are not public."""


def check(principal: Principal, operation: str) -> None:
    """Refuse an operation of the gateway that this caller may not ask for."""
    if operation not in OPERATIONS:
        raise errors.InvalidRequest(f"unknown operation {operation[:80]!r}")
    _check(principal, OPERATIONS[operation], operation)


def check_use(principal: Principal) -> None:
    """Refuse whoever may not use sessions, for the operations of guests."""
    _check(principal, _AGENT, "using a session")


def check_rpc(principal: Principal, name: str) -> None:
    _check(principal, RPCS.get(name, frozenset()), name)


def _check(principal: Principal, needed: frozenset[Role], what: str) -> None:
    if not needed & principal.roles:
        wanted = " or ".join(sorted(needed)) or "that nobody has"
        raise errors.Denied(
            f"{what} needs the role {wanted}; {principal.shown} has not got it",
            hint="k8e sandbox api-key create NAME --role ROLE makes a key that has",
        )
