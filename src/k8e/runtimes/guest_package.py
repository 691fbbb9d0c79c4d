"""The packed guest, and the small Python that runs it where a root has none.

The modules are joined in order, without their imports of each other, docstrings and annotations, so
that a guest starts from a single read. Names must therefore be unique across the guest's modules.

Made once of the host's Python: the interpreter, the modules that the guest imports, the shared
libraries of all these and the loader for them. It runs wherever the kernel is the same, whatever
libc an image has, and is mounted where nobody's PATH leads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k8e.guest
from k8e import errors

MODULES = (
    "wire",
    "loop",
    "isolation",
    "spawn",
    "limits",
    "streams",
    "interpreters",
    "warm",
    "link",
    "transcript",
    "execs",
    "setup",
    "results",
    "context_runs",
    "contexts",
    "paths",
    "files",
    "trees",
    "ports",
    "terminals",
    "main",
)
POD_MODULES = (*MODULES, "pod")
"""The guest of pods: what only they need takes time to load."""
BOOT = "boot"
"""The first program of warm Pythons: beside the guest, a file of its own."""
BOOT_NODE = "boot_node.js"
"""The same of warm Nodes."""
KERNEL_MODULES = ("wire", "kernel")
"""The program of Python contexts; those of other languages are files as they are."""
KERNEL_FILES = ("bash.sh", "node.js")
TOOLS = {"tsx": "tsx.sh"}
"""Programs for the PATH of every sandbox, and our files that they are made of."""
COMPILE_TIMEOUT = 30  # seconds


class _Strip(ast.NodeTransformer):
    """Drops what the guest does not need at run time."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in [*every, node.args.vararg, node.args.kwarg]:
            if argument is not None:
                argument.annotation = None
        node.body = _without_docstring(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = _without_docstring(node.body)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    kept = [
        node
        for node in body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return kept or [ast.Pass()]


def join_modules(sources: dict[str, str]) -> str:
    """One module that does what ``sources`` do together; ValueError on clashing names."""
    body: list[ast.stmt] = []
    owners: dict[str, str] = {}
    *_, last = sources
    for module, source in sources.items():
        for node in _without_docstring(ast.parse(source).body):
            if isinstance(node, ast.ImportFrom) and _is_dropped(node):
                continue
            if module != last and _is_start(node):
                continue
            for name in _defined(node):
                if owners.setdefault(name, module) != module:
                    raise ValueError(
                        f"guest modules {owners[name]} and {module} both define {name}"
                    )
            body.append(node)
    tree = ast.Module(body=body, type_ignores=[])
    return ast.unparse(ast.fix_missing_locations(_Strip().visit(tree)))


def _is_dropped(node: ast.ImportFrom) -> bool:
    return (node.module or "").startswith("k8e.guest") or node.module in ("__future__", "typing")


def _is_start(node: ast.stmt) -> bool:
    """Whether this is what a module does when it is started as a program."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    ]


def packed_source(modules: Sequence[str] = MODULES) -> str:
    """The guest as one source file."""
    folder = Path(k8e.guest.__file__).parent
    return join_modules({name: (folder / f"{name}.py").read_text("utf-8") for name in modules})


def boot_source() -> str:
    """What a warm interpreter runs first; without annotations it needs no ``__future__``."""
    file = Path(k8e.guest.__file__).parent / f"{BOOT}.py"
    return join_modules({BOOT: file.read_text("utf-8")})


def node_boot_source() -> str:
    """What a warm Node runs first."""
    return (Path(k8e.guest.__file__).parent / BOOT_NODE).read_text("utf-8")


def kernel_sources() -> dict[str, str]:
    """The programs of contexts by file name."""
    folder = Path(k8e.guest.__file__).parent
    parts = {name: (folder / f"{name}.py").read_text("utf-8") for name in KERNEL_MODULES}
    others = {name: (folder / name).read_text("utf-8") for name in KERNEL_FILES}
    return {"python.py": join_modules(parts), **others}


def pack_guest(folder: Path, interpreter: str, modules: Sequence[str] = MODULES) -> Path:
    """Write the packed guest below ``folder`` (once per version) and return the file to run."""
    source = packed_source(modules)
    boot = {"sitecustomize.py": boot_source(), "node.js": node_boot_source()}
    kernels = kernel_sources()
    # An upgraded interpreter refuses what the one before it compiled.
    made_for = Path(interpreter).resolve().stat().st_mtime_ns
    digest = hashlib.sha256(f"{made_for} {source} {boot} {kernels}".encode()).hexdigest()
    target = folder / f"guest-{digest[:16]}.py"
    compiled = target.with_suffix(".pyc")
    _write_tools(folder / "bin")
    if compiled.exists():
        return compiled
    folder.chmod(0o755)
    # Under the names by which they are looked for.
    _write_files(folder / f"{BOOT}-{digest[:16]}", boot)
    _write_files(folder / f"kernels-{digest[:16]}", kernels)
    target.write_text(source, "utf-8")
    target.chmod(0o644)
    # The file must suit the sandbox's interpreter, which need not be ours. Unchecked, because its
    # mounts are read-only and it would otherwise look for the source at every start.
    script = (
        "import py_compile,sys;py_compile.compile(sys.argv[1],sys.argv[2],'guest',True,"
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    scratch = compiled.with_suffix(f".{importlib.util.MAGIC_NUMBER.hex()}.tmp")
    subprocess.run(
        [interpreter, "-IS", "-c", script, str(target), str(scratch)],
        check=True,
        capture_output=True,
        timeout=COMPILE_TIMEOUT,
    )
    scratch.chmod(0o644)
    scratch.rename(compiled)
    return compiled


COPIER = "copy.py"
_POD_NAME = "guest-pod"


def pods_stamp(interpreter: str) -> str:
    """What changes whenever ``pack_for_pods`` would make something else."""
    copier = (Path(k8e.guest.__file__).parent / COPIER).read_text("utf-8")
    parts = (packed_source(POD_MODULES), boot_source(), node_boot_source(), kernel_sources())
    text = f"{FORM} {_stamps(Path(interpreter).resolve())} {parts} {copier}"
    return hashlib.sha256(text.encode()).hexdigest()


def pack_for_pods(folder: Path, interpreter: str) -> None:
    """Write what pods need into an empty folder: the guest, its Python, and what copies both.

    By names that do not change, because pods are told them by gateways.
    """
    packed = pack_guest(folder / "guest", interpreter, POD_MODULES)
    digest = packed.stem.removeprefix("guest-")
    packed.rename(packed.with_name(f"{_POD_NAME}.pyc"))
    packed.with_suffix(".py").unlink()
    for kind in (BOOT, "kernels"):
        (packed.parent / f"{kind}-{digest}").rename(packed.parent / f"{kind}-pod")
    copier = (Path(k8e.guest.__file__).parent / COPIER).read_text("utf-8")
    # Joined with nothing, it has no import of what the small Python lacks.
    (packed.parent / COPIER).write_text(join_modules({COPIER: copier}), "utf-8")
    made = make_interpreter(folder / "made", interpreter, packed_source(POD_MODULES))
    if "musl" in made.loader:
        raise errors.RuntimeUnusable(
            "the guest of pods can be made on a system with glibc only",
            hint="build its image on another machine, and set K8E_GUEST_IMAGE",
        )
    made.folder.rename(folder / "python")
    (folder / "made").rmdir()
    loader = folder / "python/so/loader"
    shutil.copyfile(loader.with_name(made.loader), loader)
    loader.chmod(0o755)


def _write_tools(folder: Path) -> None:
    """Write the programs of every sandbox, each as a whole: sandboxes may be using them."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    for name, source in TOOLS.items():
        content = (Path(k8e.guest.__file__).parent / source).read_bytes()
        file, scratch = folder / name, folder / f".{name}.{os.getpid()}"
        if file.exists() and file.read_bytes() == content:
            continue
        scratch.write_bytes(content)
        scratch.chmod(0o755)
        scratch.rename(file)


def _write_files(folder: Path, sources: dict[str, str]) -> None:
    """Write programs that the guest starts."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    for name, source in sources.items():
        file = folder / name
        file.write_text(source, "utf-8")
        file.chmod(0o644)


PLACE = "/run/k8e/python"
"""Where it is in a sandbox."""
ALWAYS = ("encodings.ascii", "encodings.latin_1", "encodings.utf_8")
SECONDS = 60
FORM = 2  # to be raised when what is made here changes
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_LOADER = re.compile(r"ld(-linux.*|-musl-.*|64)?\.so(\.\d+)?")
# What the interpreter has loaded after it has imported the names it is given.
_LOOK = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
files = {n: m.__file__ for n, m in sys.modules.items() if getattr(m, "__file__", None)}
print(json.dumps({"files": files, "library": __import__("os").__file__}))
"""
_COMPILE = """
import compileall, py_compile, sys
compileall.compile_dir(sys.argv[1], quiet=2, stripdir=sys.argv[1],
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


@dataclass(frozen=True)
class Interpreter:
    """Where it is on the host, and how a sandbox starts it."""

    folder: Path
    loader: str

    @property
    def argv(self) -> list[str]:
        """The loader reads no file of the root (musl's has no cache), and Python no locale."""
        libraries = f"{PLACE}/so"
        blind = [] if "musl" in self.loader else ["--inhibit-cache"]
        loader = [f"{libraries}/{self.loader}", *blind, "--library-path", libraries]
        return [*loader, f"{PLACE}/bin/python3", "-X", "utf8"]


def imports_of(source: str) -> list[str]:
    """The modules that a program imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return sorted(found)


def make_interpreter(folder: Path, interpreter: str, source: str) -> Interpreter:
    """The small Python for a program, made below ``folder`` once per version of either."""
    names = [*imports_of(source), *ALWAYS]
    real = Path(interpreter).resolve()
    stamp = f"{FORM} {_stamps(real)} {names}"
    target = folder / hashlib.sha256(stamp.encode()).hexdigest()[:16]
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        scratch = folder / f"{target.name}.{os.getpid()}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            _make(scratch, real, names)
            scratch.rename(target)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            detail = getattr(error, "stderr", b"") or str(error).encode()
            raise errors.RuntimeUnusable(
                f"no small Python can be made of {real}: {detail.decode(errors='replace')[-300:]}",
                hint="sandboxes with the host's own root file system still work",
            ) from None
    return Interpreter(target, _loader_in(target / "so"))


def _stamps(real: Path) -> list[tuple[str, int]]:
    """What tells whether the interpreter or a library of it was updated since."""
    try:
        libraries = _libraries(real)
    except (OSError, subprocess.SubprocessError):
        libraries = []  # making it says why
    return [(str(path), path.stat().st_mtime_ns) for path in [real, *libraries]]


def _make(scratch: Path, real: Path, names: list[str]) -> None:
    told: dict[str, Any] = json.loads(_run([str(real), "-I", "-S", "-c", _LOOK, *names]))
    library = Path(told["library"]).parent
    files = [Path(path) for path in {*told["files"].values(), told["library"]}]
    target = scratch / "lib" / library.name
    (target / "lib-dynload").mkdir(parents=True)  # by which Python knows its place
    for file in files:
        if file.is_relative_to(library):
            _copy(file, target / file.relative_to(library))
    # Python looks for this in all folders above it, and would take an image's for its modules.
    (scratch / "lib" / f"{library.name.replace('.', '')}.zip").touch()
    _copy(real, scratch / "bin/python3")
    extensions = [file for file in files if ".so" in file.suffixes]
    for file in sorted({item for path in [real, *extensions] for item in _libraries(path)}):
        _copy(file, scratch / "so" / file.name)
    _run([str(real), "-I", "-S", "-c", _COMPILE, str(target)])
    for path in scratch.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.parent.name in ("bin", "so") else 0o644)
    scratch.chmod(0o755)
    made = Interpreter(scratch, _loader_in(scratch / "so"))
    argv = [word.replace(PLACE, str(scratch)) for word in made.argv]
    _run([*argv, "-I", "-S", "-B", "-c", _LOOK, *names])


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _libraries(program: Path) -> list[Path]:
    """What a program of this host is linked with, the loader included."""
    return [Path(found) for found in _LIBRARY.findall(_run(["ldd", str(program)]))]


def _loader_in(folder: Path) -> str:
    found = [file.name for file in folder.iterdir() if _LOADER.fullmatch(file.name)]
    if len(found) != 1:
        raise ValueError(f"the loader is not known: {found}")
    return found[0]


def _run(argv: list[str]) -> str:
    done = subprocess.run(
        argv, check=True, capture_output=True, timeout=SECONDS, env={"PATH": "/usr/bin:/bin"}
    )
    return done.stdout.decode()
