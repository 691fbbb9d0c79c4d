"""Saves a workspace, spoils it, and goes on in a new session from what was saved."""

from k8e import SandboxClient

with SandboxClient() as client:
    session_id = client.create_session(
        manifest=[{"file": {"path": "notes.txt", "content": "all is well\n"}}]
    )
    saved = client.save_snapshot(session_id, "before", replace=True)
    print("saved", saved.file_count, "file")
    client.exec(session_id, "rm notes.txt")
    client.destroy_session(session_id)

    again = client.restore_snapshot("before")
    print(client.exec(again, "cat notes.txt").stdout, end="")
    client.destroy_session(again)
    client.delete_snapshot("before")
