"""Asks before it deletes something. Here the same program decides; usually a person does."""

from threading import Thread

from k8e import SandboxClient, sandbox_session


def decide(client: SandboxClient) -> None:
    """Approve what is asked first; the other half of `k8e sandbox approve`."""
    waiting = []
    while not waiting:
        waiting = client.list_approvals()
    client.approve_action(waiting[0].approval_id, reason="it is only a copy")


with sandbox_session() as (client, session_id):
    client.write_file(session_id, "data.csv", "1,2,3\n")
    approver = Thread(target=decide, args=[client])
    approver.start()
    decision = client.confirm_action(session_id, "delete data.csv", timeout=30)
    approver.join()
    print("approved" if decision.approved else "rejected", "because", decision.reason)
    if decision.approved:
        client.exec(session_id, "rm data.csv")
    print(len(client.list_files(session_id)), "files are left")
