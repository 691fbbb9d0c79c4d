from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TerminalSignal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TERMINAL_SIGNAL_UNSPECIFIED: _ClassVar[TerminalSignal]
    TERMINAL_SIGNAL_INT: _ClassVar[TerminalSignal]
    TERMINAL_SIGNAL_TERM: _ClassVar[TerminalSignal]
    TERMINAL_SIGNAL_KILL: _ClassVar[TerminalSignal]
    TERMINAL_SIGNAL_TSTP: _ClassVar[TerminalSignal]
    TERMINAL_SIGNAL_HUP: _ClassVar[TerminalSignal]
TERMINAL_SIGNAL_UNSPECIFIED: TerminalSignal
TERMINAL_SIGNAL_INT: TerminalSignal
TERMINAL_SIGNAL_TERM: TerminalSignal
TERMINAL_SIGNAL_KILL: TerminalSignal
TERMINAL_SIGNAL_TSTP: TerminalSignal
TERMINAL_SIGNAL_HUP: TerminalSignal

class RunFrame(_message.Message):
    __slots__ = ("kind", "channel", "body", "rest")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    kind: int
    channel: int
    body: bytes
    rest: _containers.RepeatedCompositeFieldContainer[RunFrame]
    def __init__(self, kind: _Optional[int] = ..., channel: _Optional[int] = ..., body: _Optional[bytes] = ..., rest: _Optional[_Iterable[_Union[RunFrame, _Mapping]]] = ...) -> None: ...

