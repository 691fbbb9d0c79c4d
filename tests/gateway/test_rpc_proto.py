"""The wire stays what K8E's published clients speak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from k8e._generated import sandbox_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
FILE = pb.DESCRIPTOR
SERVICE = FILE.services_by_name["SandboxService"]

# Message: number, name and type of each field, as in K8E's generation E4 (and GetCACert of E3).
MESSAGES = {
    "CreateSessionRequest": "1 session_id string, 2 tenant_id string, "
    "3 allowed_hosts repeated string, 4 runtime_class string, 5 env map, "
    "6 secret_refs repeated SecretRef",
    "SecretRef": "1 secret_name string, 2 key string, 3 env_var string",
    "CreateSessionResponse": "1 session_id string, 2 pod_ip string",
    "DestroySessionRequest": "1 session_id string",
    "DestroySessionResponse": "1 ok bool",
    "ExecRequest": "1 session_id string, 2 command string, 3 timeout int32, 4 workdir string, "
    "5 background bool, 6 language string",
    "ExecResponse": "1 stdout string, 2 stderr string, 3 exit_code int32, 4 session_id string, "
    "5 run_id string, 6 status string, 7 duration_ms int64, 8 truncated bool, 9 language string",
    "ExecStreamResponse": "1 chunk string",
    "WriteFileRequest": "1 session_id string, 2 path string, 3 content string, 4 mode string",
    "WriteFileResponse": "1 ok bool",
    "ReadFileRequest": "1 session_id string, 2 path string",
    "ReadFileResponse": "1 content string",
    "ListFilesRequest": "1 session_id string, 2 since int64",
    "ListFilesResponse": "1 files repeated FileEntry",
    "FileEntry": "1 path string, 2 modified int64, 3 type string, 4 size int64",
    "PipInstallRequest": "1 session_id string, 2 packages repeated string",
    "PipInstallResponse": "1 output string, 2 exit_code int32",
    "RunSubAgentRequest": "1 parent_session_id string, 2 agent_type string, "
    "3 workspace_path string",
    "RunSubAgentResponse": "1 session_id string",
    "ConfirmActionRequest": "1 session_id string, 2 action string, 3 approval_id string",
    "ConfirmActionResponse": "1 approval_id string, 2 approved bool",
    "ApproveActionRequest": "1 approval_id string, 2 approved bool, 3 reason string",
    "ApproveActionResponse": "1 ok bool",
    "GetCACertRequest": "",
    "GetCACertResponse": "1 cert string",
    "GetSessionRequest": "1 session_id string",
    "GetSessionResponse": "1 session_id string, 2 phase string, 3 runtime_class string, "
    "4 pod_ip string, 5 tenant_id string, 6 expires_at int64, 7 env_keys repeated string, "
    "8 secret_env_vars repeated string, 9 background_runs int32, "
    "10 allowed_hosts repeated string",
    "ListSessionsRequest": "1 phase string",
    "ListSessionsResponse": "1 sessions repeated GetSessionResponse",
    "PauseSessionRequest": "1 session_id string",
    "PauseSessionResponse": "1 ok bool",
    "ResumeSessionRequest": "1 session_id string",
    "ResumeSessionResponse": "1 ok bool",
    "LoginRequest": "1 csr string, 2 device_name string, 3 client_version string",
    "LoginResponse": "1 cert string, 2 ca_cert string, 3 valid_days int64",
    "PollRunRequest": "1 run_id string",
    "PollRunResponse": "1 run_id string, 2 status string, 3 stdout string, 4 stderr string, "
    "5 exit_code int32, 6 duration_ms int64, 7 truncated bool",
    "GetTranscriptRequest": "1 session_id string, 2 offset int64, 3 limit int64",
    "GetTranscriptResponse": "1 session_id string, 2 output string, 3 offset int64, "
    "4 next_offset int64, 5 truncated_before bool, 6 eof bool",
    "GetEventsRequest": "1 session_id string, 2 limit int64",
    "GetEventsResponse": "1 events repeated string, 2 truncated bool, 3 returned int64",
    "SnapshotPutRequest": "1 name string, 2 layers repeated string",
    "SnapshotPutResponse": "1 name string, 2 layers int64",
    "SnapshotGetRequest": "1 name string",
    "SnapshotGetResponse": "1 name string, 2 layers repeated string",
    "SnapshotListRequest": "",
    "SnapshotListResponse": "1 names repeated string",
    "GetProcessesRequest": "1 session_id string",
    "GetProcessesResponse": "1 processes repeated ProcessInfo",
    "ProcessInfo": "1 pid int32, 2 comm string, 3 state string",
    "CreateTerminalRequest": "1 session_id string, 2 argv repeated string, 3 workdir string, "
    "4 env map, 5 rows int32, 6 cols int32",
    "CreateTerminalResponse": "1 terminal_id string, 2 pid int32",
    "TerminalStreamRequest": "1 terminal_id string",
    "TerminalStreamResponse": "1 data bytes, 2 exit TerminalExit",
    "TerminalExit": "1 exit_code int32, 2 signal string",
    "TerminalWriteRequest": "1 terminal_id string, 2 data bytes",
    "TerminalWriteResponse": "1 ok bool",
    "TerminalResizeRequest": "1 terminal_id string, 2 rows int32, 3 cols int32",
    "TerminalResizeResponse": "1 ok bool",
    "TerminalForegroundRequest": "1 terminal_id string",
    "TerminalForegroundResponse": "1 process_group_id int32, 2 input_waiting bool",
    "TerminalSignalRequest": "1 terminal_id string, 2 signal TerminalSignal",
    "TerminalSignalResponse": "1 process_group_id int32",
    "TerminalDestroyRequest": "1 terminal_id string, 2 grace_ms int32",
    "TerminalDestroyResponse": "1 ok bool",
    "ExposeServiceRequest": "1 session_id string, 2 port int32, 3 host string",
    "ExposeServiceResponse": "1 url string",
    "UnexposeServiceRequest": "1 session_id string, 2 port int32",
    "UnexposeServiceResponse": "1 ok bool",
    "ListExposedRequest": "1 session_id string",
    "ListExposedResponse": "1 services repeated ExposedService",
    "ExposedService": "1 port int32, 2 url string, 3 host string, 4 started_at int64",
    "UpdateAllowedHostsRequest": "1 session_id string, 2 hosts repeated string",
    "UpdateAllowedHostsResponse": "1 hosts repeated string",
}
UNARY = (
    "CreateSession DestroySession Exec WriteFile ReadFile ListFiles PipInstall RunSubAgent "
    "ConfirmAction ApproveAction GetCACert GetSession ListSessions PauseSession ResumeSession "
    "Login PollRun GetTranscript GetEvents GetProcesses SnapshotPut SnapshotGet SnapshotList "
    "CreateTerminal TerminalWrite TerminalResize TerminalForeground TerminalSignal "
    "TerminalDestroy ExposeService UnexposeService ListExposed UpdateAllowedHosts"
).split()
TEMPLATES = ("ListTemplates", "GetTemplate", "ApplyTemplate", "DeleteTemplate")
SERVER_STREAMS = ["ExecStream", "TerminalStream"]
CONTEXTS = ("CreateContext ListContexts RemoveContext RestartContext InterruptContext").split()
OURS = {
    "RunFrame",
    "EgressDenial",
    "ReachedLimit",
    "GetEgressRequest",
    "GetEgressResponse",
    "ListApprovalsRequest",
    "ListApprovalsResponse",
    "Template",
    "TemplateLimits",
    "TemplateWarmth",
    "WarmInterpreter",
    "ListTemplatesRequest",
    "ListTemplatesResponse",
    "GetTemplateRequest",
    "ApplyTemplateRequest",
    "DeleteTemplateRequest",
    "DeleteTemplateResponse",
    *("Context", "ContextRequest", "CreateContextRequest", "RemoveContextResponse"),
    *("ListContextsRequest", "ListContextsResponse"),
    *("InterruptContextRequest", "InterruptContextResponse"),
    *("ExecuteCodeRequest", "ExecuteCodeResponse"),
    *("ExecutionResult", "ExecutionEnd", "ExecutionError"),
    *("GetAuditRequest", "GetAuditResponse", "VerifyAuditRequest", "VerifyAuditResponse"),
    *("SetSecretRequest", "SetSecretResponse", "SecretInfo"),
    *("ListSecretsRequest", "ListSecretsResponse"),
    *("DeleteSecretRequest", "DeleteSecretResponse"),
}
TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_DOUBLE: "double",
}


def spell(field: FieldDescriptor) -> str:
    message, enum = field.message_type, field.enum_type
    if message and message.GetOptions().map_entry:
        return f"{field.number} {field.name} map"
    kind = message.name if message else enum.name if enum else TYPES[field.type]
    return f"{field.number} {field.name} {'repeated ' if field.is_repeated else ''}{kind}"


def fields_of(message: Descriptor, *, ours: bool) -> str:
    return ", ".join(spell(field) for field in message.fields if (field.number >= 100) == ours)


def test_the_package_and_service_have_the_names_that_clients_dial() -> None:
    assert SERVICE.full_name == "sandbox.v1.SandboxService"


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_of_k8e_keep_their_numbers_and_types(name: str) -> None:
    assert fields_of(FILE.message_types_by_name[name], ours=False) == MESSAGES[name]


def test_only_messages_of_our_own_use_low_numbers_of_our_own() -> None:
    assert set(FILE.message_types_by_name) == set(MESSAGES) | OURS


def test_our_additions_start_at_100() -> None:
    added = {
        name: fields_of(message, ours=True)
        for name, message in FILE.message_types_by_name.items()
        if fields_of(message, ours=True)
    }
    assert added == {
        "CreateSessionRequest": "100 template string",
        "ExecRequest": "100 code bytes",
        "ExecResponse": "100 stdout_bytes bytes, 101 stderr_bytes bytes, "
        "102 denials repeated EgressDenial, 103 limits repeated ReachedLimit",
        "WriteFileRequest": "100 content_bytes bytes",
        "ReadFileResponse": "100 content_bytes bytes",
        "ConfirmActionRequest": "100 timeout double, 101 expires double",
        "ConfirmActionResponse": "100 status string, 101 advisory bool, 102 reason string, "
        "103 session_id string, 104 action string, 105 created_at int64, 106 expires_at int64",
        "ApproveActionRequest": "100 secret string",
        "ApproveActionResponse": "100 advisory bool",
        "GetEventsRequest": "100 cursor string",
        "GetEventsResponse": "100 cursor string",
        "GetSessionResponse": "100 parent_id string, 101 template string",
    }


def test_every_rpc_of_k8e_is_there_with_its_kind() -> None:
    kinds = {
        method.name: (method.client_streaming, method.server_streaming)
        for method in SERVICE.methods
    }
    assert kinds == {
        **dict.fromkeys(UNARY, (False, False)),
        **dict.fromkeys(SERVER_STREAMS, (False, True)),
        "GetEgress": (False, False),
        "ListApprovals": (False, False),
        **dict.fromkeys(TEMPLATES, (False, False)),
        "Run": (True, True),
        **dict.fromkeys(CONTEXTS, (False, False)),
        **dict.fromkeys(("GetAudit", "VerifyAudit"), (False, False)),
        **dict.fromkeys(("SetSecret", "ListSecrets", "DeleteSecret"), (False, False)),
        "ExecuteCode": (False, True),
    }


def test_maps_and_signals_are_those_of_k8e() -> None:
    for name in ("CreateSessionRequest", "CreateTerminalRequest"):
        entry = FILE.message_types_by_name[name].fields_by_name["env"].message_type
        assert entry is not None
        assert [spell(field) for field in entry.fields] == ["1 key string", "2 value string"]
    signals = FILE.enum_types_by_name["TerminalSignal"].values
    assert [(value.number, value.name.removeprefix("TERMINAL_SIGNAL_")) for value in signals] == [
        (0, "UNSPECIFIED"),
        (1, "INT"),
        (2, "TERM"),
        (3, "KILL"),
        (4, "TSTP"),
        (5, "HUP"),
    ]


def test_generated_files_are_what_the_proto_generates() -> None:
    subprocess.run([sys.executable, ROOT / "proto/generate.py", "--check"], check=True, timeout=50)
