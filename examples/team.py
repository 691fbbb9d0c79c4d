"""Gives three sub-agents a sandbox each; all of them work in the workspace of one session."""

from concurrent.futures import ThreadPoolExecutor

from k8e import SandboxClient, sandbox_session

PARTS = {"intro": "Once upon a time,", "middle": "something went wrong,", "end": "and was fixed."}


def write(client: SandboxClient, parent: str, name: str, text: str) -> str:
    """Let a sub-agent write one part; which sandbox it had."""
    agent = client.run_subagent(parent, agent_type="writer")
    client.exec(agent, ["sh", "-c", 'echo "$1" > "$2.txt"', "-", text, name])
    return agent


with sandbox_session() as (client, parent), ThreadPoolExecutor() as pool:
    jobs = [pool.submit(write, client, parent, name, text) for name, text in PARTS.items()]
    print(len({job.result() for job in jobs}), "sandboxes")
    print(client.exec(parent, "cat intro.txt middle.txt end.txt").stdout, end="")
