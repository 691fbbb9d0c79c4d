"""Errors as problems (RFC 9457), each with a hint, a stable code and the request's id."""

from __future__ import annotations

import http
import json
import logging
from collections.abc import Sequence

from pydantic import ValidationError

from k8e import errors
from k8e.rest.bodies import TooLarge
from k8e.rest.models import FieldProblem, Problem

log = logging.getLogger(__name__)

CONTENT_TYPE = b"application/problem+json"
FILES_HINT = "GET /sandbox/{sandbox_id}/files lists what is there"
MAX_SHOWN = 20  # parts of a request that are told to be wrong …
MAX_LISTED = 500  # … where no more are: making the list of a million would take half a minute
_LEAD = {
    "k8e sandbox sessions lists yours": "GET /sandbox lists yours",
}
"""Hints of the command line, as REST has them."""
_DESCRIBED = "GET /openapi.json describes every request; /docs is the same for people"


class Refusal(Exception):
    """A request that REST itself refuses."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        hint: str = "",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.hint = hint
        self.headers = list(headers)


def problem_of(error: Exception, request_id: str) -> Problem:
    """An error as its caller sees it; only the log gets unexpected ones."""
    match error:
        case Refusal():
            return _made(error.status, error.code, error.detail, error.hint, request_id)
        case TooLarge():
            hint = "send less; PUT of a file takes any size"
            return _made(413, "too_large", str(error), hint, request_id)
        case ValidationError():
            return _malformed(error, request_id)
        case errors.K8eError():
            status = error.wire_status
            hint = _LEAD.get(error.hint, error.hint)
            return _made(status.http, status.code, error.message, hint, request_id)
        case OSError() if error.errno:
            status = errors.status_of_errno(error.errno)
            hint = errors.file_hint(error, FILES_HINT)
            return _made(status.http, status.code, error.strerror or "failed", hint, request_id)
        case _:
            log.error("request %s failed unexpectedly", request_id, exc_info=error)
            return _made(500, "internal", errors.INTERNAL, "", request_id)


def _malformed(error: ValidationError, request_id: str) -> Problem:
    if (count := error.error_count()) > MAX_LISTED:
        detail = f"{count} parts of the request are wrong"
        return _made(400, errors.InvalidRequest.code, detail, _DESCRIBED, request_id)
    found = [
        FieldProblem(field=".".join(map(str, item["loc"]))[:200], message=item["msg"][:300])
        for item in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    first = found[0]
    detail = f"{first.field}: {first.message}" if first.field else first.message
    told = _made(400, errors.InvalidRequest.code, detail, _DESCRIBED, request_id)
    return told.model_copy(update={"errors": found[:MAX_SHOWN]})


def _made(status: int, code: str, detail: str, hint: str, request_id: str) -> Problem:
    return Problem(
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        hint=hint,
        request_id=request_id,
        errors=None,
    )


def encoded(problem: Problem) -> bytes:
    """The body of an answer."""
    return json.dumps(problem.model_dump(exclude_none=True)).encode() + b"\n"
