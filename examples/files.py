"""Copies files into a sandbox and out of it, in constant memory however large they are."""

import tempfile
from pathlib import Path

from k8e import sandbox_session

with tempfile.TemporaryDirectory() as folder, sandbox_session() as (client, session_id):
    source = Path(folder, "data.bin")
    source.write_bytes(bytes(range(256)) * 4096)
    client.upload(session_id, source, "in/data.bin")

    result = client.exec(session_id, ["gzip", "--keep", "in/data.bin"])
    print("gzip exit code", result.exit_code)
    for entry in client.list_files(session_id):
        print(entry.path, entry.type, entry.size > 0)

    target = Path(folder, "data.bin.gz")
    copied = client.download(session_id, "in/data.bin.gz", target)
    print("downloaded", copied.bytes == target.stat().st_size)

    try:
        client.read_bytes(session_id, "no/such/file")
    except FileNotFoundError as error:
        print("as usual:", error)
