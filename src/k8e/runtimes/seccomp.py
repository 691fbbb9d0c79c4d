"""The system calls that programs in the ``container`` runtime may make. gVisor needs no such list.

An allow-list: calls that are not named here fail with EPERM, and calls that are newer than the list
with ENOSYS (runc sees to that). Left out on purpose: namespaces, mounts, modules, keyrings, bpf,
perf, userfaultfd, io_uring, handles, clocks, quotas, swap, secret memory (it splits the pages of
the whole kernel), and filters of a program's own.

Calls that lead to many different things are allowed by their arguments: ``socket`` by family, type
and protocol, ``setsockopt``, ``prctl``, ``fcntl`` and ``ioctl`` by option. The kernel looks at the
lower 32 bits of these arguments, whatever is above them; so do the rules.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

EPERM, EINVAL, ENOSYS, EPROTONOSUPPORT = 1, 22, 38, 93
_CLONE_NEW_ANY = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes, CLONE_NEWCGROUP included
_INT = 0xFFFFFFFF  # the part of an argument that is an int's
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_STREAM, _DATAGRAM, _RAW, _PACKETS = 1, 2, 3, 5
_TYPE = _INT & ~(0o4000 | 0o2000000)  # of a socket, without SOCK_NONBLOCK and SOCK_CLOEXEC
_SOCKETS = [
    *((_AF_UNIX, kind, protocol) for kind in (_STREAM, _DATAGRAM, _PACKETS) for protocol in (0, 1)),
    *(
        (family, kind, protocol)
        for family in (_AF_INET, _AF_INET6)
        for kind, own in ((_STREAM, 6), (_DATAGRAM, 17))
        for protocol in (0, own)
    ),
    *((_AF_NETLINK, kind, 0) for kind in (_DATAGRAM, _RAW)),  # NETLINK_ROUTE
]
"""Families, types and protocols. AF_VSOCK would reach the host around every firewall, and each
other one is a part of the kernel that few have looked at, or that no rule of the router knows."""
_MISSING = ((_STREAM, 262), (_STREAM, 132), (_PACKETS, 132), (_DATAGRAM, 136))
"""MPTCP, SCTP and UDP-Lite: answered as if the kernel did not have them. Programs that try the
first one before TCP, such as those in Go, then go on with that."""
_OPTIONS = {
    # SOL_SOCKET. Without filters (26, 27, 44, 50 to 52, 68), whose code takes memory that the
    # kernel has once for the whole machine and that no cgroup counts; without zero copies (60).
    1: [*range(26), 29, *range(34, 44), *range(45, 50), *range(61, 68), *range(69, 77), 82, 83, 84],
    # IPPROTO_IP. No options in packets (4), no policies (16, 17), no joining of groups (35, 37 to
    # 48): what the kernel keeps for a member is counted nowhere, and no group leads out of here.
    0: [0, 1, 2, 3, *range(6, 16), *range(18, 27), 32, 33, 34, 36, 49, 50, 51],
    # IPPROTO_IPV6. The same (20, 27, 42 to 48, 54, 55, 57, 59), and no flow labels (32), of which
    # the machine has 4,096 for all.
    41: [
        *(2, 3, 4, 5, 7, 8, 11, 16, 17, 18, 19, 21, 23, 24, 25, 26, 29, 31, 33),
        *(49, 50, 51, 52, 53, 56, 58, 60, 61, 62, 63, 66, 67, *range(70, 79)),
    ],
    # IPPROTO_TCP. No signatures (14, 32, 38 to 42), no repairs (19 to 22), no protocol on top (31),
    # no delay (37), which switches something on for the whole machine.
    6: [*range(14), 16, 17, 18, *range(23, 31), 33, 34, 36, 44],
    17: [1, *range(101, 105)],  # IPPROTO_UDP. No encapsulation (100).
    270: range(16),  # SOL_NETLINK
}
"""Options of sockets that can be set, by their level."""
_PROCESS_OPTIONS = [
    *range(22),
    *range(23, 35),
    *range(36, 57),
    *range(59, 62),
    *range(63, 67),
    *range(68, 96),
    0x53564D41,  # a name for a piece of memory
    0x59616D61,  # who may trace
]
"""Of ``prctl``. Without filters (22), without scheduling that keeps others off a core (62), and
without what needs a capability."""
_SET_SECCOMP = 22
_OF_DESCRIPTORS = [*range(32), 36, *range(1025, 1039)]
"""Of ``fcntl``. Without locks that belong to an open file (37, 38): see locks.py. Without leases on
files and folders (1024, 1040): whoever opens or starts what is leased waits for the holder."""
_MISSING_LOCKS = (37, 38, 1024, 1040)
_SET_LINE_DISCIPLINE = 0x5423
"""Of ``ioctl``: it makes a terminal speak PPP, HDLC or GSM, and the host load a module for that."""
_PERSONALITIES = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

ALLOWED = """
accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown
clock_adjtime clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range
creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2
epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2
fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr
flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue
futex_wait futex_waitv futex_wake futimesat get_mempolicy get_robust_list get_thread_area getcpu
getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp
getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch
ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self
lchown lgetxattr link linkat listen listmount listxattr listxattrat llistxattr lremovexattr lseek
lsetxattr lstat madvise map_shadow_stack mbind membarrier memfd_create mincore mkdir
mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock
munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open
pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll pread64 preadv
preadv2 prlimit64 process_mrelease pselect6 pwrite64 pwritev pwritev2 read readahead readlink
readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto set_mempolicy
set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid
setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid setxattr
setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat
statfs statmount statx symlink symlinkat sync_file_range syncfs sysinfo tee tgkill time
timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat uretprobe utime
utimensat utimes vfork vmsplice wait4 waitid write writev
""".split()


def _argument(index: int, value: int, op: str = "SCMP_CMP_EQ", **more: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": op, **more}


def _is(index: int, value: int, mask: int = _INT) -> dict[str, Any]:
    """The condition that an argument is ``value``, in the bits of ``mask``."""
    return _argument(index, mask, "SCMP_CMP_MASKED_EQ", valueTwo=value)


def blocks(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The same numbers as few pairs of value and mask: each rule slows every start of a sandbox."""
    left, found = set(numbers), list[tuple[int, int]]()
    for first in sorted(left):
        if first not in left:
            continue
        size = 1
        while not first & size and left.issuperset(range(first, first + 2 * size)):
            size *= 2
        left.difference_update(range(first, first + size))
        found.append((first, _INT & ~(size - 1)))
    return found


