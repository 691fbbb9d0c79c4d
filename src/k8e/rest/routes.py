"""Every route of REST, declared once: what it takes, what it answers, what it calls.

The app finds its handler here, OpenAPI and the page are made from it, and a test holds that each
operation that a route calls is one that the gateway declares.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pydantic import BaseModel

from k8e.rest import files, models, runs, sandboxes
from k8e.rest.requests import Reply, Request

Handler = Callable[[Request, Reply], Awaitable[None]]


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    calls: tuple[str, ...]
    """The operations of the gateway or the guest that it calls."""
    summary: str
    answer: type[BaseModel] | None = None
    """What it answers in JSON, if it does."""
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    status: tuple[int, ...] = (200,)
    """Of answers that are no error."""
    raw_body: str = ""
    """The type of a body that is not JSON."""
    raw_answer: str = ""
    refusals: tuple[int, ...] = ()
    """Statuses of problems beyond those that every route can have."""

    @property
    def name(self) -> str:
        """The id of this route in OpenAPI."""
        return self.handler.__name__

    @property
    def names(self) -> list[str]:
        """The parts of the path that have names."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


ONE = "/sandbox/{sandbox_id}"
ROUTES = (
    Route(
        "POST",
        "/sandbox",
        sandboxes.open_sandbox,
        ("open_conversation",),
        "Get the sandbox of a conversation; it is made if there is none",
        models.OpenedSandbox,
        body=models.OpenSandbox,
        status=(201, 200),
        refusals=(409,),
    ),
    Route(
        "GET",
        "/sandbox",
        sandboxes.list_sandboxes,
        ("list_sessions",),
        "List your sandboxes",
        models.SandboxPage,
        query=models.ListQuery,
    ),
    Route(
        "GET",
        ONE,
        sandboxes.get_sandbox,
        ("get_session",),
        "Look at a sandbox",
        models.Sandbox,
    ),
    Route(
        "DELETE",
        ONE,
        sandboxes.delete_sandbox,
        ("get_session", "destroy_session"),
        "End a sandbox; its tokens are no longer good",
        models.Sandbox,
    ),
    Route(
        "POST",
        f"{ONE}/exec",
        runs.run,
        ("exec", "signal"),
        "Run a command or code to its end",
        models.RunResult,
        body=models.Run,
    ),
    Route(
        "POST",
        f"{ONE}/exec/stream",
        runs.stream,
        ("exec", "signal"),
        "Run a command or code; stdout, stderr and exit come as server-sent events",
        body=models.Run,
        raw_answer="text/event-stream",
    ),
    Route(
        "GET",
        f"{ONE}/files",
        files.list_files,
        ("list",),
        "List a folder",
        models.Folder,
        query=models.FolderQuery,
    ),
    Route(
        "DELETE",
        f"{ONE}/files",
        files.remove_file,
        ("remove",),
        "Remove a file or a folder",
        query=models.RemoveQuery,
        status=(204,),
    ),
    Route(
        "GET",
        f"{ONE}/files/info",
        files.stat_file,
        ("stat",),
        "Look at a file or folder",
        models.File,
        query=models.FileQuery,
    ),
    Route(
        "GET",
        f"{ONE}/files/content",
        files.read_file,
        ("read",),
        "Read a file of any size",
        query=models.FileQuery,
        raw_answer="application/octet-stream",
    ),
    Route(
        "PUT",
        f"{ONE}/files/content",
        files.write_file,
        ("write",),
        "Write a file of any size; it appears whole or not at all",
        models.Written,
        query=models.FileQuery,
        raw_body="application/octet-stream",
    ),
    Route(
        "POST",
        f"{ONE}/pause",
        sandboxes.pause_sandbox,
        ("pause_session", "get_session"),
        "Stop everything in a sandbox where it is",
        models.Sandbox,
    ),
    Route(
        "POST",
        f"{ONE}/resume",
        sandboxes.resume_sandbox,
        ("resume_session", "get_session"),
        "Let everything in a sandbox go on",
        models.Sandbox,
    ),
    Route(
        "POST",
        f"{ONE}/extend",
        sandboxes.extend_sandbox,
        ("extend_session",),
        "Let a sandbox live longer",
        models.Sandbox,
        body=models.Extend,
    ),
    Route(
        "GET",
        f"{ONE}/egress",
        sandboxes.get_egress,
        ("egress",),
        "Look at what a sandbox may reach, and at what it was refused",
        models.Egress,
    ),
    Route(
        "PUT",
        f"{ONE}/egress",
        sandboxes.replace_egress,
        ("update_allowed_hosts",),
        "Replace what a sandbox may reach",
        models.AllowedHosts,
        body=models.ReplaceEgress,
    ),
    Route(
        "PATCH",
        f"{ONE}/egress",
        sandboxes.change_egress,
        ("change_allowed_hosts",),
        "Add to what a sandbox may reach, or take away from it",
        models.AllowedHosts,
        body=models.ChangeEgress,
    ),
    Route(
        "GET",
        f"{ONE}/events",
        sandboxes.list_events,
        ("events",),
        "List what happened in a sandbox, also in one that has ended",
        models.Events,
        query=models.EventsQuery,
    ),
    Route(
        "GET",
        f"{ONE}/ports",
        sandboxes.list_ports,
        ("get_session", "list_exposed"),
        "List the ports of a sandbox that can be reached",
        models.Ports,
    ),
    Route(
        "POST",
        f"{ONE}/ports",
        sandboxes.expose_port,
        ("expose",),
        "Make a port of a sandbox reachable on the gateway's machine",
        models.Port,
        body=models.Expose,
    ),
    Route(
        "DELETE",
        f"{ONE}/ports/{{port}}",
        sandboxes.unexpose_port,
        ("unexpose", "get_session", "list_exposed"),
        "Make a port unreachable again",
        models.Ports,
    ),
    Route(
        "POST",
        f"{ONE}/token",
        sandboxes.issue_token,
        ("issue_token",),
        "Get a new token for a sandbox, or one that allows less",
        models.Token,
        body=models.IssueToken,
        status=(201,),
    ),
    Route(
        "DELETE",
        f"{ONE}/token",
        sandboxes.revoke_tokens,
        ("get_session", "revoke_tokens"),
        "Refuse all tokens of a sandbox that were issued until now",
        models.Revoked,
    ),
)
"""All of them."""


class Found(NamedTuple):
    """Where a path leads."""

    routes: dict[str, Route]
    """By method; none if it leads nowhere."""
    names: dict[str, str]


def find(segments: list[str]) -> Found:
    """The routes of a path, whose parts are decoded already."""
    for parts, routes in _BY_PATH:
        if len(parts) == len(segments) and all(
            part.startswith("{") or part == given
            for part, given in zip(parts, segments, strict=True)
        ):
            names = {
                part[1:-1]: given
                for part, given in zip(parts, segments, strict=True)
                if part.startswith("{")
            }
            return Found(routes, names)
    return Found({}, {})


def _by_path() -> list[tuple[list[str], dict[str, Route]]]:
    found: dict[str, dict[str, Route]] = {}
    for route in ROUTES:
        found.setdefault(route.path, {})[route.method] = route
    return [(path.split("/")[1:], routes) for path, routes in found.items()]


_BY_PATH = _by_path()
