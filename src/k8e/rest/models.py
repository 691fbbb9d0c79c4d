"""What requests and answers look like: checked by these, and described by them in OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from k8e.model import CONVERSATION_NAME, MAX_CONVERSATION_NAME, MAX_ENV_KEYS, MAX_ID

# Longer ones could be neither a label of Kubernetes nor the name of a folder.
ID_PATTERN = rf"^[a-z0-9]([a-z0-9-]{{0,{MAX_ID - 2}}}[a-z0-9])?$"
NAME_PATTERN = rf"^{CONVERSATION_NAME}$"
MAX_SECONDS = 30 * 24 * 3600.0
MAX_RUN_SECONDS = 24 * 3600.0
MAX_OUTPUT = 4 << 20
MAX_WORDS = 1000
PLAIN = r"^[^\x00]*$"

Name = Annotated[
    str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=MAX_CONVERSATION_NAME)
]
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN, min_length=1, max_length=MAX_ID)]
Plain = Annotated[str, StringConstraints(pattern=PLAIN)]
Path = Annotated[str, StringConstraints(pattern=PLAIN, min_length=1, max_length=4096)]
Seconds = Annotated[float, Field(ge=1, le=MAX_SECONDS)]
Status = Literal["creating", "running", "paused", "ended"]
Encoding = Literal["utf-8", "base64"]
Language = Literal["bash", "python", "node", "ts"]
Word = Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=PLAIN)]


def _few(value: object) -> object:
    """Refuse too many variables before any of them is looked at: a body has room for a million."""
    found: Any = value
    if isinstance(found, dict) and len(cast("dict[str, Any]", found)) > MAX_ENV_KEYS:
        raise ValueError(f"there can be {MAX_ENV_KEYS} variables at most")
    return value


Variables = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)],
        Plain,
    ],
    Field(max_length=MAX_ENV_KEYS),
    BeforeValidator(_few),
]


def _whole(value: object) -> object:
    """``8.0`` is a whole number in JSON, however it is written."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


AS_WHOLE = BeforeValidator(_whole)


class Model(BaseModel):
    """Of a body or a query: nothing but what is named here."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


# Requests.


class OpenSandbox(Model):
    """A conversation, and what its sandbox is to be like if it has none yet."""

    user_id: Name = Field(description="whose conversation it is")
    conversation_id: Name = Field(description="one conversation has one sandbox")
    tenant: Id | None = Field(None, description="the tenant; SANDBOX_NAMESPACE says the usual one")
    template: Id | None = Field(None, description="what the sandbox is made from")
    runtime: Id | None = Field(None, description="gvisor or container; the best one if left out")
    env: Variables | None = Field(None, description="variables of all programs")
    lifetime: Seconds | None = Field(None, description="seconds until it ends whatever happens")
    idle_timeout: Seconds | None = Field(None, description="seconds without use until it ends")
    allowed_hosts: Annotated[list[Word], Field(max_length=MAX_WORDS)] | None = Field(
        None, description="what it may reach: host names, *.wildcards, networks, default, none"
    )


class ListQuery(Model):
    """Which sandboxes are listed."""

    user_id: Name | None = Field(None, description="only those of this user")
    conversation_id: Name | None = Field(None, description="only that of this conversation")
    tenant: Id | None = Field(None, description="only those of this tenant")
    status: Status | None = Field(None, description="only those in this state")
    limit: Annotated[int, Field(ge=1, le=500), AS_WHOLE] = Field(50, description="at most so many")
    cursor: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="where the page before this one ended"
    )


class Run(Model):
    """A command, or source code, to run to its end. One of command and code."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["command"],
                    "properties": {
                        "command": {"type": ["string", "array"]},
                        "code": {"type": "null"},
                        "language": {"type": "null"},
                    },
                },
                {
                    "required": ["code"],
                    "properties": {"code": {"type": "string"}, "command": {"type": "null"}},
                },
            ]
        }
    )

    command: (
        Annotated[Plain, StringConstraints(min_length=1, pattern=r"\S", max_length=1 << 20)]
        | Annotated[list[Plain], Field(min_length=1, max_length=4096)]
        | None
    ) = Field(None, description="text for the shell, or a program with its arguments")
    code: Annotated[str, StringConstraints(min_length=1, pattern=r"\S")] | None = Field(
        None, description="source code"
    )
    language: Language | None = Field(None, description="what the code is written in; python")
    timeout: Annotated[float, Field(gt=0, le=MAX_RUN_SECONDS)] = Field(
        300.0, description="seconds after which it and all its children are killed"
    )
    env: Variables | None = Field(None, description="variables of this program")
    cwd: Path | None = Field(None, description="where it starts; /workspace if left out")
    stdin: str | None = Field(None, description="what it reads")
    encoding: Encoding = Field(
        "utf-8", description="how output is written: as text, or any bytes as base64"
    )
    output_limit: Annotated[int, Field(ge=1, le=MAX_OUTPUT), AS_WHOLE] = Field(
        1 << 20, description="bytes of each stream that the answer has; no limit for a stream"
    )


class FileQuery(Model):
    """A file of the sandbox."""

    path: Path = Field(description="absolute, or relative to /workspace")


