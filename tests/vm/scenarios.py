"""What the VM does: the script of its first program, and one more for each scenario."""

from __future__ import annotations

ALL = ("host", "user", "poor", "nested")
"""In this order: the last one moves process 1 into a cgroup."""

# The first program. Everything that is written goes to memory or to the scratch disk.
INIT = """#!/bin/busybox sh
set -e
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /lower /upper /root
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
for module in {modules}; do $bb insmod /modules/$module.ko; done
$bb mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /lower
$bb mount -t tmpfs tmpfs /upper
$bb mkdir /upper/files /upper/work
$bb mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
for folder in /proc /sys /dev; do $bb mount -o move $folder /root$folder; done
$bb mkdir -p /root/dev/pts /root/dev/shm /root/var/lib/k8e
$bb mount -t devpts devpts /root/dev/pts
$bb mount -t tmpfs tmpfs /root/dev/shm
$bb mount -t tmpfs tmpfs /root/run
$bb mount -t ext4 /root/dev/vda /root/var/lib/k8e
$bb mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
$bb ip link set lo up
$bb cp /bin/busybox /start /root/run/
exec $bb switch_root /root /run/busybox sh /run/start
"""
# Its shell stays process 1 and reaps what a sandbox leaves to it.
START = """
export {environment}
bb=/run/busybox
$bb stty raw </dev/ttyS1
{scenarios}
$bb sync
$bb poweroff -f
"""
_HOST = """
{program} host {words} >/dev/ttyS1 </dev/null
"""
# The program sees what it would see in a container: its own cgroup, with processes in it, as the
# root of them all.
_NESTED = """
cd /sys/fs/cgroup
$bb mkdir box
echo +cpu +memory +pids >cgroup.subtree_control
echo $$ >box/cgroup.procs
cd /
cat >/run/nested <<'END'
umount /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
{program} nested {words} >/dev/ttyS1 </dev/null
END
/usr/bin/unshare --cgroup --mount /bin/sh /run/nested
"""
_UID = 54321
_PLACE = "/var/lib/k8e/user"
# A user with ids of its own, for whom this machine's files are open as far as the program needs.
_AS_USER = f"""
if ! $bb grep -q k8e-user /etc/passwd; then
echo k8e-user:x:{_UID}:{_UID}::{_PLACE}:/bin/sh >>/etc/passwd
for file in subuid subgid; do echo k8e-user:1000000000:65536 >>/etc/$file; done
$bb chmod o+x {{way}}
fi
$bb mkdir -p {_PLACE} /run/k8e-user
$bb chown {_UID}:{_UID} {_PLACE} /run/k8e-user
as_user() {{{{
/usr/bin/env HOME={_PLACE} K8E_DATA_DIR={_PLACE}/data K8E_RUN_DIR=/run/k8e-user/k8e \\
/usr/bin/setpriv --reuid {_UID} --regid {_UID} --clear-groups "$@"
}}}}
"""
# Given away as systemd does: the group and three of its files, not those with limits of its own.
# The shell stays in it, as one does in which a user has called k8e. In the end there is only the
# group where the gateway was, and nobody in it.
_USER = (
    _AS_USER
    + f"""
scope=/sys/fs/cgroup/given.slice/given.scope
for folder in /sys/fs/cgroup /sys/fs/cgroup/given.slice; do
$bb mkdir -p $folder
echo +cpu +memory +pids >$folder/cgroup.subtree_control
done
$bb mkdir $scope
for file in . cgroup.procs cgroup.subtree_control cgroup.threads; do
$bb chown {_UID}:{_UID} $scope/$file
done
(
echo 0 >$scope/cgroup.procs
as_user {{program}} user {{words}} >/dev/ttyS1 </dev/null
echo 0 >/sys/fs/cgroup/cgroup.procs
)
left=$(cd $scope && echo */ && $bb cat */cgroup.procs)
[ "$left" = k8e-gateway/ ] && verdict=pass || verdict=fail
left=$(echo $left)
echo '{{{{"kind": "host", "name": "user: what is left in its cgroup",' \\
"\\"verdict\\": \\"$verdict\\", \\"detail\\": \\"$left\\"}}}}" >/dev/ttyS1
"""
)
_POOR = (
    _AS_USER
    + """
as_user {program} poor {words} >/dev/ttyS1 </dev/null
"""
)
_SCRIPTS = {"host": _HOST, "nested": _NESTED, "user": _USER, "poor": _POOR}


def script(chosen: list[str], *, environment: str, program: str, words: str, way: str) -> str:
    """The script for some scenarios.

    ``way`` are the folders that lead to the program and to what it needs.
    """
    texts = [
        _SCRIPTS[name].format(program=program, words=words, way=way)
        for name in ALL
        if name in chosen
    ]
    return START.format(environment=environment, scenarios="".join(texts))
