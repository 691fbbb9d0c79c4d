"""Packs the guest's modules into one file, compiled for the interpreter that will run it.

The modules are joined in order, without their imports of each other, docstrings and annotations, so
that a guest starts from a single read. Names must therefore be unique across the guest's modules.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import subprocess
from pathlib import Path

import k8e.guest

MODULES = (
    "wire",
    "loop",
    "apart",
    "plain",
    "stock",
    "spawn",
    "settling",
    "languages",
    "output",
    "transcript",
    "hits",
    "conditions",
    "kinds",
    "waiting",
    "keeping",
    "warm",
    "inputs",
    "execs",
    "records",
    "talking",
    "executions",
    "pressing",
    "contexts",
    "context_table",
    "table",
    "rehearsing",
    "paths",
    "files",
    "trees",
    "links",
    "processes",
    "ports",
    "terminals",
    "dial",
    "main",
)
BOOT = "boot"
"""The first program of warm Pythons: beside the guest, a file of its own."""
BOOT_NODE = "boot_node.js"
"""The same of warm Nodes."""
KERNEL_MODULES = ("wire", "bundles", "kernel")
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
    for module, source in sources.items():
        for node in _without_docstring(ast.parse(source).body):
            if isinstance(node, ast.ImportFrom) and _is_dropped(node):
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


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    ]


def packed_source() -> str:
    """The guest as one source file."""
    folder = Path(k8e.guest.__file__).parent
    return join_modules({name: (folder / f"{name}.py").read_text("utf-8") for name in MODULES})


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


def pack_guest(folder: Path, interpreter: str) -> Path:
    """Write the packed guest below ``folder`` (once per version) and return the file to run."""
    source = packed_source()
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
