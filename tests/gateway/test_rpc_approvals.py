"""Approvals over gRPC, as K8E's clients ask for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import failing

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode
ACTION = "send a mail to everybody"


def ask(stub: Stub, session: str) -> pb.ConfirmActionResponse:
    return stub.ConfirmAction(
        pb.ConfirmActionRequest(session_id=session, action=ACTION), timeout=20
    )


def wait(stub: Stub, approval_id: str, seconds: float = 20) -> pb.ConfirmActionResponse:
    """Wait as K8E's clients do: with nothing but the id, or with everything again."""
    request = pb.ConfirmActionRequest(approval_id=approval_id, timeout=seconds)
    return stub.ConfirmAction(request, timeout=30)


def decide(stub: Stub, approval_id: str, *, yes: bool) -> pb.ApproveActionResponse:
    request = pb.ApproveActionRequest(approval_id=approval_id, approved=yes, reason="because")
    return stub.ApproveAction(request, timeout=20)


def test_an_action_is_registered_listed_approved_and_used_once(stub: Stub, session: str) -> None:
    asked = ask(stub, session)
    assert (asked.approved, asked.status, asked.advisory) == (False, "pending", True)
    assert asked.expires_at - asked.created_at == pytest.approx(3600, abs=1)
    listed = stub.ListApprovals(pb.ListApprovalsRequest(session_id=session), timeout=20)
    assert [(item.approval_id, item.action) for item in listed.approvals] == [
        (asked.approval_id, ACTION)
    ]
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(wait, stub, asked.approval_id)
        assert decide(stub, asked.approval_id, yes=True) == pb.ApproveActionResponse(
            ok=True, advisory=True
        )
        found = task.result(20)
    assert (found.approval_id, found.approved) == (asked.approval_id, True)
    assert (found.reason, found.session_id, found.action) == ("because", session, ACTION)
    failed = failing(lambda: wait(stub, asked.approval_id))
    assert failed.status is Status.ALREADY_EXISTS


def test_a_rejection_is_an_answer(stub: Stub, session: str) -> None:
    asked = ask(stub, session)
    decide(stub, asked.approval_id, yes=False)
    found = wait(stub, asked.approval_id)
    assert (found.approved, found.status) == (False, "rejected")
    again = failing(lambda: decide(stub, asked.approval_id, yes=True))
    assert (again.status, again.code) == (Status.ALREADY_EXISTS, "conflict")


def test_failures_have_the_codes_that_k8e_s_clients_know(stub: Stub, session: str) -> None:
    for work in (lambda: wait(stub, "approval-x"), lambda: decide(stub, "approval-x", yes=True)):
        failed = failing(work)
        assert (failed.status, failed.code) == (Status.NOT_FOUND, "approval_not_found")
    assert failing(lambda: ask(stub, "nobody-s")).status is Status.NOT_FOUND
    assert failing(lambda: ask(stub, "")).status is Status.INVALID_ARGUMENT
    asked = ask(stub, session)
    late = failing(lambda: wait(stub, asked.approval_id, 0.05))
    assert (late.status, late.code) == (Status.DEADLINE_EXCEEDED, "timed_out")
    assert "nobody decided" in late.details
    decide(stub, asked.approval_id, yes=False)
