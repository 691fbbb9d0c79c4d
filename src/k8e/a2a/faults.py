"""What can be wrong with a call, by the numbers of JSON-RPC and A2A."""

from __future__ import annotations

PARSE = -32700
INVALID_REQUEST = -32600
NO_METHOD = -32601
INVALID_PARAMS = -32602
INTERNAL = -32603
TASK_NOT_FOUND = -32001
NOT_CANCELABLE = -32002
NO_PUSH = -32003
UNSUPPORTED = -32004
CONTENT_TYPE = -32005
NO_EXTENDED_CARD = -32007
VERSION = -32009
BUSY = -32000  # "server error" of JSON-RPC: A2A has no number for too much at once


class Fault(Exception):
    """A call that is answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def not_found(task_id: str) -> Fault:
    """No such task, or somebody else's: the two look the same on purpose."""
    return Fault(TASK_NOT_FOUND, f"there is no task {task_id!r}")
