"""A sample of Kubernetes' own end-to-end tests, on a cluster of two nodes with Cilium.

``make test-long`` runs what stands in ``kubernetes_tests.txt`` by Kubernetes' own ``e2e.test``, and
writes ``kubernetes_tests.json``, of which a page of the documentation is made. A sample says
nothing of the tests that are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k8e import _version
from k8e.distro import certificates, images
from k8e.distro.certificates import Subject
from k8e.distro.component_store import ComponentStore, State, architecture
from k8e.distro.components import KUBERNETES, KUBERNETES_TESTS, REGISTRY
from tests.cluster.clusters import Cluster
from tests.cluster.machine import COMPONENTS, Machine

SAMPLE = Path(__file__).with_suffix(".txt")
RESULT = Path(__file__).with_suffix(".json")
SECONDS = 5400.0
PROCESSES = 3
"""So many tests run at a time but those that are marked as serial: most of them wait for pods."""
STAND_INS = {
    "agnhost:2.55": "agnhost:2.63.0",
    "glibc-dns-testing:2.0.0": "agnhost:2.63.0",
    "busybox:1.37.0-1": "busybox:1.35",
    "pause:3.10.2": f"pause:{KUBERNETES.version}",
}
"""Images that tests ask for, and which image of ours takes their place."""
_PLAIN = ("busybox", "pause")
PROGRAMS = ("curl", "dash", "dig", "nc.openbsd")
"""Programs of this machine, in the image of the tests' pods, which run them."""
_REGISTRIES = ("promoterE2eRegistry", "gcRegistry")
_SOCKET = "/run/k8e/containerd/containerd.sock"
_REPORT, _LOG = "/tmp/kubernetes-tests/report.json", "/tmp/kubernetes-tests/log"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.kubernetes_tests")
    parser.add_argument("--cni", default="cilium")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", metavar="WORDS", help="names that have this; writes no result")
    which.add_argument(
        "--again",
        action="store_true",
        help="those that did not pass in the newest result, which has what became of them then",
    )
    parser.add_argument("--keep", metavar="FILE", help="where to put the log of e2e.test")
    options = parser.parse_args()
    found = ComponentStore(COMPONENTS).look(KUBERNETES_TESTS)
    if found.state is not State.PRESENT:
        print(f"the tests are {found.state}: k8e components install {KUBERNETES_TESTS.name}")
        return 1
    before: dict[str, Any] = json.loads(RESULT.read_bytes()) if options.again else {}
    failed = {item["name"] for item in unpassed(before)}
    wanted = {
        name: area
        for name, area in sample().items()
        if (name in failed if options.again else (options.only or "") in name)
    }
    result = measure(options.cni, wanted, Path(options.keep) if options.keep else None)
    if not options.only:
        whole = merged(before, result) if options.again else result
        RESULT.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    bad = unpassed(result)
    for item in bad:
        print(f"{item['state']}: {item['name']}\n    {item['why']}")
    print(f"{len(wanted) - len(bad)} of {len(wanted)} passed in {result['seconds']} s")
    return 1 if bad else 0


def unpassed(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in result.get("tests", []) if item["state"] != "passed"]


