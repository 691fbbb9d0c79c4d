"""Keeps programs from signalling the guest where the kernel does not: in gVisor.

Linux delivers no signal to the first process of a PID namespace that this has no handler for.
gVisor does, and for the moment of a spawn the guest has the user's real uid, so ``kill -9 1`` in a
loop would hit it. A filter that everything in the sandbox inherits refuses such calls. It is
short, because gVisor walks through it for every new process: it costs a tenth of a spawn, and an
OCI profile of the same content twice that.
"""

from __future__ import annotations

import os

_EPERM = 1
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | _EPERM
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _FIRST_AT, _SECOND_AT = 0, 16, 24  # lower halves, in struct seccomp_data
_F_SETSIG = 10
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open; fcntl; pidfd_send_signal.
_CALLS = {
    "x86_64": ((62, 200, 234, 129, 297, 434), 72, 424),
    "aarch64": ((129, 130, 131, 138, 240, 434), 25, 424),
}


def shield_program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as BPF instructions: code, jumps if true and if false, operand."""
    signalling, fcntl, by_handle = _CALLS[machine]
    count = len(signalling)
    return [
        (_LOAD, 0, 0, _NUMBER_AT),
        # A directory of /proc is a handle too, so signals by handle are refused as such.
        (_JUMP_IF_EQUAL, count + 7, 0, by_handle),
        (_JUMP_IF_EQUAL, count + 3, 0, fcntl),
        *((_JUMP_IF_EQUAL, count - at, 0, number) for at, number in enumerate(signalling)),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_AT),
        (_JUMP_IF_EQUAL, 3, 2, 1),  # process or thread 1
        (_LOAD, 0, 0, _SECOND_AT),
        (_JUMP_IF_EQUAL, 1, 0, _F_SETSIG),  # any signal to the owner of a descriptor
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


def refuse_signals() -> None:
    """Install the filter in this process and all that it will start."""
    import ctypes
    from struct import pack as pack_struct

    program = shield_program(os.uname().machine)
    code = b"".join(pack_struct("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = pack_struct("@HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "installing the signal filter failed")
