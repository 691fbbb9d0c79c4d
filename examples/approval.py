"""Asks before it deletes something, and does not where nobody says yes."""

from k8e import errors, sandbox_session

ACTION = "delete data.csv"

with sandbox_session() as (client, session_id):
    client.write_file(session_id, "data.csv", "1,2,3\n")
    asked = client.confirm_action(session_id, ACTION, wait=False)
    print("somebody may now run: k8e sandbox approve", asked.approval_id)
    try:
        decision = client.confirm_action(
            session_id, ACTION, timeout=2, approval_id=asked.approval_id
        )
        approved = decision.approved
    except errors.TimedOut:
        approved = False
    if approved:
        client.exec(session_id, "rm data.csv")
    print(len(client.list_files(session_id)), "file is left")
