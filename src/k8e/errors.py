"""Every error that k8e itself raises, and how each one looks on each wire.

    K8eError
    ├─ InvalidRequest        the caller asked for something that cannot be
    ├─ SessionNotFound       no such session, or not the caller's
    ├─ SessionElsewhere      the session is one of another gateway; the message has its address
    ├─ SessionPaused         the session is frozen until it is resumed
    ├─ ExecNotFound          no such exec in the session
    ├─ ContextNotFound       no such context in the session
    ├─ ContextEnded          the context's program has ended; a restart gives a new one
    ├─ ApprovalNotFound      no such approval, or not the caller's
    ├─ SnapshotNotFound      no such snapshot, or not the caller's
    ├─ TemplateNotFound      no such template
    ├─ ImageNotFound         no such image, here or in its registry
    ├─ ImageUnusable         an image cannot be fetched, or is no root file system
    ├─ NotExposed            a port that is not exposed
    ├─ Conflict              a name or request id is taken by something different
    ├─ Denied                the caller may not do this
    ├─ TokenRefused          a token is not good, or not for this
    ├─ LimitExceeded         a limit was reached; the message names it
    ├─ TimedOut              no answer came in time, or it is too late
    ├─ StateUnusable         stored state is damaged, or of a newer release
    ├─ StoreUnreachable      the database does not answer, so nothing was written
    ├─ RuntimeUnusable       a runtime that was asked for does not work on this host
    ├─ NotImplementedYet     the interface exists, the function does not
    ├─ SandboxDied           the sandbox of a session ended by itself
    ├─ ToolFailed            a program that k8e needs (runsc, runc, tar, git) failed
    ├─ GuestFailed           the guest broke the protocol or did not answer
    ├─ ClientClosed          the client was closed before
    └─ GatewayUnreachable    no gateway answers
       ├─ NoGateway          none runs there, and none can be started
       ├─ UntrustedGateway   its certificate is not one that we trust
       └─ ConnectionLost     it went away before the answer came
          └─ ProgramLost     the same while a program ran, which goes on

KeyRefused is the Denied of a caller whose key or certificate the gateway does not know. These five
are raised by clients and never sent, so they have the codes of the classes above them.

A command that fails is a result, never one of these. Failing file operations cross the wire with an
errno name as code (``ENOENT``) and become Python's own OSError classes at the client.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

INTERNAL = "internal error; the gateway's log has it"
"""The whole message of an unexpected failure: its details name files of the host."""


class WireStatus(NamedTuple):
    """The name of an error on each wire."""

    code: str
    """The stable code of this module, or an errno name."""
    grpc: str
    http: int


UNAUTHENTICATED = WireStatus("unauthenticated", "UNAUTHENTICATED", 401)
"""Of callers that are not known."""

_NOTE = "hint: "


class K8eError(Exception):
    """Something that k8e could not do, with a hint for the caller."""

    code = "internal"
    grpc_status = "INTERNAL"
    http_status = 500
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def hint(self) -> str:
        """What to do next; a traceback shows it as a note, ``str()`` does not."""
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint
        notes = [note for note in getattr(self, "__notes__", ()) if not note.startswith(_NOTE)]
        if hint:
            self.__notes__ = [*notes, f"{_NOTE}{hint}"]

    @property
    def wire_status(self) -> WireStatus:
        """The status of this error on each wire."""
        return WireStatus(self.code, self.grpc_status, self.http_status)

    def to_wire(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "hint": self.hint}


class InvalidRequest(K8eError):
    """The request is malformed or contradicts itself."""

    code, grpc_status, http_status = "invalid_request", "INVALID_ARGUMENT", 400


class SessionNotFound(K8eError):
    """No session has this id, or it has another owner; the two look the same on purpose."""

    code, grpc_status, http_status = "session_not_found", "NOT_FOUND", 404


class SessionPaused(K8eError):
    """The session is frozen: nothing can be done in it before it is resumed."""

    code, grpc_status, http_status = "session_paused", "FAILED_PRECONDITION", 409


class SessionElsewhere(K8eError):
    """The session's sandbox is on another gateway; the message names it and its address."""

    code, grpc_status, http_status = "session_elsewhere", "FAILED_PRECONDITION", 421


class ExecNotFound(K8eError):
    """The session has no exec of this id (it may have ended long ago)."""

    code, grpc_status, http_status = "exec_not_found", "NOT_FOUND", 404


class ContextNotFound(K8eError):
    """The session has no context of this id."""

    code, grpc_status, http_status = "context_not_found", "NOT_FOUND", 404


class ContextEnded(K8eError):
    """The program of a context has ended, and its variables with it; the message says why."""

    code, grpc_status, http_status = "context_ended", "FAILED_PRECONDITION", 409


class ApprovalNotFound(K8eError):
    """No approval has this id, or it has another owner, or it ended long ago."""

    code, grpc_status, http_status = "approval_not_found", "NOT_FOUND", 404


class SnapshotNotFound(K8eError):
    """No snapshot of the caller has this name."""

    code, grpc_status, http_status = "snapshot_not_found", "NOT_FOUND", 404


