"""What agents ask for next: background runs, ports, hosts, snapshots. Data only."""

from __future__ import annotations

from k8e.mcp.phrases import (
    DECIDED,
    ENDED,
    LANGUAGE,
    MAX_TIMEOUT,
    MAX_WAIT,
    SESSION,
    WAIT_SECONDS,
    tool,
)
from k8e.mcp.schemas import flag, gives, number, takes, text, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MORE_TOOLS: dict[str, dict[str, Any]] = {
    "sandbox_run_background": tool(
        "Run code in the background",
        "Start code and leave it running: a server, or what takes long. Gives a run_id for "
        "sandbox_poll and sandbox_kill.",
        takes(
            "code",
            code=text("the source code"),
            language=LANGUAGE,
            timeout=number(
                "seconds after which it is killed; 0: never",
                default=0,
                minimum=0,
                maximum=MAX_TIMEOUT,
            ),
            session_id=SESSION,
        ),
        gives(
            "note",
            run_id=text("names the run"),
            session_id=ENDED["session_id"],
            status=text("running"),
            note=ENDED["note"],
        ),
        destroys=True,
        open_world=True,
    ),
    "sandbox_poll": tool(
        "Look at a background run",
        "What a background run has printed by now, and whether it still runs.",
        takes(
            "run_id",
            run_id=text("what sandbox_run_background gave"),
            wait=number(
                "seconds to wait for its end before answering",
                default=0,
                minimum=0,
                maximum=MAX_WAIT,
            ),
        ),
        gives(
            run_id=text("names the run"),
            session_id=ENDED["session_id"],
            status=text("running, completed, timed_out or killed"),
            exit_code={"type": ["integer", "null"], "description": "null while it runs"},
            stdout=ENDED["stdout"],
            stderr=ENDED["stderr"],
            duration_ms=ENDED["duration_ms"],
            truncated=flag("whether older output is no longer kept"),
        ),
        reads=True,
        repeats=True,
    ),
    "sandbox_kill": tool(
        "Kill a background run",
        "End a background run and everything that it started.",
        takes("run_id", run_id=text("what sandbox_run_background gave")),
        gives(ok=flag("done")),
        destroys=True,
        repeats=True,
    ),
    "sandbox_expose": tool(
        "Expose a port",
        "Give the user a local URL for a server that listens in the sandbox. The URL has a token: "
        "whoever has it can use the server.",
        takes(
            "port",
            port=number("where the server listens in the sandbox", minimum=1, maximum=65535),
            session_id=SESSION,
            host=text("the address that it listens on", default="127.0.0.1"),
        ),
        gives(url=text("for a browser or curl"), port=number("the same"), session_id=text("whose")),
        repeats=True,
    ),
    "sandbox_unexpose": tool(
        "End an exposed port",
        "End the URL of a port, and every connection that came through it.",
        takes(
            "port",
            port=number("what was exposed", minimum=1, maximum=65535),
            session_id=SESSION,
        ),
        gives(ok=flag("done")),
        destroys=True,
    ),
    "sandbox_allow_hosts": tool(
        "Ask for hosts",
        "Ask a person to let a session reach more hosts; taking hosts away needs nobody. Without a "
        "person in reach it gives an approval_id: show the user the note, then call again with "
        "approval_id and the same hosts.",
        takes(
            add=texts("hosts to allow, such as api.example.org or *.example.org:443"),
            remove=texts("hosts to refuse from now on"),
            session_id=SESSION,
            approval_id=text("what an earlier call gave"),
            timeout=WAIT_SECONDS,
            wait=flag("wait for the decision also where nobody can be asked in this client"),
        ),
        gives(
            "approval_id",
            "status",
            "advisory",
            "reason",
            "note",
            hosts=texts("what the session may reach now"),
            **DECIDED,
        ),
        open_world=True,
    ),
    "sandbox_snapshot_save": tool(
        "Save a snapshot",
        "Keep what /workspace holds, under a name, for later sessions.",
        takes(
            "name",
            name=text("1 to 63 letters, digits, hyphens, dots and underscores"),
            session_id=SESSION,
            replace=flag("whether a snapshot of this name is replaced", default=False),
        ),
        gives(
            name=text("its name"),
            file_count=number("files in it"),
            size_bytes=number("of its archive"),
        ),
        destroys=True,
    ),
    "sandbox_snapshot_list": tool(
        "List snapshots",
        "List the snapshots that sessions can begin with.",
        takes(),
        gives(
            snapshots={
                "type": "array",
                "items": gives(
                    name=text("its name"),
                    file_count=number("files in it"),
                    size_bytes=number("of its archive"),
                    created_at=number("Unix time"),
                ),
                "description": "oldest first",
            }
        ),
        reads=True,
        repeats=True,
    ),
    "sandbox_snapshot_restore": tool(
        "Restore a snapshot",
        "Make a session whose /workspace begins with a snapshot.",
        takes("name", name=text("which one")),
        gives(session_id=text("what to name in other calls")),
    ),
    "sandbox_snapshot_delete": tool(
        "Delete a snapshot",
        "Delete a snapshot; sessions that were made of it stay as they are.",
        takes("name", name=text("which one")),
        gives(ok=flag("done")),
        destroys=True,
    ),
    "sandbox_list_sessions": tool(
        "List sessions",
        "List the sessions that this connection can use.",
        takes(),
        gives(
            sessions={
                "type": "array",
                "items": gives(
                    session_id=text("what to name in other calls"),
                    phase=text("active, paused, creating or ended"),
                    runtime=text("gvisor or container"),
                    own=flag("whether it is what calls without session_id use"),
                ),
                "description": "oldest first",
            }
        ),
        reads=True,
        repeats=True,
    ),
}
