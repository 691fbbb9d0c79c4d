"""Names, arguments and answers of all tools. Data only, and quick to import.

The first twelve have the names and arguments of K8E's own MCP server. Where K8E demands a session,
ours may be left out: then the connection's own is meant.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    Schema = dict[str, Any]


def text(meaning: str, **more: Any) -> Schema:
    return {"type": "string", "description": meaning, **more}


def number(meaning: str, **more: Any) -> Schema:
    return {"type": "integer", "description": meaning, **more}


def flag(meaning: str, **more: Any) -> Schema:
    return {"type": "boolean", "description": meaning, **more}


def texts(meaning: str, **more: Any) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "description": meaning, **more}


def table(meaning: str, **more: Any) -> Schema:
    """An object whose values are texts."""
    return {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": meaning,
        **more,
    }


def takes(*required: str, **properties: Schema) -> Schema:
    """The arguments of a tool. Unknown ones are refused, so that a misspelt name is noticed."""
    found: Schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**found, "required": list(required)} if required else found


def gives(*optional: str, **properties: Schema) -> Schema:
    """The fields of a tool's answer; all are always present, except the ones named."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


MAX_TIMEOUT = 24 * 3600
MAX_WAIT = 600
OWN = "the session; by default this connection's own"
WORKSPACE = "/workspace"

SESSION = text(OWN)
TIMEOUT = number(
    "seconds after which the program is killed", default=30, minimum=1, maximum=MAX_TIMEOUT
)
LANGUAGE = text(
    "bash, python, node or ts (also py, python3, js, nodejs, javascript, typescript)",
    default="bash",
)
PATH = text("a path in the sandbox; relative to /workspace")
WAIT_SECONDS = number("seconds to wait for a person", default=300, minimum=1, maximum=MAX_TIMEOUT)
ENDED = {
    "exit_code": number("what the program returned; 128 + n if signal n ended it"),
    "stdout": text("what it printed"),
    "stderr": text("what it printed to standard error"),
    "session_id": text("where it ran"),
    "status": text("completed, timed_out or killed"),
    "duration_ms": number("how long it ran"),
    "truncated": flag("whether output above the limit was dropped"),
    "denials": texts("what the session's policy refused to let it reach"),
    "note": text("a note about the session"),
}
DECIDED = {
    "approval_id": text("the approval; pass it to ask for the decision again"),
    "approved": flag("whether the action may be done, once"),
    "status": text("approved, rejected, pending or declined"),
    "advisory": flag("whether it was (or can be) decided without an approver's secret"),
    "reason": text("the approver's words"),
    "note": text("what to do next"),
}


def tool(
    title: str,
    meaning: str,
    given: Schema,
    answered: Schema,
    **hints: bool,
) -> dict[str, Any]:
    """One tool, as in ``tools/list``. Hints that are not given are the cautious ones."""
    names = {
        "reads": "readOnlyHint",
        "destroys": "destructiveHint",
        "repeats": "idempotentHint",
        "open_world": "openWorldHint",
    }
    chosen = {"reads": False, "destroys": False, "repeats": False, "open_world": False, **hints}
    return {
        "title": title,
        "description": meaning,
        "inputSchema": given,
        "outputSchema": answered,
        "annotations": {"title": title, **{names[name]: chosen[name] for name in names}},
    }


