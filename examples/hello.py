"""The example of the README: code, files and time-outs in a session that ends with the block."""

from k8e import SandboxClient

with SandboxClient() as client:  # starts the gateway if none runs
    result = client.run("print(6 * 7)", language="python")
    print(result.exit_code, result.stdout_bytes)
    client.write_file(result.session_id, "numbers.txt", "1\n2\n3\n")
    total = client.run("awk '{sum += $1} END {print sum}' numbers.txt")
    print(total.exit_code, total.stdout_bytes)
    slow = client.run("sleep 60", timeout=0.5)
    print(slow.exit_code, slow.status)
