"""Images whose files stand where k8e mounts something, or would lead it elsewhere."""

from __future__ import annotations

import pytest

from k8e.runtimes.host import Host
from tests.images import registries
from tests.images.building import Archive, Built, busybox
from tests.images.test_sandboxes import folder, host, launched, runtime, sh

__all__ = ["folder", "host", "runtime"]  # fixtures

MOUNTED = ("proc", "dev", "sys", "workspace", "tmp", "run", "home", "var", "opt", "etc")
# Through a magic link of whoever looks, and so of the guest, which is root in the sandbox.
PATHS = ":".join(f"/proc/self/root/proc/1/root/{number}" for number in range(300))
XATTRS = {
    "SCHILY.xattr.user.overlay.redirect": "/etc",
    "SCHILY.xattr.user.overlay.opaque": "y",
    "SCHILY.xattr.trusted.overlay.redirect": "/etc",
    "SCHILY.xattr.security.capability": "\x01\x00\x00\x02\xff\xff\xff\xff",
}
LOOK = """
cat /etc/hostname; head -n 1 /proc/self/status | cut -c1-5; id -u; ls /etc/shadow /evil 2>&1 | wc -l
grep -c . /proc/1/cmdline; echo x > /etc/new; echo x > /bin/new; ls /dev/null; pwd
stat -c %a /bin/setuid; grep CapEff /proc/self/status
"""


def hostile(kind: str) -> Built:
    below = busybox(registries.program("busybox"))
    below.file("bin/setuid", b"#!/bin/sh\n", mode=0o6755, pax_headers=XATTRS)
    above = Archive()
    for name in MOUNTED:
        if kind == "links":
            above.link(name, "/../../../../etc")
        elif kind == "files":
            above.file(name, b"in the way")
    if kind == "inner":
        above.link("run/k8e", "/bin").link("dev/shm", "/etc").link("dev/pts", "/etc")
        above.link("proc/self", "/etc").link("home/user", "/etc").link("etc/passwd", "/etc/shadow")
        above.link("etc/resolv.conf", "/etc/passwd").link("etc/hostname", "/proc/1/environ")
        above.link("opt/k8e", "/").file("etc/ld.so.preload", b"/workspace/evil.so\n")
        above.device("dev/vda", 8, 0).folder("usr", pax_headers=XATTRS)
    env = [f"PATH={PATHS}:/bin", "LD_PRELOAD=/workspace/evil.so", "PYTHONPATH=/workspace"]
    return Built([below, above], env=env)


@pytest.mark.parametrize("kind", ["links", "files", "inner"])
async def test_a_hostile_root_is_a_root_like_any_other(
    host: Host, runtime: str, registry: str, kind: str
) -> None:
    hostile(kind).push(registry, f"hostile-{kind}", "1")
    async with launched(host, runtime, "image", f"{registry}/hostile-{kind}:1") as sandbox:
        done = await sh(sandbox, LOOK)
        said = done.text.splitlines()
        assert said[:5] == ["sandbox", "Name:", "1000", "2", "1"], done.story()
        assert said[5:8] == ["/dev/null", "/workspace", "755"], done.story()
        assert int(said[8].split()[1], 16) == 0
        await sandbox.write("/workspace/f", b"mine")
        assert await sandbox.read("/workspace/f") == b"mine"
        assert (await sh(sandbox, "cat /workspace/f")).text == "mine"