def merged(before: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """A result in which those that ran again have what became of them then."""
    newer = {item["name"]: item for item in again["tests"]}
    what = {"tests": len(newer), "load": again["load"], "seconds": again["seconds"]}
    images = {name: again[name] for name in ("stand_ins", "programs")}
    tests = [newer.get(item["name"], item) for item in before["tests"]]
    return before | images | {"again": what, "tests": tests}


def sample() -> dict[str, str]:
    """The names of the sample, each with the heading above it in its file."""
    found: dict[str, str] = {}
    heading = ""
    for line in SAMPLE.read_text("utf-8").splitlines()[1:]:
        if line.startswith("# "):
            heading = line[2:]
        elif line:
            found[line] = heading
    return found


def measure(cni: str, wanted: dict[str, str], log: Path | None) -> dict[str, Any]:
    """A cluster of two nodes from empty machines, and the tests on it."""
    cluster = Cluster("--disable-sandbox-matrix", cni=cni)
    try:
        cluster.start()
        cluster.join(cluster.add_machine())
        for machine in cluster.machines:
            load_images(machine)
        rollout = ("rollout", "status", "-n", "kube-system", "deploy/coredns", "--timeout=180s")
        cluster.kubectl(*rollout, seconds=200)
        began = time.monotonic()
        run(cluster.server, wanted, log)
        report: list[dict[str, Any]] = json.loads(cluster.server.path(_REPORT).read_bytes())
        specs: list[dict[str, Any]] = report[0]["SpecReports"]
    finally:
        cluster.close()
    return {
        "version": _version.__version__,
        "kubernetes": KUBERNETES.version,
        "cni": cni,
        "nodes": 2,
        "load": round(os.getloadavg()[1], 1),
        "seconds": round(time.monotonic() - began),
        "stand_ins": STAND_INS,
        "programs": PROGRAMS,
        "tests": outcomes(wanted, specs),
    }


def load_images(machine: Machine) -> None:
    """Give a node the images of the tests, under the names by which they ask for them."""
    ctr = ("ctr", "--address", _SOCKET, "-n", "k8s.io", "images")
    own = write_agnhost(machine.path("/tmp")).name
    for archive in (f"/tmp/images/{own}", *(COMPONENTS / f"images/{name}.tar" for name in _PLAIN)):
        machine.run(*ctr, "import", str(archive))
    for name, other in STAND_INS.items():
        machine.run(*ctr, "tag", f"{REGISTRY}/{other}", f"{REGISTRY}/{name}")


def write_agnhost(folder: Path) -> Path:
    """The image of the pods of tests: Kubernetes' program, and what upstream has beside it."""
    image = KUBERNETES_TESTS.images[0]
    # A file of upstream's image, by which a test asks whether the web server of a pod is ready.
    authority = certificates.authority(folder / "certificates", "ca")
    certificates.leaf(authority, Subject("localhost"), folder / "certificates/localhost", days=30)
    files = {**image.files, "localhost.crt": str(folder / "certificates/localhost.crt")}
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found, f"there is no {name}: make test-packages"
        said = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        libraries = re.findall(r"(/\S+) \(0x", said)
        files |= {path.lstrip("/"): path for path in (f"/usr/bin/{name}", *libraries)}
    # Busybox's shell would run its own programs, whatever is on the PATH.
    links = {**image.links, "bin/sh": "/usr/bin/dash", "bin/nc": "/usr/bin/nc.openbsd"}
    whole = dataclasses.replace(image, files=files, links=links)
    return images.write(KUBERNETES_TESTS, whole, folder, architecture(), others=COMPONENTS)


def run(server: Machine, wanted: Iterable[str], log: Path | None) -> None:
    """Run e2e.test to its end; that tests fail is no error here."""
    folder = server.path("/tmp/kubernetes-tests")
    folder.mkdir()
    registries = "".join(f"{name}: {REGISTRY}\n" for name in _REGISTRIES)
    (folder / "images.yaml").write_text(registries, "utf-8")
    programs = COMPONENTS / "bin/tests"
    focus = [f"--focus={re.escape(name)}( \\[|$)" for name in wanted]
    flags = (f"--procs={PROCESSES}", "--no-color", "--timeout=80m", "--json-report=report.json")
    server.run(
        *("sh", "-c", f'exec "$@" >{_LOG} 2>&1', "sh", str(programs / "ginkgo")),
        *(*flags, f"--output-dir={Path(_REPORT).parent}", *focus),
        *(str(programs / "e2e.test"), "--", "--provider=skeleton", "--disable-log-dump"),
        check=False,
        seconds=SECONDS,
        KUBECONFIG="/etc/k8e/k8e.yaml",
        KUBE_TEST_REPO_LIST="/tmp/kubernetes-tests/images.yaml",
    )
    if log:
        log.write_bytes(server.path(_LOG).read_bytes())
    assert server.path(_REPORT).exists(), server.path(_LOG).read_text("utf-8", "replace")[-4000:]


def outcomes(wanted: dict[str, str], specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of each test of the sample, also of those that e2e.test does not know."""
    ran: dict[str, dict[str, Any]] = {}
    for spec in specs:
        if spec["LeafNodeType"] == "It" and spec["State"] != "skipped":
            parts: list[str] = [*spec["ContainerHierarchyTexts"], spec["LeafNodeText"]]
            ran[bare(" ".join(parts))] = spec
    found: list[dict[str, Any]] = []
    for name, area in wanted.items():
        spec = ran.get(bare(name), {"State": "not found", "RunTime": 0})
        item = {"area": area, "name": name, "state": spec["State"]}
        item["seconds"] = round(spec["RunTime"] / 1e9, 1)
        if spec["State"] != "passed":
            message = spec.get("Failure", {}).get("Message", "e2e.test has no test of this name")
            item["why"] = " ".join(message.split())[:500]
        found.append(item)
    return found


def bare(name: str) -> str:
    """A name without the labels at its end, and with single spaces."""
    return re.sub(r"( \[[^\]]*\])+$", "", " ".join(name.split()))


if __name__ == "__main__":
    sys.exit(main())
