"""Talks to a Python that keeps its variables, on a terminal, as a person would."""

from k8e import sandbox_session

PROMPT = ">>> "

with (
    sandbox_session() as (client, session_id),
    client.terminal(session_id, ["python3", "-q"]) as python,
):
    python.read_until(PROMPT)
    for line in ("x = 20", "x + 1", "print('x is', x)"):
        python.write(line + "\n")
        print(PROMPT + python.read_until(PROMPT).decode().removesuffix(PROMPT).strip())