def all_but(number: int) -> list[tuple[int, int]]:
    """All numbers that differ from this one in their lower 16 bits, as pairs of value and mask."""
    found: list[tuple[int, int]] = []
    for bit in range(16):
        mask = 0xFFFF & ~((1 << bit) - 1)
        found.append(((number ^ 1 << bit) & mask, mask))
    return found


def _allow(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _answer(name: str, number: int, *arguments: dict[str, Any]) -> dict[str, Any]:
    """Let a call end with this error at once; 0 is success."""
    return {
        "names": [name],
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": number,
        "args": list(arguments),
    }


def _socket(family: int, kind: int, protocol: int) -> tuple[dict[str, Any], ...]:
    return _is(0, family), _is(1, kind, _TYPE), _is(2, protocol)


def _socket_rules() -> list[dict[str, Any]]:
    rules = [_allow("socket", *_socket(*item)) for item in _SOCKETS]
    rules += [
        _answer("socket", EPROTONOSUPPORT, *_socket(family, kind, protocol))
        for family in (_AF_INET, _AF_INET6)
        for kind, protocol in _MISSING
    ]
    rules += [_allow("socketpair", *_socket(*item)) for item in _SOCKETS if item[0] == _AF_UNIX]
    rules += [
        _allow("setsockopt", _is(1, level), _is(2, option, mask))
        for level, options in _OPTIONS.items()
        for option, mask in blocks(options)
    ]
    return rules


def _own_filters() -> list[dict[str, Any]]:
    """The answer to a program that wants to filter its own calls: that this kernel cannot."""
    return [
        _answer("seccomp", ENOSYS),
        _answer("prctl", EINVAL, _is(0, _SET_SECCOMP)),
        *(_allow("prctl", _is(0, option, mask)) for option, mask in blocks(_PROCESS_OPTIONS)),
    ]


def _descriptor_rules() -> list[dict[str, Any]]:
    return [
        *(_allow("fcntl", _is(1, word, mask)) for word, mask in blocks(_OF_DESCRIPTORS)),
        *(_answer("fcntl", EINVAL, _is(1, word)) for word in _MISSING_LOCKS),
        *(_allow("ioctl", _is(1, *pair)) for pair in all_but(_SET_LINE_DISCIPLINE)),
    ]


def profile() -> dict[str, Any]:
    """The OCI ``linux.seccomp`` object."""
    rules: list[dict[str, Any]] = [{"names": ALLOWED, "action": "SCMP_ACT_ALLOW"}]
    # Threads and processes, but no namespaces. The flags of clone3 are out of a filter's sight;
    # ENOSYS makes the C library fall back to clone.
    rules.append(_allow("clone", _argument(0, _CLONE_NEW_ANY, "SCMP_CMP_MASKED_EQ", valueTwo=0)))
    rules.append(_answer("clone3", ENOSYS))
    # The host has 65,536 requests of native AIO for everybody; programs fall back to threads.
    rules.append(_answer("io_setup", ENOSYS))
    # It would write out what the whole machine has changed, and wait for that; syncfs and fsync do
    # what is the sandbox's own.
    rules.append(_answer("sync", 0))
    rules += _socket_rules() + _own_filters() + _descriptor_rules()
    rules += [_allow("personality", _argument(0, value)) for value in _PERSONALITIES]
    # Debuggers work: the user namespace keeps them inside.
    rules += [{"names": ["ptrace", "process_vm_readv"], "action": "SCMP_ACT_ALLOW"}]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": [_ARCHITECTURES.get(platform.machine(), "SCMP_ARCH_NATIVE")],
        "syscalls": rules,
    }
