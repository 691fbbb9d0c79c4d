"""Serves a page in a sandbox and reads it through the port's local URL."""

import time
from urllib.error import HTTPError
from urllib.request import urlopen

from k8e import sandbox_session

with sandbox_session() as (client, session_id):
    client.write_file(session_id, "index.html", "<h1>Hello</h1>")
    client.start(session_id, ["python3", "-m", "http.server", "8000"])
    site = client.expose(session_id, 8000)
    for _ in range(100):  # until the server has started
        try:
            with urlopen(site.url) as page:  # noqa: S310 - our own URL
                print(page.status, page.read().decode())
            break
        except HTTPError:
            time.sleep(0.1)
