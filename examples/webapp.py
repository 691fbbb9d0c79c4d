"""Starts a web app in a sandbox and fetches its page through the port's URL."""

from urllib.request import urlopen

import k8e

with k8e.Sandbox() as sb:
    sb.files.write("index.html", "<h1>Hello</h1>")
    sb.start(["python3", "-m", "http.server", "8000"])
    with urlopen(sb.expose(8000).wait().url) as page:  # noqa: S310 - our own URL
        print(page.status, page.read().decode())
