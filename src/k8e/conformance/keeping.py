"""What lasts, and what must not: pauses, sandboxes that were ready, and what others left."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from functools import partial

from k8e.client.results import Stdout
from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.far import CALLING_PORT, OTHER, WEB
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import Room

PAUSES = 10
SNAPSHOTS = 30
CALL = f"{OTHER}:{CALLING_PORT}"  # a way out for puppets that no name leads to


@in_a_room("keep.pauses")
def pauses(room: Room) -> None:
    """Ten pauses in a row lose neither a file, a running program nor its output."""
    client = room.scene.client
    script = (
        "import time\nfor number in range(100000):\n"
        "    open('/workspace/log', 'a').write(f'{number}\\n'); time.sleep(0.01)"
    )
    with room.beside() as kept:
        run = client.start(kept.session_id, ["python3", "-c", script])
        seen = 0
        for number in range(PAUSES):
            client.write_file(kept.session_id, f"file{number}", str(number) * 1000)
            client.pause_session(kept.session_id)
            client.resume_session(kept.session_id)
            for older in range(number + 1):
                text = client.read_file(kept.session_id, f"file{older}")
                equal(text, str(older) * 1000, f"a file after {number + 1} pauses")
            # It goes on, and wrote every number once and in order.
            seen = eventually(partial(_longer, room, kept.session_id, seen))
        run.kill()
        log = client.read_file(kept.session_id, "log").split()
        equal(log, [str(number) for number in range(len(log))], "what the program wrote")


def _longer(room: Room, session_id: str, before: int) -> int:
    try:
        count = room.scene.client.read_file(session_id, "log").count("\n")
    except FileNotFoundError:  # the program has not begun to write yet
        return 0
    return count if count > before else 0


@in_a_room("keep.nothing-of-others")
def nothing_of_others(room: Room) -> None:
    """A session that comes after another finds nothing of it: files, variables, programs, names."""
    client, word = room.scene.client, f"word-{secrets.token_hex(8)}"
    leave = (
        f"for d in /workspace /tmp /var/tmp /dev/shm /home/user; do echo {word} > $d/{word}; done; "
        f"(exec -a {word} sleep 600) >/dev/null 2>&1 & disown; echo {word} > /home/user/.bashrc"
    )
    found = (
        f"grep -rl {word} /workspace /tmp /var/tmp /dev/shm /home 2>/dev/null; "
        f"grep -al {word} /proc/[0-9]*/environ 2>/dev/null | grep -v /$$/; "
        f"for p in /proc/[0-9]*; do test $p != /proc/$$ && grep -aq '{word[:-1]}[{word[-1]}]' "
        "$p/cmdline 2>/dev/null && cat $p/comm | grep sleep; done; true"
    )
    for _ in range(2):
        with room.beside(tenant="one") as before:
            room.scene.client.exec(before.session_id, ["bash", "-c", leave], env={"WORD": word})
            seen = client.exec(before.session_id, ["bash", "-c", found]).stdout
            expect(word in seen, f"the probe is blind: {seen}")
        with room.beside(tenant="two") as after:
            seen = client.exec(after.session_id, ["bash", "-c", found]).stdout
            equal(seen, "", "what is found of another session")


@in_a_room("keep.network-of-others")
def network_of_others(room: Room) -> None:
    """A session that comes after another has none of its connections, lookups and permissions."""
    before = Room(room.scene, room.runtime, "web.test", CALL, tenant="one")
    with contextlib.ExitStack() as stack:
        equal(before.ask("tcp", "web.test", 8080).said, WEB, "what is allowed")
        puppet = stack.enter_context(before.puppet(OTHER, CALLING_PORT))
        expect(not puppet.attempt("address").error, "the probe is blind")
        before.close()
        expect(puppet.is_cut(), "a connection outlived its session")
        room.scene.forget()
        with room.beside("other.test", tenant="two") as after:
            after.refused(["tcp", WEB, 8080], ["tcp", OTHER, CALLING_PORT], ["lookup", "web.test"])
            equal(room.scene.internet.asked, [], "names that were asked for again")
            equal(after.ask("tcp", "other.test", 8080).said, OTHER, "its own name")


_WRITER = """
import itertools, os
for number in itertools.count():
    with open('/workspace/new', 'w') as file: file.write(f'{number} ' * 20000)
    os.rename('/workspace/new', '/workspace/whole')
    with open('/workspace/log', 'a') as file: file.write(f'{number}\\n')
    if number == 5: print('ready', flush=True)
"""


def _saved(room: Room, session_id: str, name: str) -> list[str]:
    """Save a snapshot; the warnings that came with it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        room.scene.client.save_snapshot(session_id, name)
    return [str(item.message) for item in told]


@in_a_room("keep.snapshot-while-writing")
def snapshot_while_writing(room: Room) -> None:
    """A snapshot taken while programs write restores files that were there, and says it is torn."""
    client, name = room.scene.client, f"s-{secrets.token_hex(6)}"
    with room.beside(tenant="") as busy:
        client.write_file(busy.session_id, "still", "still")
        client.write_file(busy.session_id, "writer.py", _WRITER)
        run = client.start(busy.session_id, ["python3", "-S", "writer.py"])
        for event in run.output():
            if isinstance(event, Stdout) and b"ready" in event.data:
                break
        told: list[str] = []
        for _ in range(SNAPSHOTS):  # on a busy machine, the writer may have no turn meanwhile
            told = _saved(room, busy.session_id, name)
            if told:
                break
            client.delete_snapshot(name)
        expect("changed while they were read" in str(told), f"{told}")
        run.kill()
        eventually(lambda: run.poll().status != "running")
        told = _saved(room, busy.session_id, f"{name}-still")
        equal(told, [], "what is said where nothing writes")
        whole = client.read_file(busy.session_id, "whole")
    for saved in (name, f"{name}-still"):
        session_id = client.create_session(room.runtime, (), snapshot=saved)
        try:
            equal(client.read_file(session_id, "still"), "still", "a file that nobody wrote")
            # What is replaced by a rename is whole, and what is appended to has no gap.
            words = client.read_file(session_id, "whole").split()
            equal((len(words), len(set(words))), (20000, 1), "words of a file, and different ones")
            log = client.read_file(session_id, "log").split("\n")[:-1]
            equal(log, [str(at) for at in range(len(log))], "what was added to a file")
        finally:
            client.destroy_session(session_id)
            client.delete_snapshot(saved)
    equal(words, whole.split(), "the file in the snapshot of a session at rest")
