"""Writes what the TypeScript SDK has from elsewhere, and the page with both SDKs side by side.

python sdk/typescript/generate.py           write them
python sdk/typescript/generate.py --check   fail if they are not current

The page is ``docs/reference/sdk-parity.md``. Errors come from ``src/k8e/errors.py``, messages
from ``proto/`` by protoc-gen-es, which ``npm ci`` installs; without it, messages are left as they
are.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import tempfile
from pathlib import Path

import parity

from k8e import errors

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GENERATED = HERE / "src/generated"
PLUGIN = HERE / "node_modules/.bin/protoc-gen-es"
PROTO = "sandbox/v1/sandbox.proto"
HEAD = "// Written by sdk/typescript/generate.py from src/k8e/errors.py. Do not change it here.\n"
_BASE = """
/** Something that k8e could not do, with what the caller can do about it. */
export class K8eError extends Error {
  /** Which error it is, in a word that never changes. */
  readonly code: string = "internal";
  /** What happened, in words; the same as `message`. */
  readonly reason: string;
  /** What to do next; may be empty. */
  readonly hint: string;
  override name = "K8eError";

  constructor(reason: string, options: { hint?: string; cause?: unknown } = {}) {
    super(reason, options.cause === undefined ? undefined : { cause: options.cause });
    this.reason = reason;
    this.hint = options.hint ?? "";
  }
}
"""


def errors_page() -> str:
    """The classes of errors as TypeScript."""
    kinds = list(errors._BY_CODE.values())
    parts = [HEAD, _BASE, *map(_error_class, kinds)]
    names = "".join(f"  {kind.code}: {kind.__name__},\n" for kind in kinds)
    parts.append(
        "\n/** The classes by their codes on the wire. */\n"
        "export const BY_CODE: Readonly<Record<string, typeof K8eError>> = {\n" + names + "};\n"
    )
    hints = {errno.errorcode[number]: text for number, text in errors._IN_SANDBOX.items()}
    lines = "".join(
        f"  {name}: {json.dumps(text, ensure_ascii=False)},\n" for name, text in hints.items()
    )
    parts.append(
        "\n/** What to do about a failed operation on a file of a sandbox. */\n"
        "export const FILE_HINTS: Readonly<Record<string, string>> = {\n" + lines + "};\n"
    )
    return "".join(parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _error_class(kind: type[errors.K8eError]) -> str:
    text = " ".join((kind.__doc__ or "").split())
    made = ""
    if kind is errors.ClientClosed:
        closed = errors.ClientClosed()
        made = (
            f"\n\n  constructor(reason = {json.dumps(closed.message)}, "
            "options: { hint?: string; cause?: unknown } = {}) {\n"
            f"    super(reason, {{ hint: {json.dumps('make a new one')}, ...options }});\n  }}"
        )
    return (
        f"\n/** {text} */\nexport class {kind.__name__} extends K8eError {{\n"
        f'  override readonly code: string = "{kind.code}";\n'
        f'  override name = "{kind.__name__}";{made}\n}}\n'
    )


def messages() -> dict[str, str] | None:
    """The generated messages by file name; None where the plugin is not installed."""
    if not PLUGIN.exists():
        return None
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        done = protoc.main(
            [
                "protoc",
                f"-I{ROOT / 'proto'}",
                f"--plugin=protoc-gen-es={PLUGIN}",
                f"--es_out={folder}",
                "--es_opt=target=ts,import_extension=ts",
                PROTO,
            ]
        )
        if done != 0:
            raise SystemExit("protoc-gen-es failed")
        made = Path(folder, PROTO).with_name("sandbox_pb.ts")
        return {"sandbox_pb.ts": _ENUM.sub(_erasable, made.read_text("utf-8"))}


_ENUM = re.compile(r"^export enum (\w+) \{\n(.*?)^\}\n", re.DOTALL | re.MULTILINE)


def _erasable(found: re.Match[str]) -> str:
    """An enumeration as a constant: Node.js can take types away, but makes no enumerations."""
    name, members = (
        found[1],
        re.sub(r"^(\s*\w+) = (\d+),", r"\1: \2,", found[2], flags=re.MULTILINE),
    )
    kind = f"export type {name} = (typeof {name})[keyof typeof {name}];\n"
    return f"export const {name} = {{\n{members}}} as const;\n{kind}"


def main(arguments: list[str]) -> int:
    """Write the files, or compare them; the exit code."""
    made = {"errors.ts": errors_page(), **(messages() or {})}
    pages = {parity.PAGE: parity.page()} | {GENERATED / name: text for name, text in made.items()}
    old = [path for path, text in pages.items() if _read(path) != text]
    if arguments == ["--check"]:
        for path in old:
            sys.stderr.write(f"{path.name} is not current; run python sdk/typescript/generate.py\n")
        return 1 if old else 0
    for path in old:
        path.write_text(pages[path], "utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