class SecretRef(_message.Message):
    __slots__ = ("secret_name", "key", "env_var")
    SECRET_NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENV_VAR_FIELD_NUMBER: _ClassVar[int]
    secret_name: str
    key: str
    env_var: str
    def __init__(self, secret_name: _Optional[str] = ..., key: _Optional[str] = ..., env_var: _Optional[str] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("session_id", "tenant_id", "allowed_hosts", "runtime_class", "env", "secret_refs", "template")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_HOSTS_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_CLASS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    SECRET_REFS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant_id: str
    allowed_hosts: _containers.RepeatedScalarFieldContainer[str]
    runtime_class: str
    env: _containers.ScalarMap[str, str]
    secret_refs: _containers.RepeatedCompositeFieldContainer[SecretRef]
    template: str
    def __init__(self, session_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., allowed_hosts: _Optional[_Iterable[str]] = ..., runtime_class: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., secret_refs: _Optional[_Iterable[_Union[SecretRef, _Mapping]]] = ..., template: _Optional[str] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id", "pod_ip")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POD_IP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    pod_ip: str
    def __init__(self, session_id: _Optional[str] = ..., pod_ip: _Optional[str] = ...) -> None: ...

class DestroySessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DestroySessionResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session_id", "phase", "runtime_class", "pod_ip", "tenant_id", "expires_at", "env_keys", "secret_env_vars", "background_runs", "allowed_hosts", "parent_id", "template")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_CLASS_FIELD_NUMBER: _ClassVar[int]
    POD_IP_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    ENV_KEYS_FIELD_NUMBER: _ClassVar[int]
    SECRET_ENV_VARS_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_RUNS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_HOSTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    phase: str
    runtime_class: str
    pod_ip: str
    tenant_id: str
    expires_at: int
    env_keys: _containers.RepeatedScalarFieldContainer[str]
    secret_env_vars: _containers.RepeatedScalarFieldContainer[str]
    background_runs: int
    allowed_hosts: _containers.RepeatedScalarFieldContainer[str]
    parent_id: str
    template: str
    def __init__(self, session_id: _Optional[str] = ..., phase: _Optional[str] = ..., runtime_class: _Optional[str] = ..., pod_ip: _Optional[str] = ..., tenant_id: _Optional[str] = ..., expires_at: _Optional[int] = ..., env_keys: _Optional[_Iterable[str]] = ..., secret_env_vars: _Optional[_Iterable[str]] = ..., background_runs: _Optional[int] = ..., allowed_hosts: _Optional[_Iterable[str]] = ..., parent_id: _Optional[str] = ..., template: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("phase",)
    PHASE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    def __init__(self, phase: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[GetSessionResponse]
    def __init__(self, sessions: _Optional[_Iterable[_Union[GetSessionResponse, _Mapping]]] = ...) -> None: ...

class PauseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class PauseSessionResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ResumeSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ResumeSessionResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ExecRequest(_message.Message):
    __slots__ = ("session_id", "command", "timeout", "workdir", "background", "language", "code")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    command: str
    timeout: int
    workdir: str
    background: bool
    language: str
    code: bytes
    def __init__(self, session_id: _Optional[str] = ..., command: _Optional[str] = ..., timeout: _Optional[int] = ..., workdir: _Optional[str] = ..., background: _Optional[bool] = ..., language: _Optional[str] = ..., code: _Optional[bytes] = ...) -> None: ...

class ExecResponse(_message.Message):
    __slots__ = ("stdout", "stderr", "exit_code", "session_id", "run_id", "status", "duration_ms", "truncated", "language", "stdout_bytes", "stderr_bytes", "denials", "limits")
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    STDOUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STDERR_BYTES_FIELD_NUMBER: _ClassVar[int]
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    stdout: str
    stderr: str
    exit_code: int
    session_id: str
    run_id: str
    status: str
    duration_ms: int
    truncated: bool
    language: str
    stdout_bytes: bytes
    stderr_bytes: bytes
    denials: _containers.RepeatedCompositeFieldContainer[EgressDenial]
    limits: _containers.RepeatedCompositeFieldContainer[ReachedLimit]
    def __init__(self, stdout: _Optional[str] = ..., stderr: _Optional[str] = ..., exit_code: _Optional[int] = ..., session_id: _Optional[str] = ..., run_id: _Optional[str] = ..., status: _Optional[str] = ..., duration_ms: _Optional[int] = ..., truncated: _Optional[bool] = ..., language: _Optional[str] = ..., stdout_bytes: _Optional[bytes] = ..., stderr_bytes: _Optional[bytes] = ..., denials: _Optional[_Iterable[_Union[EgressDenial, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[ReachedLimit, _Mapping]]] = ...) -> None: ...

class ReachedLimit(_message.Message):
    __slots__ = ("limit", "value", "message")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    limit: str
    value: int
    message: str
    def __init__(self, limit: _Optional[str] = ..., value: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class EgressDenial(_message.Message):
    __slots__ = ("name", "address", "port", "protocol", "rule", "count", "at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    port: int
    protocol: str
    rule: str
    count: int
    at: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., port: _Optional[int] = ..., protocol: _Optional[str] = ..., rule: _Optional[str] = ..., count: _Optional[int] = ..., at: _Optional[int] = ...) -> None: ...

class ExecStreamResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: str
    def __init__(self, chunk: _Optional[str] = ...) -> None: ...

class PollRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class PollRunResponse(_message.Message):
    __slots__ = ("run_id", "status", "stdout", "stderr", "exit_code", "duration_ms", "truncated")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    status: str
    stdout: str
    stderr: str
    exit_code: int
    duration_ms: int
    truncated: bool
    def __init__(self, run_id: _Optional[str] = ..., status: _Optional[str] = ..., stdout: _Optional[str] = ..., stderr: _Optional[str] = ..., exit_code: _Optional[int] = ..., duration_ms: _Optional[int] = ..., truncated: _Optional[bool] = ...) -> None: ...

class PipInstallRequest(_message.Message):
    __slots__ = ("session_id", "packages")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    packages: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., packages: _Optional[_Iterable[str]] = ...) -> None: ...

class PipInstallResponse(_message.Message):
    __slots__ = ("output", "exit_code")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    output: str
    exit_code: int
    def __init__(self, output: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class GetTranscriptRequest(_message.Message):
    __slots__ = ("session_id", "offset", "limit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    offset: int
    limit: int
    def __init__(self, session_id: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class GetTranscriptResponse(_message.Message):
    __slots__ = ("session_id", "output", "offset", "next_offset", "truncated_before", "eof")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    EOF_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    output: str
    offset: int
    next_offset: int
    truncated_before: bool
    eof: bool
    def __init__(self, session_id: _Optional[str] = ..., output: _Optional[str] = ..., offset: _Optional[int] = ..., next_offset: _Optional[int] = ..., truncated_before: _Optional[bool] = ..., eof: _Optional[bool] = ...) -> None: ...

class GetEventsRequest(_message.Message):
    __slots__ = ("session_id", "limit", "cursor")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    limit: int
    cursor: str
    def __init__(self, session_id: _Optional[str] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetEventsResponse(_message.Message):
    __slots__ = ("events", "truncated", "returned", "cursor")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedScalarFieldContainer[str]
    truncated: bool
    returned: int
    cursor: str
    def __init__(self, events: _Optional[_Iterable[str]] = ..., truncated: _Optional[bool] = ..., returned: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class GetProcessesRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetProcessesResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessInfo]
    def __init__(self, processes: _Optional[_Iterable[_Union[ProcessInfo, _Mapping]]] = ...) -> None: ...

class ProcessInfo(_message.Message):
    __slots__ = ("pid", "comm", "state")
    PID_FIELD_NUMBER: _ClassVar[int]
    COMM_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    comm: str
    state: str
    def __init__(self, pid: _Optional[int] = ..., comm: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class WriteFileRequest(_message.Message):
    __slots__ = ("session_id", "path", "content", "mode", "content_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    content: str
    mode: str
    content_bytes: bytes
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., content: _Optional[str] = ..., mode: _Optional[str] = ..., content_bytes: _Optional[bytes] = ...) -> None: ...

class WriteFileResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ReadFileRequest(_message.Message):
    __slots__ = ("session_id", "path")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ReadFileResponse(_message.Message):
    __slots__ = ("content", "content_bytes")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    content: str
    content_bytes: bytes
    def __init__(self, content: _Optional[str] = ..., content_bytes: _Optional[bytes] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ("session_id", "since")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    since: int
    def __init__(self, session_id: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class ListFilesResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    def __init__(self, files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("path", "modified", "type", "size")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    path: str
    modified: int
    type: str
    size: int
    def __init__(self, path: _Optional[str] = ..., modified: _Optional[int] = ..., type: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class RunSubAgentRequest(_message.Message):
    __slots__ = ("parent_session_id", "agent_type", "workspace_path")
    PARENT_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_PATH_FIELD_NUMBER: _ClassVar[int]
    parent_session_id: str
    agent_type: str
    workspace_path: str
    def __init__(self, parent_session_id: _Optional[str] = ..., agent_type: _Optional[str] = ..., workspace_path: _Optional[str] = ...) -> None: ...

class RunSubAgentResponse(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ConfirmActionRequest(_message.Message):
    __slots__ = ("session_id", "action", "approval_id", "timeout", "expires")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    action: str
    approval_id: str
    timeout: float
    expires: float
    def __init__(self, session_id: _Optional[str] = ..., action: _Optional[str] = ..., approval_id: _Optional[str] = ..., timeout: _Optional[float] = ..., expires: _Optional[float] = ...) -> None: ...

class ConfirmActionResponse(_message.Message):
    __slots__ = ("approval_id", "approved", "status", "advisory", "reason", "session_id", "action", "created_at", "expires_at")
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ADVISORY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    approval_id: str
    approved: bool
    status: str
    advisory: bool
    reason: str
    session_id: str
    action: str
    created_at: int
    expires_at: int
    def __init__(self, approval_id: _Optional[str] = ..., approved: _Optional[bool] = ..., status: _Optional[str] = ..., advisory: _Optional[bool] = ..., reason: _Optional[str] = ..., session_id: _Optional[str] = ..., action: _Optional[str] = ..., created_at: _Optional[int] = ..., expires_at: _Optional[int] = ...) -> None: ...

class ApproveActionRequest(_message.Message):
    __slots__ = ("approval_id", "approved", "reason", "secret")
    APPROVAL_ID_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    approval_id: str
    approved: bool
    reason: str
    secret: str
    def __init__(self, approval_id: _Optional[str] = ..., approved: _Optional[bool] = ..., reason: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class ApproveActionResponse(_message.Message):
    __slots__ = ("ok", "advisory")
    OK_FIELD_NUMBER: _ClassVar[int]
    ADVISORY_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    advisory: bool
    def __init__(self, ok: _Optional[bool] = ..., advisory: _Optional[bool] = ...) -> None: ...

class ListApprovalsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListApprovalsResponse(_message.Message):
    __slots__ = ("approvals",)
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    approvals: _containers.RepeatedCompositeFieldContainer[ConfirmActionResponse]
    def __init__(self, approvals: _Optional[_Iterable[_Union[ConfirmActionResponse, _Mapping]]] = ...) -> None: ...

class LoginRequest(_message.Message):
    __slots__ = ("csr", "device_name", "client_version")
    CSR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    csr: str
    device_name: str
    client_version: str
    def __init__(self, csr: _Optional[str] = ..., device_name: _Optional[str] = ..., client_version: _Optional[str] = ...) -> None: ...

class LoginResponse(_message.Message):
    __slots__ = ("cert", "ca_cert", "valid_days")
    CERT_FIELD_NUMBER: _ClassVar[int]
    CA_CERT_FIELD_NUMBER: _ClassVar[int]
    VALID_DAYS_FIELD_NUMBER: _ClassVar[int]
    cert: str
    ca_cert: str
    valid_days: int
    def __init__(self, cert: _Optional[str] = ..., ca_cert: _Optional[str] = ..., valid_days: _Optional[int] = ...) -> None: ...

class GetCACertRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCACertResponse(_message.Message):
    __slots__ = ("cert",)
    CERT_FIELD_NUMBER: _ClassVar[int]
    cert: str
    def __init__(self, cert: _Optional[str] = ...) -> None: ...

class SnapshotPutRequest(_message.Message):
    __slots__ = ("name", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[_Iterable[str]] = ...) -> None: ...

class SnapshotPutResponse(_message.Message):
    __slots__ = ("name", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: int
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[int] = ...) -> None: ...

class SnapshotGetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class SnapshotGetResponse(_message.Message):
    __slots__ = ("name", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[_Iterable[str]] = ...) -> None: ...

class SnapshotListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotListResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTerminalRequest(_message.Message):
    __slots__ = ("session_id", "argv", "workdir", "env", "rows", "cols")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    workdir: str
    env: _containers.ScalarMap[str, str]
    rows: int
    cols: int
    def __init__(self, session_id: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., workdir: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ...) -> None: ...

class CreateTerminalResponse(_message.Message):
    __slots__ = ("terminal_id", "pid")
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    pid: int
    def __init__(self, terminal_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class TerminalStreamRequest(_message.Message):
    __slots__ = ("terminal_id",)
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    def __init__(self, terminal_id: _Optional[str] = ...) -> None: ...

class TerminalStreamResponse(_message.Message):
    __slots__ = ("data", "exit")
    DATA_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    exit: TerminalExit
    def __init__(self, data: _Optional[bytes] = ..., exit: _Optional[_Union[TerminalExit, _Mapping]] = ...) -> None: ...

class TerminalExit(_message.Message):
    __slots__ = ("exit_code", "signal")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    signal: str
    def __init__(self, exit_code: _Optional[int] = ..., signal: _Optional[str] = ...) -> None: ...

class TerminalWriteRequest(_message.Message):
    __slots__ = ("terminal_id", "data")
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    data: bytes
    def __init__(self, terminal_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class TerminalWriteResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class TerminalResizeRequest(_message.Message):
    __slots__ = ("terminal_id", "rows", "cols")
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    rows: int
    cols: int
    def __init__(self, terminal_id: _Optional[str] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ...) -> None: ...

class TerminalResizeResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class TerminalForegroundRequest(_message.Message):
    __slots__ = ("terminal_id",)
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    def __init__(self, terminal_id: _Optional[str] = ...) -> None: ...

class TerminalForegroundResponse(_message.Message):
    __slots__ = ("process_group_id", "input_waiting")
    PROCESS_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_WAITING_FIELD_NUMBER: _ClassVar[int]
    process_group_id: int
    input_waiting: bool
    def __init__(self, process_group_id: _Optional[int] = ..., input_waiting: _Optional[bool] = ...) -> None: ...

class TerminalSignalRequest(_message.Message):
    __slots__ = ("terminal_id", "signal")
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    signal: TerminalSignal
    def __init__(self, terminal_id: _Optional[str] = ..., signal: _Optional[_Union[TerminalSignal, str]] = ...) -> None: ...

class TerminalSignalResponse(_message.Message):
    __slots__ = ("process_group_id",)
    PROCESS_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    process_group_id: int
    def __init__(self, process_group_id: _Optional[int] = ...) -> None: ...

class TerminalDestroyRequest(_message.Message):
    __slots__ = ("terminal_id", "grace_ms")
    TERMINAL_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    terminal_id: str
    grace_ms: int
    def __init__(self, terminal_id: _Optional[str] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class TerminalDestroyResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ExposeServiceRequest(_message.Message):
    __slots__ = ("session_id", "port", "host")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    port: int
    host: str
    def __init__(self, session_id: _Optional[str] = ..., port: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class ExposeServiceResponse(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class UnexposeServiceRequest(_message.Message):
    __slots__ = ("session_id", "port")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    port: int
    def __init__(self, session_id: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class UnexposeServiceResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class ListExposedRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListExposedResponse(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ExposedService]
    def __init__(self, services: _Optional[_Iterable[_Union[ExposedService, _Mapping]]] = ...) -> None: ...

class ExposedService(_message.Message):
    __slots__ = ("port", "url", "host", "started_at")
    PORT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    port: int
    url: str
    host: str
    started_at: int
    def __init__(self, port: _Optional[int] = ..., url: _Optional[str] = ..., host: _Optional[str] = ..., started_at: _Optional[int] = ...) -> None: ...

class UpdateAllowedHostsRequest(_message.Message):
    __slots__ = ("session_id", "hosts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateAllowedHostsResponse(_message.Message):
    __slots__ = ("hosts",)
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class GetEgressRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetEgressResponse(_message.Message):
    __slots__ = ("session_id", "allowed_hosts", "rules", "network", "reason", "denied", "denials")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_HOSTS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    allowed_hosts: _containers.RepeatedScalarFieldContainer[str]
    rules: _containers.RepeatedScalarFieldContainer[str]
    network: bool
    reason: str
    denied: int
    denials: _containers.RepeatedCompositeFieldContainer[EgressDenial]
    def __init__(self, session_id: _Optional[str] = ..., allowed_hosts: _Optional[_Iterable[str]] = ..., rules: _Optional[_Iterable[str]] = ..., network: _Optional[bool] = ..., reason: _Optional[str] = ..., denied: _Optional[int] = ..., denials: _Optional[_Iterable[_Union[EgressDenial, _Mapping]]] = ...) -> None: ...

class Template(_message.Message):
    __slots__ = ("name", "description", "runtime_class", "rootfs", "limits", "env", "labels", "allowed_hosts", "lifetime", "idle_timeout", "warm", "pool_min", "pool_max", "source", "error", "digest")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_CLASS_FIELD_NUMBER: _ClassVar[int]
    ROOTFS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_HOSTS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    POOL_MIN_FIELD_NUMBER: _ClassVar[int]
    POOL_MAX_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    runtime_class: str
    rootfs: str
    limits: TemplateLimits
    env: _containers.ScalarMap[str, str]
    labels: _containers.ScalarMap[str, str]
    allowed_hosts: _containers.RepeatedScalarFieldContainer[str]
    lifetime: float
    idle_timeout: float
    warm: TemplateWarmth
    pool_min: int
    pool_max: int
    source: str
    error: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., runtime_class: _Optional[str] = ..., rootfs: _Optional[str] = ..., limits: _Optional[_Union[TemplateLimits, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., allowed_hosts: _Optional[_Iterable[str]] = ..., lifetime: _Optional[float] = ..., idle_timeout: _Optional[float] = ..., warm: _Optional[_Union[TemplateWarmth, _Mapping]] = ..., pool_min: _Optional[int] = ..., pool_max: _Optional[int] = ..., source: _Optional[str] = ..., error: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class TemplateLimits(_message.Message):
    __slots__ = ("cpus", "memory", "pids", "disk", "inodes", "open_files", "output")
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    INODES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    cpus: float
    memory: int
    pids: int
    disk: int
    inodes: int
    open_files: int
    output: int
    def __init__(self, cpus: _Optional[float] = ..., memory: _Optional[int] = ..., pids: _Optional[int] = ..., disk: _Optional[int] = ..., inodes: _Optional[int] = ..., open_files: _Optional[int] = ..., output: _Optional[int] = ...) -> None: ...

class TemplateWarmth(_message.Message):
    __slots__ = ("interpreters",)
    INTERPRETERS_FIELD_NUMBER: _ClassVar[int]
    interpreters: _containers.RepeatedCompositeFieldContainer[WarmInterpreter]
    def __init__(self, interpreters: _Optional[_Iterable[_Union[WarmInterpreter, _Mapping]]] = ...) -> None: ...

class WarmInterpreter(_message.Message):
    __slots__ = ("language", "modules")
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    language: str
    modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, language: _Optional[str] = ..., modules: _Optional[_Iterable[str]] = ...) -> None: ...

class ListTemplatesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTemplatesResponse(_message.Message):
    __slots__ = ("templates",)
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    templates: _containers.RepeatedCompositeFieldContainer[Template]
    def __init__(self, templates: _Optional[_Iterable[_Union[Template, _Mapping]]] = ...) -> None: ...

class GetTemplateRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ApplyTemplateRequest(_message.Message):
    __slots__ = ("template",)
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    template: Template
    def __init__(self, template: _Optional[_Union[Template, _Mapping]] = ...) -> None: ...

class DeleteTemplateRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTemplateResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class CreateContextRequest(_message.Message):
    __slots__ = ("session_id", "context_id", "language", "cwd")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    context_id: str
    language: str
    cwd: str
    def __init__(self, session_id: _Optional[str] = ..., context_id: _Optional[str] = ..., language: _Optional[str] = ..., cwd: _Optional[str] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("context_id", "session_id", "language", "cwd", "state", "ended_because", "execution_count", "waiting")
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    context_id: str
    session_id: str
    language: str
    cwd: str
    state: str
    ended_because: str
    execution_count: int
    waiting: int
    def __init__(self, context_id: _Optional[str] = ..., session_id: _Optional[str] = ..., language: _Optional[str] = ..., cwd: _Optional[str] = ..., state: _Optional[str] = ..., ended_because: _Optional[str] = ..., execution_count: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class ListContextsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListContextsResponse(_message.Message):
    __slots__ = ("contexts",)
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    contexts: _containers.RepeatedCompositeFieldContainer[Context]
    def __init__(self, contexts: _Optional[_Iterable[_Union[Context, _Mapping]]] = ...) -> None: ...

class ContextRequest(_message.Message):
    __slots__ = ("session_id", "context_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    context_id: str
    def __init__(self, session_id: _Optional[str] = ..., context_id: _Optional[str] = ...) -> None: ...

class RemoveContextResponse(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...

class InterruptContextRequest(_message.Message):
    __slots__ = ("session_id", "context_id", "grace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    context_id: str
    grace: float
    def __init__(self, session_id: _Optional[str] = ..., context_id: _Optional[str] = ..., grace: _Optional[float] = ...) -> None: ...

class InterruptContextResponse(_message.Message):
    __slots__ = ("interrupted", "stopped")
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    interrupted: bool
    stopped: bool
    def __init__(self, interrupted: _Optional[bool] = ..., stopped: _Optional[bool] = ...) -> None: ...

class ExecuteCodeRequest(_message.Message):
    __slots__ = ("session_id", "context_id", "code", "timeout", "env", "make_context", "language", "cwd")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    MAKE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    context_id: str
    code: bytes
    timeout: float
    env: _containers.ScalarMap[str, str]
    make_context: bool
    language: str
    cwd: str
    def __init__(self, session_id: _Optional[str] = ..., context_id: _Optional[str] = ..., code: _Optional[bytes] = ..., timeout: _Optional[float] = ..., env: _Optional[_Mapping[str, str]] = ..., make_context: _Optional[bool] = ..., language: _Optional[str] = ..., cwd: _Optional[str] = ...) -> None: ...

class ExecuteCodeResponse(_message.Message):
    __slots__ = ("stdout", "stderr", "result", "end")
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stdout: bytes
    stderr: bytes
    result: ExecutionResult
    end: ExecutionEnd
    def __init__(self, stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., result: _Optional[_Union[ExecutionResult, _Mapping]] = ..., end: _Optional[_Union[ExecutionEnd, _Mapping]] = ...) -> None: ...

class ExecutionResult(_message.Message):
    __slots__ = ("data", "is_main_result", "left_out")
    class DataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_MAIN_RESULT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    data: _containers.ScalarMap[str, bytes]
    is_main_result: bool
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, data: _Optional[_Mapping[str, bytes]] = ..., is_main_result: _Optional[bool] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecutionEnd(_message.Message):
    __slots__ = ("exit_code", "status", "execution_count", "error", "context_state", "duration_ms", "truncated", "denials", "limits")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_STATE_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    status: str
    execution_count: int
    error: ExecutionError
    context_state: str
    duration_ms: int
    truncated: bool
    denials: _containers.RepeatedCompositeFieldContainer[EgressDenial]
    limits: _containers.RepeatedCompositeFieldContainer[ReachedLimit]
    def __init__(self, exit_code: _Optional[int] = ..., status: _Optional[str] = ..., execution_count: _Optional[int] = ..., error: _Optional[_Union[ExecutionError, _Mapping]] = ..., context_state: _Optional[str] = ..., duration_ms: _Optional[int] = ..., truncated: _Optional[bool] = ..., denials: _Optional[_Iterable[_Union[EgressDenial, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[ReachedLimit, _Mapping]]] = ...) -> None: ...

class ExecutionError(_message.Message):
    __slots__ = ("name", "value", "traceback")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    traceback: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class GetAuditRequest(_message.Message):
    __slots__ = ("session_id", "principal", "since", "until", "action", "denied", "limit", "forward", "cursor", "wait")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    principal: str
    since: float
    until: float
    action: str
    denied: bool
    limit: int
    forward: bool
    cursor: str
    wait: float
    def __init__(self, session_id: _Optional[str] = ..., principal: _Optional[str] = ..., since: _Optional[float] = ..., until: _Optional[float] = ..., action: _Optional[str] = ..., denied: _Optional[bool] = ..., limit: _Optional[int] = ..., forward: _Optional[bool] = ..., cursor: _Optional[str] = ..., wait: _Optional[float] = ...) -> None: ...

class GetAuditResponse(_message.Message):
    __slots__ = ("rows", "cursor", "more")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[str]
    cursor: str
    more: bool
    def __init__(self, rows: _Optional[_Iterable[str]] = ..., cursor: _Optional[str] = ..., more: _Optional[bool] = ...) -> None: ...

class VerifyAuditRequest(_message.Message):
    __slots__ = ("expect",)
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    expect: str
    def __init__(self, expect: _Optional[str] = ...) -> None: ...

class VerifyAuditResponse(_message.Message):
    __slots__ = ("ok", "rows", "first", "head", "problems")
    OK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    rows: int
    first: int
    head: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ok: _Optional[bool] = ..., rows: _Optional[int] = ..., first: _Optional[int] = ..., head: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class SetSecretRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "key", "value")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    key: str
    value: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class SetSecretResponse(_message.Message):
    __slots__ = ("secret",)
    SECRET_FIELD_NUMBER: _ClassVar[int]
    secret: SecretInfo
    def __init__(self, secret: _Optional[_Union[SecretInfo, _Mapping]] = ...) -> None: ...

class SecretInfo(_message.Message):
    __slots__ = ("name", "key", "tenant_id", "created_at", "updated_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: str
    tenant_id: str
    created_at: int
    updated_at: int
    def __init__(self, name: _Optional[str] = ..., key: _Optional[str] = ..., tenant_id: _Optional[str] = ..., created_at: _Optional[int] = ..., updated_at: _Optional[int] = ...) -> None: ...

class ListSecretsRequest(_message.Message):
    __slots__ = ("tenant_id",)
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    def __init__(self, tenant_id: _Optional[str] = ...) -> None: ...

class ListSecretsResponse(_message.Message):
    __slots__ = ("secrets",)
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    secrets: _containers.RepeatedCompositeFieldContainer[SecretInfo]
    def __init__(self, secrets: _Optional[_Iterable[_Union[SecretInfo, _Mapping]]] = ...) -> None: ...

class DeleteSecretRequest(_message.Message):
    __slots__ = ("tenant_id", "name", "key")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    name: str
    key: str
    def __init__(self, tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class DeleteSecretResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...