class SecretNotFound(K8eError):
    """The caller has no secret of this name, in this tenant."""

    code, grpc_status, http_status = "secret_not_found", "NOT_FOUND", 404


class TemplateNotFound(K8eError):
    """No template has this name."""

    code, grpc_status, http_status = "template_not_found", "NOT_FOUND", 404


class ImageNotFound(K8eError):
    """No image has this reference: none that was pulled, or none in its registry."""

    code, grpc_status, http_status = "image_not_found", "NOT_FOUND", 404


class ImageUnusable(K8eError):
    """An image, archive or folder cannot be a sandbox's root; the message says why."""

    code, grpc_status, http_status = "image_unusable", "FAILED_PRECONDITION", 409


class NotExposed(K8eError):
    """The port of a session is not exposed, so there is nothing to end."""

    code, grpc_status, http_status = "not_exposed", "NOT_FOUND", 404


class TimedOut(K8eError):
    """No decision came in time, or an approval has expired."""

    code, grpc_status, http_status = "timed_out", "DEADLINE_EXCEEDED", 504


class Conflict(K8eError):
    """An id is already used for something else."""

    code, grpc_status, http_status = "conflict", "ALREADY_EXISTS", 409


class StateUnusable(K8eError):
    """Stored state cannot be used; it was left as it is, and sandboxes go on."""

    code, grpc_status, http_status = "state_unusable", "FAILED_PRECONDITION", 409


class StoreUnreachable(K8eError):
    """The database does not answer; the request was not written down, so it was not carried out."""

    code, grpc_status, http_status = "store_unreachable", "UNAVAILABLE", 503


class Denied(K8eError):
    """The caller is not allowed to do this."""

    code, grpc_status, http_status = "denied", "PERMISSION_DENIED", 403


class TokenRefused(K8eError):
    """A token is not good here and now, or not for this sandbox or operation."""

    code, grpc_status, http_status = "token_refused", "UNAUTHENTICATED", 401


class LimitExceeded(K8eError):
    """A limit was reached; the message names it."""

    code, grpc_status, http_status = "limit_exceeded", "RESOURCE_EXHAUSTED", 429


class RuntimeUnusable(K8eError):
    """A runtime cannot be used on this host; the message says why."""

    code, grpc_status, http_status = "runtime_unusable", "FAILED_PRECONDITION", 409


class NotImplementedYet(K8eError):
    """Part of the interface, not yet of the product."""

    code, grpc_status, http_status = "unimplemented", "UNIMPLEMENTED", 501


class SandboxDied(K8eError):
    """The sandbox ended by itself; the message says why, if that is known."""

    code, grpc_status, http_status = "sandbox_died", "ABORTED", 409


class ToolFailed(K8eError):
    """A program that k8e needs ended with an error or did not end in time."""

    code, grpc_status, http_status = "tool_failed", "INTERNAL", 500


class GuestFailed(K8eError):
    """The guest did not answer, or broke the protocol."""

    code, grpc_status, http_status = "guest_failed", "UNAVAILABLE", 502


class ClientClosed(K8eError):
    """The client was closed, so it does nothing more; raised by the SDK, never sent."""

    code, grpc_status, http_status = "client_closed", "FAILED_PRECONDITION", 409

    def __init__(self, message: str = "the client is closed", *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "make a new one; work inside its with block")


class GatewayUnreachable(K8eError):
    """No gateway could be reached or started."""

    code, grpc_status, http_status, exit_code = "gateway_unreachable", "UNAVAILABLE", 503, 2
    unread = False
    """Whether the gateway certainly never saw the last call."""


class NoGateway(GatewayUnreachable):
    """No gateway runs on this machine, or at the socket that was named, and none can be started."""


class UntrustedGateway(GatewayUnreachable):
    """The gateway's certificate is not one that we trust, so nothing was sent."""


class KeyRefused(Denied):
    """The gateway does not know the API key or the certificate that it was shown, or wants one."""


class ConnectionLost(GatewayUnreachable):
    """The connection ended before the answer came."""


class ProgramLost(ConnectionLost):
    """The connection ended while a program ran; it goes on, and was not started again."""

    session_id = ""
    exec_id = ""


_BY_CODE: dict[str, type[K8eError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        SessionNotFound,
        SessionElsewhere,
        SessionPaused,
        ExecNotFound,
        ContextNotFound,
        ContextEnded,
        ApprovalNotFound,
        SnapshotNotFound,
        SecretNotFound,
        TemplateNotFound,
        ImageNotFound,
        ImageUnusable,
        NotExposed,
        TimedOut,
        Conflict,
        StateUnusable,
        StoreUnreachable,
        Denied,
        TokenRefused,
        LimitExceeded,
        RuntimeUnusable,
        NotImplementedYet,
        SandboxDied,
        ToolFailed,
        GuestFailed,
        ClientClosed,
        GatewayUnreachable,
    )
}


