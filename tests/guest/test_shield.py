"""The filter that keeps signals from the guest in gVisor, run by an interpreter of our own."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e.guest import shield

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy hosts

ALLOW, REFUSE = 0x7FFF0000, 0x00050001


def judge(machine: str, number: int, *arguments: int) -> int:
    """What the filter says of a system call."""
    values = [*arguments, 0, 0][:2]
    memory = {0: number} | {16 + 8 * at: value & 0xFFFFFFFF for at, value in enumerate(values)}
    program = shield.shield_program(machine)
    accumulator = at = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = memory[operand]
        elif code == 0x15:
            at += if_true if accumulator == operand else if_false
        elif code == 0x25:
            at += if_true if accumulator > operand else if_false
        else:
            assert code == 0x06
            return operand


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [("x86_64", (62, 200, 234, 129, 297, 434)), ("aarch64", (129, 130, 131, 138, 240, 434))],
)
def test_signals_to_process_one_are_refused_and_all_others_are_not(
    machine: str, numbers: tuple[int, ...]
) -> None:
    for number in numbers:
        assert judge(machine, number, 1, 9) == REFUSE
        assert judge(machine, number, (1 << 32) | 1, 9) == REFUSE, "the kernel sees 1 too"
        for other in (0, 2, 1000, -1, -2):
            assert judge(machine, number, other, 9) == ALLOW


@pytest.mark.parametrize(("machine", "fcntl"), [("x86_64", 72), ("aarch64", 25)])
def test_choosing_a_signal_for_a_descriptor_is_refused(machine: str, fcntl: int) -> None:
    assert judge(machine, fcntl, 3, 10) == REFUSE
    assert judge(machine, fcntl, 10, 4) == ALLOW
    assert judge(machine, 424, 3, 9) == REFUSE, "pidfd_send_signal"


@patient
@given(st.integers(0, 600), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_every_other_call_is_allowed(number: int, first: int, second: int) -> None:
    if number not in (62, 200, 234, 129, 297, 434, 72, 424):
        assert judge("x86_64", number, first, second) == ALLOW
