"""Errors of the Kubernetes API, in its object Status."""

from __future__ import annotations

from typing import Any

from k8e import errors

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "AlreadyExists",
    410: "Expired",
    413: "RequestEntityTooLarge",
    422: "Invalid",
    429: "TooManyRequests",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class ApiError(Exception):
    """A refusal with its HTTP status."""

    def __init__(self, code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason or REASONS.get(code, "InternalError")

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


def invalid(message: str) -> ApiError:
    return ApiError(422, message)


def of_error(error: errors.K8eError) -> ApiError:
    """An error of k8e as the Kubernetes API tells it, with its hint."""
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    return ApiError(error.wire_status.http, text)


def success() -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
