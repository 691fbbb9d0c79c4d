"""Prints the output of a program while it runs, feeds its stdin, and shows how it ended."""

from k8e import Exit, Stderr, Stdout, sandbox_session

COUNT = """
while read line; do
    echo "got $line"
    sleep 0.2
done
echo "no more input" >&2
exit 3
"""

with sandbox_session() as (client, session_id):
    for event in client.exec_events(session_id, COUNT, stdin="one\ntwo\nthree\n"):
        match event:
            case Stdout(data=data):
                print("stdout", data)
            case Stderr(data=data):
                print("stderr", data)
            case Exit(exit_code=code, duration_ms=duration):
                print("exit code", code, "after", duration, "ms")