_FORBIDDEN = ("PERMISSION_DENIED", 403)
_MALFORMED = ("INVALID_ARGUMENT", 400)
_EXHAUSTED = ("RESOURCE_EXHAUSTED", 429)
_OTHERWISE = ("FAILED_PRECONDITION", 409)
_BY_ERRNO = {
    errno.ENOENT: ("NOT_FOUND", 404),
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.EEXIST: ("ALREADY_EXISTS", 409),
    errno.EINVAL: _MALFORMED,
    errno.ENAMETOOLONG: _MALFORMED,
    errno.ENOSPC: _EXHAUSTED,
    errno.EDQUOT: _EXHAUSTED,
    errno.EFBIG: _EXHAUSTED,
    errno.ENOMEM: _EXHAUSTED,
    errno.EAGAIN: _EXHAUSTED,  # fork: the limit of processes
}


def status_of_errno(number: int) -> WireStatus:
    """The status of a system call that failed in a sandbox."""
    return WireStatus(errno.errorcode.get(number, "EIO"), *_BY_ERRNO.get(number, _OTHERWISE))


UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    OverflowError,
    K8eError,
)
"""Errors of reading a file or row that is damaged: cut off, of other types, nested too deeply. Code
that reads state catches these, so that one bad file stops no gateway."""


def from_wire(body: dict[str, object]) -> Exception:
    """The error that a peer described; a peer chooses a code, never a class."""
    code = str(body.get("code", ""))
    message = str(body.get("message", "unknown error"))
    number = getattr(errno, code, None) if code.isupper() else None
    if isinstance(number, int):
        if number == errno.ESRCH:
            return ExecNotFound(message)
        found = OSError(number, message)
        vars(found)["in_sandbox"] = True  # for file_hint: a machine has other remedies
        return found
    return _BY_CODE.get(code, K8eError)(message, hint=str(body.get("hint", "")))


def install_extra(name: str) -> str:
    """The command that installs an optional part, from a clone: no package index has k8e."""
    return f"in a clone of k8e: pip install '.[{name}]'"


_OWN_FOLDERS = "/workspace, /tmp and /home/user are the ones that programs may write to"
_FULL = (
    "the folder is full, by bytes or by files: remove some, or make a session with more "
    "(--disk and --inodes, limits={'disk': …}; /tmp and /home count as memory)"
)
_IN_SANDBOX = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "the file is larger than this file system takes; write several files",
    errno.ENOMEM: "the session's memory is used up: end programs, empty /tmp, or make a session "
    "with more (--memory, limits={'memory': …})",
    errno.EAGAIN: "the session has as many processes as it may: end some, or make a session with "
    "more (--pids, limits={'pids': …})",
    errno.EMFILE: "too many files are open: close some, or make a session with more "
    "(--open-files, limits={'open_files': …})",
    errno.ENFILE: "too many files are open on the machine; try again later",
    errno.EROFS: _OWN_FOLDERS,
    errno.EACCES: f"programs run as uid 1000, without rights beyond that; {_OWN_FOLDERS}",
    errno.EPERM: f"programs run as uid 1000, without rights beyond that; {_OWN_FOLDERS}",
    errno.EEXIST: "it is there already: remove it first, or use another name",
    errno.EISDIR: "it is a folder: name a file in it",
    errno.ENOTEMPTY: "remove what is in the folder first",
    errno.ELOOP: "its symbolic links lead in a circle, or through too many of them",
    errno.ENAMETOOLONG: "a name may have 255 bytes, a path 4,095",
    errno.EXDEV: "a file cannot be moved from one file system to another; copy it, and remove it",
    errno.ETXTBSY: "the program is running; end it first",
    errno.EBUSY: "something uses it, or is mounted there",
    errno.EIO: "the disk of the workspace failed; copy what can be read into a new session",
    errno.ECONNREFUSED: "nothing listens there in the sandbox; start the server first",
    errno.ETIMEDOUT: "nothing answered in time in the sandbox",
}
_ON_MACHINE = {
    errno.ENOSPC: "a disk of this machine is full: free some room",
    errno.EDQUOT: "your quota on this machine is used up: free some room",
    errno.EMFILE: "this process has too many files open: close some, or raise ulimit -n",
    errno.ENOMEM: "this machine has no memory left",
    errno.EPIPE: "whoever read from us has gone",
    errno.EISDIR: "it is a folder on this machine: name a file in it",
    errno.EEXIST: "it is there already on this machine: remove it, or use another name",
    errno.EROFS: "that file system of this machine is read-only",
}
_ON_MACHINE_ELSE = "the path is one of this machine; check that it is there and that you may use it"


def folder_hint(error: OSError, otherwise: str) -> str:
    """The hint for a file of this machine: ``otherwise``, unless its disk is the reason."""
    number = error.errno or 0
    general = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENOMEM)
    return _ON_MACHINE[number] if number in general else otherwise


def file_hint(error: OSError, listing: str) -> str:
    """The hint for a failed operation on a file, in a sandbox or on this machine.

    ``listing`` tells how to see what is in a sandbox, which is the remedy for a wrong path.
    """
    number = error.errno or 0
    if vars(error).get("in_sandbox"):
        return _IN_SANDBOX.get(number, f"the path is one of the sandbox's own; {listing}")
    return _ON_MACHINE.get(number, _ON_MACHINE_ELSE)
