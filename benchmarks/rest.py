"""What REST costs beyond frames, and how many requests it answers.

    python -m benchmarks.rest --count 200

Each pair is measured in turns, in one gateway: the same sandboxes made and the same program run by
frames on the unix socket and by REST. The client is on the same machine, and on the same CPUs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from k8e import SandboxClient
from tests.gateway import http_gateways
from tests.gateway.http_gateways import HttpGateway

HEADERS = {"Content-Type": "application/json"}


class Connection:
    """One connection that stays open, without a library's own work."""

    def __init__(self, gateway: HttpGateway) -> None:
        host = gateway.root.removeprefix("http://")
        self._http = http.client.HTTPConnection(host, timeout=60)

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body)
        self._http.request(method, path, data, HEADERS)
        answer = self._http.getresponse()
        told = answer.read()
        assert answer.status < 300, told
        return json.loads(told)

    def close(self) -> None:
        self._http.close()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def runs(client: SandboxClient, rest: Connection, count: int) -> Generator[tuple[float, float]]:
    """Milliseconds of a run by frames, and by REST."""
    session_id = rest.ask("POST", "/sandbox", {"user_id": "b", "conversation_id": "runs"})[
        "sandbox_id"
    ]
    path = f"/sandbox/{session_id}/exec"
    for _ in range(count):
        by_frames = timed(lambda: client.exec(session_id, ["/bin/true"]))
        by_rest = timed(lambda: rest.ask("POST", path, {"command": ["/bin/true"]}))
        yield by_frames, by_rest


def creations(
    client: SandboxClient, rest: Connection, count: int
) -> Generator[tuple[float, float]]:
    """Milliseconds of making a sandbox of a request by frames, and of a conversation by REST."""
    for number in range(count):
        made: list[str] = []

        def by_frames(number: int = number, made: list[str] = made) -> None:
            made.append(client.create_session(request_id=f"bench-{number}"))

        def by_rest(number: int = number, made: list[str] = made) -> None:
            body = {"user_id": "b", "conversation_id": f"c-{number}"}
            made.append(rest.ask("POST", "/sandbox", body)["sandbox_id"])

        yield timed(by_frames), timed(by_rest)
        for session_id in made:
            client.destroy_session(session_id)


def rate(gateway: HttpGateway, session_id: str, *, clients: int, seconds: float) -> float:
    """Requests a second for one sandbox, of some clients at once."""
    counts = [0] * clients
    until = time.monotonic() + seconds

    def work(index: int) -> None:
        rest = Connection(gateway)
        while time.monotonic() < until:
            rest.ask("GET", f"/sandbox/{session_id}")
            counts[index] += 1
        rest.close()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def show(name: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    frames, rest = ([pair[index] for pair in pairs] for index in (0, 1))
    beyond = statistics.median(after - before for before, after in pairs)
    found = {
        "frames_ms": round(statistics.median(frames), 2),
        "rest_ms": round(statistics.median(rest), 2),
        "beyond_ms": round(beyond, 2),
        "rest_p95_ms": round(statistics.quantiles(rest, n=20)[-1], 2),
    }
    print(f"{name:10} {found}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="of each pair (100)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of requests at once (5)")
    parser.add_argument("--runtime", default="container", help="container or gvisor")
    options = parser.parse_args()
    environ = {
        "K8E_RUNTIME": options.runtime,
        "K8E_HTTP_TRUST_LOCAL": "1",
        "K8E_POOL_MAX": "2",
        "K8E_POOL_MIN": "2",
        "PYTHONWARNINGS": "default",
    }
    with http_gateways.started(**environ) as gateway:
        client, rest = SandboxClient(gateway.place.endpoint), Connection(gateway)
        for _ in runs(client, rest, 10):  # everything is loaded, and has run
            pass
        results: dict[str, Any] = {
            "load": os.getloadavg()[0],
            "exec": show("exec", list(runs(client, rest, options.count))),
            "create": show("create", list(creations(client, rest, max(10, options.count // 4)))),
        }
        opened = rest.ask("POST", "/sandbox", {"user_id": "b", "conversation_id": "runs"})
        for clients in (1, 4):
            found = rate(gateway, opened["sandbox_id"], clients=clients, seconds=options.seconds)
            results[f"gets_per_second_{clients}"] = round(found)
        rest.close()
        client.close()
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