class RemoveQuery(FileQuery):
    """What is removed."""

    recursive: bool = Field(False, description="a folder with all that is in it, too")


class FolderQuery(Model):
    """A folder of the sandbox."""

    path: Path = Field("/workspace", description="absolute, or relative to /workspace")
    depth: Annotated[int, Field(ge=1, le=100), AS_WHOLE] = Field(1, description="levels of folders")


class Extend(Model):
    """How long the sandbox lives from now on."""

    lifetime: Seconds = Field(description="seconds from now")


class ReplaceEgress(Model):
    """What the sandbox may reach, in the place of what it may reach now."""

    allowed_hosts: Annotated[list[Word], Field(max_length=MAX_WORDS)]


class ChangeEgress(Model):
    """Words to add to what the sandbox may reach, and words to take away."""

    add: Annotated[list[Word], Field(max_length=MAX_WORDS)] = Field(default_factory=list[Word])
    remove: Annotated[list[Word], Field(max_length=MAX_WORDS)] = Field(default_factory=list[Word])


class EventsQuery(Model):
    """Which events are listed."""

    limit: Annotated[int, Field(ge=1, le=1000), AS_WHOLE] = Field(
        100, description="the newest, so many"
    )


class Expose(Model):
    """A port of the sandbox that is to be reached on the gateway's machine."""

    port: Annotated[int, Field(ge=1, le=65535), AS_WHOLE]


class IssueToken(Model):
    """A token for this sandbox."""

    operations: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=64)]],
            Field(min_length=1, max_length=64),
        ]
        | None
    ) = Field(None, description="what it allows; the usual ones if left out")
    audience: Annotated[
        str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]+$")
    ] = Field("k8e-rest", description="for whom it is; k8e-rest is this interface")
    ttl: Seconds | None = Field(None, description="seconds; at most TOKEN_TTL")


# Answers.


class Answer(BaseModel):
    """Of a call that succeeded."""


class Sandbox(Answer):
    """A sandbox."""

    sandbox_id: str
    conversation_id: str | None
    user_id: str | None
    status: Status
    tenant: str
    runtime: str
    template: str
    created_at: float = Field(description="Unix time")
    expires_at: float = Field(description="Unix time")
    allowed_hosts: list[str]
    ended_reason: str


class OpenedSandbox(Sandbox):
    """The sandbox of a conversation, with a token for it."""

    token: str = Field(description="for this sandbox alone; send it as Authorization: Bearer")
    token_expires_at: float = Field(description="Unix time")
    warning: str = Field(description="what to know of this sandbox; mostly empty")


class SandboxPage(Answer):
    """Some sandboxes, oldest first."""

    sandboxes: list[Sandbox]
    cursor: str | None = Field(description="for the next page; null on the last one")


class Denial(Answer):
    """Something that the sandbox wanted to reach and may not."""

    name: str
    address: str
    port: int
    protocol: str
    rule: str
    count: int


class RunResult(Answer):
    """What came of a run. A program that fails is a result, with status 200."""

    exit_code: int
    status: str = Field(description="completed, timed_out or killed")
    stdout: str
    stderr: str
    encoding: Encoding
    truncated: bool = Field(description="whether output above the limit was dropped")
    duration_ms: int
    exec_id: str
    denials: list[Denial]


class File(Answer):
    """A file or folder."""

    path: str
    type: str
    size: int
    mode: int
    modified_at: float = Field(description="Unix time")


class Folder(Answer):
    """What is in a folder."""

    files: list[File]
    truncated: bool = Field(description="whether there are more than the answer has")


class Written(Answer):
    """A file that was written, whole."""

    path: str
    size: int


class Egress(Answer):
    """What a sandbox may reach, and what it was refused."""

    allowed_hosts: list[str]
    rules: list[str] = Field(description="the policy in effect, spelled out")
    network: bool
    reason: str = Field(description="why there is no network, if there is none")
    denied: int = Field(description="how often something was refused")
    denials: list[Denial]


class AllowedHosts(Answer):
    """What a sandbox may reach from now on."""

    allowed_hosts: list[str]
    rules: list[str]


class Events(Answer):
    """What happened in a sandbox, oldest first."""

    events: list[dict[str, Any]]
    truncated: bool


class Port(Answer):
    """A port that can be reached."""

    port: int
    url: str = Field(description="with a token: whoever has it can use the service")
    warning: str = ""


class Ports(Answer):
    """The ports that can be reached."""

    ports: list[Port]


class Token(Answer):
    """A token for a sandbox."""

    token: str
    token_id: str
    expires_at: float = Field(description="Unix time")
    operations: list[str]
    audience: str


class Revoked(Answer):
    """Tokens that are no longer good."""

    revoked_at: float = Field(description="all that were issued until then; Unix time")


class FieldProblem(Answer):
    """What is wrong with one part of a request."""

    field: str
    message: str


class Problem(Answer):
    """An error (RFC 9457)."""

    title: str
    status: int
    detail: str = Field(description="what happened, and why")
    code: str = Field(description="stable, for programs; see the page of errors")
    hint: str = Field(description="what to do next; may be empty")
    request_id: str
    errors: list[FieldProblem] | None = Field(None, description="of a request that is malformed")
