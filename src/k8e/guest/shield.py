"""Keeps programs from signalling the guest where the kernel does not: in gVisor.

Linux delivers no signal to the first process of a PID namespace that this has no handler for.
gVisor does, and for the moment of a spawn the guest has the user's real uid, so ``kill -9 1`` in a
loop would hit it. A filter that everything in the sandbox inherits refuses such calls. It costs a
tenth of a spawn, and an OCI profile of the same content twice that.
"""

from __future__ import annotations

import os

_EPERM = 1
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | _EPERM
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ABOVE, _RETURN = 0x20, 0x15, 0x25, 0x06
_BY_FIRST, _BY_SECOND, _ALWAYS = 1, 3, 6  # where the filter goes on, among its ends
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
    ends = [
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_AT),
        (_JUMP_IF_EQUAL, 3, 2, 1),  # process or thread 1
        (_LOAD, 0, 0, _SECOND_AT),
        (_JUMP_IF_EQUAL, 1, 0, _F_SETSIG),  # any signal to the owner of a descriptor
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    wanted = [(number, _BY_FIRST) for number in signalling]
    # A directory of /proc is a handle too, so signals by handle are refused as such.
    wanted += [(fcntl, _BY_SECOND), (by_handle, _ALWAYS)]
    return [(_LOAD, 0, 0, _NUMBER_AT), *_search(sorted(wanted), 0), *ends]


def _search(wanted: list[tuple[int, int]], behind: int) -> list[tuple[int, int, int, int]]:
    """Find the call's number in a sorted list by halves; ``behind`` instructions precede the ends.

    gVisor tries every number on the filter for every new process, so steps count.
    """
    if len(wanted) > 2:
        half = len(wanted) // 2
        upper = _search(wanted[half:], behind)
        lower = _search(wanted[:half], behind + len(upper))
        return [(_JUMP_IF_ABOVE, len(lower), 0, wanted[half - 1][0]), *lower, *upper]
    left = len(wanted) - 1
    return [
        (_JUMP_IF_EQUAL, left - at + behind + end, behind if at == left else 0, number)
        for at, (number, end) in enumerate(wanted)
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
