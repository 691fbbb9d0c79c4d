"""The system calls that programs in the ``container`` runtime may make. gVisor needs no such list.

An allow-list: what is not named here fails with EPERM, and what the list does not know because it
is newer than the list fails with ENOSYS (runc sees to that). Left out on purpose: namespaces,
mounts, modules, keyrings, bpf, perf, userfaultfd, io_uring, handles, clocks, quotas, swap.
"""

from __future__ import annotations

import platform
from typing import Any

EPERM, ENOSYS = 1, 38
_CLONE_NEW_ANY = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes, CLONE_NEWCGROUP included
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
_AF_NETLINK, _NETLINK_ROUTE = 16, 0
_PERSONALITIES = (0x0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

ALLOWED = """
accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown
clock_adjtime clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range
creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2
epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2
fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr
flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue
futex_wait futex_waitv futex_wake futimesat get_mempolicy get_robust_list get_thread_area getcpu
getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp
getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch
ioctl ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self
lchown lgetxattr link linkat listen listmount listxattr listxattrat llistxattr lremovexattr lseek
lsetxattr lstat madvise map_shadow_stack mbind membarrier memfd_create memfd_secret mincore mkdir
mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock
munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open
pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv
preadv2 prlimit64 process_mrelease pselect6 pwrite64 pwritev pwritev2 read readahead readlink
readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto set_mempolicy
set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid
setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr
setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat
statfs statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time
timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat uretprobe utime
utimensat utimes vfork vmsplice wait4 waitid write writev
""".split()


def _argument(index: int, value: int, op: str = "SCMP_CMP_EQ", **more: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": op, **more}


def _allow(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def profile() -> dict[str, Any]:
    """The OCI ``linux.seccomp`` object."""
    rules: list[dict[str, Any]] = [{"names": ALLOWED, "action": "SCMP_ACT_ALLOW"}]
    # Threads and processes, but no namespaces. The flags of clone3 are out of a filter's sight;
    # ENOSYS makes the C library fall back to clone.
    rules.append(_allow("clone", _argument(0, _CLONE_NEW_ANY, "SCMP_CMP_MASKED_EQ", valueTwo=0)))
    rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
    # The host has 65,536 requests of native AIO for everybody; programs fall back to threads.
    rules.append({"names": ["io_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
    # AF_VSOCK would reach the host around every firewall; other families reach its kernel.
    rules += [_allow("socket", _argument(0, family)) for family in _FAMILIES.values()]
    rules.append(_allow("socket", _argument(0, _AF_NETLINK), _argument(2, _NETLINK_ROUTE)))
    rules.append(_allow("socketpair", _argument(0, _FAMILIES["AF_UNIX"])))
    rules += [_allow("personality", _argument(0, value)) for value in _PERSONALITIES]
    # Debuggers work: the user namespace keeps them inside.
    rules += [{"names": ["ptrace", "process_vm_readv"], "action": "SCMP_ACT_ALLOW"}]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": [_ARCHITECTURES.get(platform.machine(), "SCMP_ARCH_NATIVE")],
        "syscalls": rules,
    }
