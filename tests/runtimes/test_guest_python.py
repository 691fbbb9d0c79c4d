"""The guest's own Python, and what our layer of an image says."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from k8e import errors
from k8e.runtimes import guest_package
from k8e.runtimes.guest_package import PLACE, imports_of, make_interpreter
from k8e.runtimes.host import GUEST_PYTHON
from k8e.runtimes.overlays import merge_users

SEEN = """
import sys
outside = [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]
print([path for path in [*outside, *sys.path] if not path.startswith(sys.argv[1])])
print([line for line in open("/proc/self/maps") if ".so" in line and sys.argv[1] not in line])
"""


def test_imports_are_found_wherever_they_are() -> None:
    source = "import a, b.c\ndef f():\n    from d import e\n    import g as h\n"
    assert imports_of(source) == ["a", "b.c", "d", "g"]


def test_the_small_python_has_all_that_the_guest_imports_and_uses_nothing_else(
    tmp_path: Path,
) -> None:
    source = guest_package.packed_source()
    # What Python takes for its modules if it finds it above its own folder.
    name = Path(GUEST_PYTHON).resolve().name.replace(".", "")
    decoy = tmp_path / "lib" / f"{name}.zip"
    decoy.parent.mkdir()
    with zipfile.ZipFile(decoy, "w") as archive:
        archive.writestr("encodings/__init__.py", "raise SystemExit('of the image')")
    folder = tmp_path / "made"
    made = make_interpreter(folder, GUEST_PYTHON, source)
    argv = [word.replace(PLACE, str(made.folder)) for word in made.argv]
    program = "import " + ", ".join(imports_of(source)) + SEEN
    done = subprocess.run(
        [*argv, "-I", "-S", "-B", "-c", program, str(made.folder)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr
    assert make_interpreter(folder, GUEST_PYTHON, source) == made
    assert list(folder.iterdir()) == [made.folder], "it is made once"
    closed = [path for path in made.folder.rglob("*") if not path.stat().st_mode & 0o004]
    assert closed == [], "sandboxes with uids of their own read it"


def test_a_library_that_was_updated_makes_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, python = tmp_path / "libc.so.6", Path(GUEST_PYTHON).resolve()
    library.touch()

    def libraries(_: Path) -> list[Path]:
        return [library]

    monkeypatch.setattr(guest_package, "_libraries", libraries)
    before = guest_package._stamps(python)  # pyright: ignore[reportPrivateUsage]
    os.utime(library, (1, 1))
    assert guest_package._stamps(python) != before  # pyright: ignore[reportPrivateUsage]


def test_a_python_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(errors.RuntimeUnusable, match="broken"):
        make_interpreter(tmp_path / "made", str(fake), "import os")
    assert list((tmp_path / "made").iterdir()) == []


def test_our_users_come_first_and_those_of_the_image_stay() -> None:
    ours = b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    theirs = b"root:x:0:0:evil:/:/bin/evil\nnode:x:1000:1000::/home/node:/bin/sh\nuser:x:5:5:::\n"
    merged = merge_users(ours, theirs + b"\nnot a user\npostgres:x:70:70::/:/bin/sh").splitlines()
    assert merged == [
        *ours.splitlines(),
        b"node:x:1000:1000::/home/node:/bin/sh",
        b"postgres:x:70:70::/:/bin/sh",
    ]
