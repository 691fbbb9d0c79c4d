"""What lasts, and what must not: pauses, sandboxes that were ready, and what others left."""

from __future__ import annotations

import secrets
from functools import partial

from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import Room

PAUSES = 10


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
    count = room.scene.client.read_file(session_id, "log").count("\n")
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
