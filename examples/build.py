"""Follows a long process line by line while it runs, and shows how it ended."""

import k8e

with k8e.Sandbox() as sb:
    for event in sb.start("for step in fetch build test; do echo $step; sleep 0.3; done").output():
        print(event.data.decode() if isinstance(event, k8e.Stdout) else event)
