"""Lets gVisor's programs ask the CPU itself what it can do.

gVisor makes ``cpuid`` trap and answers in the CPU's place, with what the CPU told it. The C library
asks about seventy times whenever a program starts, and each trap takes as long as five of the
CPU's own answers even in a virtual machine: a third of the time that ``true`` takes. Where a host
cannot make it trap, gVisor does without; so that is what it is told here, by a filter on its
system calls that refuses this one. A filter belongs to a thread and to all that it starts.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_SYS_SECCOMP, _SYS_ARCH_PRCTL = 317, 158
_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # no slower memory for programs of this thread, on kernels that would think of it
_AUDIT_ARCH_X86_64 = 0xC000003E
_ARCH_SET_CPUID = 0x1012
_AT_NUMBER, _AT_ARCH, _AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000 | errno.ENODEV, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def make_filter() -> bytes:
    """A filter that refuses to make ``cpuid`` trap, and nothing else."""
    steps = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_JUMP_IF_EQUAL, 0, 5, _AUDIT_ARCH_X86_64),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_IF_EQUAL, 0, 3, _SYS_ARCH_PRCTL),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_IF_EQUAL, 0, 1, _ARCH_SET_CPUID),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def keep_native() -> None:
    """From now on, nothing that this thread starts can make ``cpuid`` trap.

    Without the right to do so everything works as before, only slower.
    """
    if platform.machine() != "x86_64" or struct.calcsize("P") != 8:
        return
    code = ctypes.create_string_buffer(make_filter())
    program = _Program(len(code.raw) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_SYS_SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(program))
