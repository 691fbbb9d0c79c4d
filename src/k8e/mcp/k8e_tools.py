"""K8E's twelve tools, with its names and arguments, and what we add to them. Data only."""

from __future__ import annotations

from k8e.mcp.phrases import (
    DECIDED,
    ENDED,
    LANGUAGE,
    MAX_TIMEOUT,
    PATH,
    SESSION,
    TIMEOUT,
    WAIT_SECONDS,
    WORKSPACE,
    tool,
)
from k8e.mcp.schemas import flag, gives, number, table, takes, text, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
        "With a progress token the output is told as it comes.",
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
            truncated=flag("whether there is more after this"),
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
