"""The two versions of A2A on the wire: tasks and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from k8e.a2a import message as a2a_message
from k8e.a2a import tasks
from k8e.a2a.message import INVALID_PARAMS, Fault, Piece, TaskMessage
from k8e.a2a.tasks import Event, Task, TaskOutput, TaskResult, TaskStatus

MAX_PARTS = 64
_TEXTS = {"stdout": "what the code printed", "stderr": "what it printed to its standard error"}
_RESULT = "result"


class Dialect:
    """A2A 1.0: names of the proto, one key in a part says what it is."""

    version = "1.0"
    methods: ClassVar[Mapping[str, str]] = {
        "SendMessage": "send",
        "SendStreamingMessage": "stream",
        "GetTask": "get",
        "CancelTask": "cancel",
        "SubscribeToTask": "subscribe",
        "GetExtendedAgentCard": "extended_card",
        "CreateTaskPushNotificationConfig": "push",
        "GetTaskPushNotificationConfig": "push",
        "ListTaskPushNotificationConfigs": "push",
        "DeleteTaskPushNotificationConfig": "push",
        "ListTasks": "unsupported",
    }
    _blocking = ("returnImmediately", False)

    # Reading.

    def ask(self, params: Mapping[str, Any], longest: float) -> TaskMessage:
        message = a2a_message.mapping(params.get("message"), "message")
        parts = message.get("parts")
        if not isinstance(parts, list) or not parts:
            raise Fault(INVALID_PARAMS, "message has no parts")
        listed = cast("list[Any]", parts)
        if len(listed) > MAX_PARTS:
            raise Fault(INVALID_PARAMS, f"message has more than {MAX_PARTS} parts")
        pieces = [self.piece(a2a_message.mapping(part, "a part")) for part in listed]
        metadata = a2a_message.mapping(message.get("metadata"), "metadata")
        settings = a2a_message.mapping(params.get("configuration"), "configuration")
        key, waits = self._blocking
        said = settings.get(key)
        return TaskMessage(
            a2a_message.job(pieces, metadata, longest),
            a2a_message.name_of(message.get("contextId"), "contextId"),
            a2a_message.name_of(message.get("taskId"), "taskId"),
            blocking=said is None or bool(said) is waits,
        )

    def piece(self, part: Mapping[str, Any]) -> Piece:
        metadata = a2a_message.mapping(part.get("metadata"), "metadata")
        if "text" in part:
            return Piece(a2a_message.text(part["text"], "text", 4 << 20), metadata=metadata)
        if "data" in part:
            return Piece(data=part["data"], metadata=metadata)
        if "raw" in part:
            return Piece(file=a2a_message.file_of(part.get("filename"), part["raw"]))
        if "url" in part:
            raise a2a_message.refuse_url()
        raise Fault(INVALID_PARAMS, "a part has neither text nor data nor raw")

    # Writing.

    def state(self, state: str) -> str:
        return f"TASK_STATE_{state.upper()}"

    def text_part(self, text: str) -> dict[str, Any]:
        return {"text": text, "mediaType": "text/plain"}

    def data_part(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"data": data, "mediaType": "application/json"}

    def message(self, task: Task, text: str) -> dict[str, Any]:
        return {
            "messageId": f"{task.id}-status",
            "taskId": task.id,
            "contextId": task.context_id,
            "role": "ROLE_AGENT",
            "parts": [self.text_part(text)],
        }

    def status(self, task: Task, status: TaskStatus) -> dict[str, Any]:
        told: dict[str, Any] = {"state": self.state(status.state), "timestamp": status.at}
        if status.text:
            told["message"] = self.message(task, status.text)
        return told

    def task(self, task: Task) -> dict[str, Any]:
        """A task in its present state."""
        artifacts = [self._text(name, task.text(name)) for name in task.streams]
        if task.result is not None:
            artifacts.append(self._result(task.result))
        return {
            "id": task.id,
            "contextId": task.context_id,
            "status": self.status(task, task.status),
            "artifacts": artifacts,
        }

    def _text(self, name: str, text: str) -> dict[str, Any]:
        part = self.text_part(text)
        return {"artifactId": name, "name": name, "description": _TEXTS[name], "parts": [part]}

    def _result(self, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "artifactId": _RESULT,
            "name": _RESULT,
            "description": "how the code ended",
            "parts": [self.data_part(data)],
        }

    def sent(self, task: Task) -> dict[str, Any]:
        """The answer to a message."""
        return {"task": self.task(task)}

    def event(self, task: Task, event: Event) -> dict[str, Any]:
        """One event of a stream."""
        about = {"taskId": task.id, "contextId": task.context_id}
        if isinstance(event, TaskStatus):
            return {"statusUpdate": {**about, "status": self.status(task, event)}}
        return {"artifactUpdate": {**about, **self._artifact(event)}}

    def _artifact(self, event: TaskOutput | TaskResult) -> dict[str, Any]:
        if isinstance(event, TaskResult):
            return {"artifact": self._result(event.data), "append": False, "lastChunk": True}
        return {
            "artifact": self._text(event.name, event.text),
            "append": not event.first,
            "lastChunk": False,
        }


class OldDialect(Dialect):
    """A2A 0.3: every object says which kind it is."""

    version = "0.3"
    methods: ClassVar[Mapping[str, str]] = {
        "message/send": "send",
        "message/stream": "stream",
        "tasks/get": "get",
        "tasks/cancel": "cancel",
        "tasks/resubscribe": "subscribe",
        "agent/getAuthenticatedExtendedCard": "extended_card",
        "tasks/pushNotificationConfig/set": "push",
        "tasks/pushNotificationConfig/get": "push",
        "tasks/pushNotificationConfig/list": "push",
        "tasks/pushNotificationConfig/delete": "push",
    }
    _blocking = ("blocking", True)

    def piece(self, part: Mapping[str, Any]) -> Piece:
        if part.get("kind") != "file" and "file" not in part:
            return super().piece(part)
        file = a2a_message.mapping(part.get("file"), "file")
        if "bytes" not in file:
            raise a2a_message.refuse_url()
        return Piece(file=a2a_message.file_of(file.get("name"), file["bytes"]))

    def state(self, state: str) -> str:
        return state

    def text_part(self, text: str) -> dict[str, Any]:
        return {"kind": "text", "text": text}

    def data_part(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "data", "data": data}

    def message(self, task: Task, text: str) -> dict[str, Any]:
        return {**super().message(task, text), "kind": "message", "role": "agent"}

    def task(self, task: Task) -> dict[str, Any]:
        return {"kind": "task", **super().task(task)}

    def sent(self, task: Task) -> dict[str, Any]:
        return self.task(task)

    def event(self, task: Task, event: Event) -> dict[str, Any]:
        about = {"taskId": task.id, "contextId": task.context_id}
        if isinstance(event, TaskStatus):
            final = event.state in tasks.OVER
            told = self.status(task, event)
            return {"kind": "status-update", **about, "status": told, "final": final}
        return {"kind": "artifact-update", **about, **self._artifact(event)}


DIALECTS = (Dialect(), OldDialect())


def speaking(method: str) -> Dialect | None:
    """The dialect that has a method."""
    return next((item for item in DIALECTS if method in item.methods), None)
