"""Writes src/k8e/_generated from the proto files; with --check, only tells whether it is current.

protoc's Python output imports its neighbours by their path below proto/. In the package they are
`k8e._generated.<name>_pb2`, so that import is rewritten; nothing else is.
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
OUTPUT = ROOT.parent / "src/k8e/_generated"
PACKAGE = "k8e._generated"
INIT = '"""Output of protoc, written by `make gen`; never edited."""\n'


def generate() -> dict[str, str]:
    """Run protoc over every proto file; return the text of each generated module by its name."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    if not protos:
        sys.exit(f"there is no proto file below {ROOT}")
    with tempfile.TemporaryDirectory() as out:
        plugins = Path(sys.executable).parent
        arguments = [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out=quiet:{out}",
            *protos,
        ]
        if protoc.main(arguments) != 0:
            sys.exit("protoc failed; see above")
        files = sorted(Path(out).rglob("*.py*"))
        texts = {path.name: own_imports(path.read_text()) for path in files}
    return {"__init__.py": INIT, **texts}


def own_imports(text: str) -> str:
    """Point imports of generated neighbours to our package."""
    return re.sub(
        r"^from (?!google\b)[\w.]+ import (\w+_pb2)\b",
        rf"from {PACKAGE} import \1",
        text,
        flags=re.MULTILINE,
    )


def main() -> None:
    """Write what changed, remove what is no longer generated."""
    texts = generate()
    present = {path.name: path for path in OUTPUT.glob("*.py*")} if OUTPUT.is_dir() else {}
    changed = [n for n, t in texts.items() if n not in present or present[n].read_text() != t]
    stale = sorted(set(present) - set(texts))
    if "--check" in sys.argv[1:]:
        if changed or stale:
            names = ", ".join(changed + stale)
            sys.exit(f"src/k8e/_generated is not what proto/ generates ({names}): run `make gen`")
        return
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in changed:
        (OUTPUT / name).write_text(texts[name])
    for name in stale:
        present[name].unlink()


if __name__ == "__main__":
    main()