K8E_TOOLS: dict[str, dict[str, Any]] = {
    "sandbox_run": tool(
        "Run code",
        "Run code in a sandbox and wait for its end. Files in /workspace stay for the next call; "
        "variables only with `context`. Gives exit_code, stdout and stderr; a failing program is a "
        "result, not an error.",
        takes(
            "code",
            code=text("the source code"),
            language=LANGUAGE,
            timeout=TIMEOUT,
            session_id=SESSION,
            context=text(
                "keep variables between runs that name the same context (python, node, bash): a "
                "word like `main`; pictures and the last expression's value are shown too"
            ),
        ),
        gives("stderr", "denials", "note", **ENDED),
        destroys=True,
        open_world=True,
    ),
    "sandbox_status": tool(
        "Status",
        "Tell whether sandboxes are available, and this connection's session if it has one.",
        takes(),
        gives(
            "error",
            "version",
            "tenant_id",
            available=flag("whether a gateway answers"),
            session_id=text("this connection's own session; empty if there is none yet"),
            tenant_id=text("the tenant that this server works for"),
            version=text("the gateway's version"),
            error=text("why nothing is available, and what to do"),
        ),
        reads=True,
        repeats=True,
    ),
    "sandbox_create_session": tool(
        "Create a session",
        "Make another sandbox. Not needed for ordinary work: sandbox_run makes one by itself. "
        "Hosts beyond what this server allows wait for a person's approval.",
        takes(
            session_id=text("choose its id: small letters, digits and hyphens"),
            tenant_id=text("a label for who it belongs to"),
            runtime_class=text("gvisor or container; by default the best that works"),
            allowed_hosts=texts(
                "what it may reach: names, *.wildcards, networks, and the words default and none"
            ),
            env=table("variables of all its programs"),
            template=text("the name of a template that it is made from"),
            lifetime=number("seconds until it is destroyed", minimum=1),
        ),
        gives(
            "approval_id",
            "note",
            session_id=text("what to name in other calls"),
            pod_ip=text("empty; kept for K8E's clients"),
            allowed_hosts=texts("what it may reach now"),
            approval_id=text("the approval that the other hosts wait for"),
            note=text("what to do next"),
        ),
    ),
    "sandbox_destroy_session": tool(
        "Destroy a session",
        "Destroy a session of this connection, with all files in it.",
        takes("session_id", session_id=text("which one")),
        gives(ok=flag("done")),
        destroys=True,
    ),
    "sandbox_exec": tool(
        "Run a command",
        "Run a shell command in a session and wait for its end.",
        takes(
            "command",
            session_id=SESSION,
            command=text("for /bin/sh"),
            timeout=TIMEOUT,
            workdir=text("the folder that it starts in", default=WORKSPACE),
        ),
        gives("denials", "note", **ENDED),
        destroys=True,
        open_world=True,
    ),
    "sandbox_exec_stream": tool(
        "Run a command, one text",
        "Run a shell command and give its output as plain text, in the order in which it came. "
        "With a progress token the output is reported as it comes.",
        takes(
            "command",
            session_id=SESSION,
            command=text("for /bin/sh"),
            timeout=TIMEOUT,
            workdir=text("the folder that it starts in", default=WORKSPACE),
        ),
        gives(
            "denials",
            "note",
            output=text("both streams"),
            **{name: ENDED[name] for name in ENDED if name not in ("stdout", "stderr")},
        ),
        destroys=True,
        open_world=True,
    ),
    "sandbox_write_file": tool(
        "Write a file",
        "Write a file in a session; missing folders are made.",
        takes(
            "path",
            "content",
            session_id=SESSION,
            path=PATH,
            content=text("what is in it"),
            mode=text("w replaces it, a appends to it", enum=["w", "a"], default="w"),
            encoding=text("how content is written", enum=["utf-8", "base64"], default="utf-8"),
        ),
        gives(ok=flag("done"), path=text("where it is"), size=number("bytes written")),
        destroys=True,
    ),
    "sandbox_read_file": tool(
        "Read a file",
        "Read a file of a session. What is not UTF-8 text comes as base64.",
        takes(
            "path",
            session_id=SESSION,
            path=PATH,
            offset=number("the first byte", default=0, minimum=0),
            limit=number("the most bytes", default=1 << 20, minimum=1, maximum=8 << 20),
        ),
        gives(
            content=text("what is in it"),
            encoding=text("utf-8 or base64"),
            path=text("where it is"),
            size=number("bytes of the whole file"),
            truncated=flag("whether there is more after this part"),
        ),
        reads=True,
        repeats=True,
    ),
    "sandbox_list_files": tool(
        "List files",
        "List the files of a session, newest changes included.",
        takes(
            session_id=SESSION,
            since=number("only what changed at or after this Unix time", default=0, minimum=0),
            path=text("the folder to list", default=WORKSPACE),
        ),
        gives(
            "truncated",
            files={
                "type": "array",
                "items": gives(
                    path=text("absolute"),
                    modified=number("Unix time"),
                    size=number("bytes"),
                    type=text("file, link, fifo, socket or other"),
                ),
                "description": "what was found",
            },
            truncated=flag("whether there are more than were listed"),
        ),
        reads=True,
        repeats=True,
    ),
    "sandbox_pip_install": tool(
        "Install Python packages",
        "Install packages with pip in a session, from the index that this host uses.",
        takes(
            "packages",
            session_id=SESSION,
            packages=texts("requirements such as requests or numpy>=2", minItems=1),
            timeout=number("seconds", default=120, minimum=1, maximum=MAX_TIMEOUT),
        ),
        gives(
            "denials",
            "note",
            exit_code=ENDED["exit_code"],
            output=text("what pip printed"),
            session_id=ENDED["session_id"],
            denials=ENDED["denials"],
            note=ENDED["note"],
        ),
        open_world=True,
        repeats=True,
    ),
    "sandbox_run_subagent": tool(
        "Make a session for a sub-agent",
        "Make a sandbox of its own for a sub-agent. It shares /workspace with its parent and ends "
        "with it. A sub-agent's session cannot have sub-agents.",
        takes(
            parent_session_id=text("whose workspace it shares; by default this connection's own"),
            agent_type=text("a label such as research, coding or general"),
            workspace_path=text("the folder in /workspace that its programs start in"),
        ),
        gives(session_id=text("the sub-agent's session")),
    ),
    "sandbox_confirm_action": tool(
        "Ask a person",
        "Ask a person for leave before something that cannot be undone, and wait for the answer. "
        "Without a person in reach it gives an approval_id at once: show the user the note, then "
        "call again with approval_id and the same action. You cannot approve yourself.",
        takes(
            session_id=SESSION,
            action=text("what you are about to do, in the words that the person will read"),
            approval_id=text("what an earlier call gave: wait for that decision"),
            timeout=WAIT_SECONDS,
            wait=flag("wait for the decision also where nobody can be asked in this client"),
        ),
        gives("reason", "note", **DECIDED),
    ),
}


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
        "anyone who has it can use the server.",
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
        "Ask a person to let a session reach more hosts; removing hosts needs no approval. "
        "Without a person in reach it gives an approval_id: show the user the note, then call "
        "again with approval_id and the same hosts.",
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


NAME = "k8e-sandbox"
TITLE = "k8e sandboxes"
INSTRUCTIONS = (
    "Runs untrusted code in isolated sandboxes. sandbox_run needs nothing but code: this "
    "connection has a session of its own, made at the first use, whose files in /workspace stay "
    "between calls. A failing program is a normal result: look at exit_code and stderr. What a "
    "program may reach on the network is limited; refusals are told in `denials`, and "
    "sandbox_allow_hosts asks a person for more. Ask with sandbox_confirm_action before what "
    "cannot be undone. Use sandbox_run_background and sandbox_poll for servers and for what takes "
    "longer than a minute."
)

TOOLS: dict[str, dict[str, Any]] = {**K8E_TOOLS, **MORE_TOOLS}


def listed() -> list[dict[str, Any]]:
    """All tools, as in ``tools/list``."""
    return [{"name": name, **known} for name, known in TOOLS.items()]
