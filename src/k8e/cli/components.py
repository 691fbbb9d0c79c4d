"""``k8e components …``: the upstream programs of a cluster: get, build, list and verify them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from k8e import errors
from k8e.cli import fast, output
from k8e.cli.parser import Commands

if TYPE_CHECKING:
    from k8e.distro.component_store import ComponentStore, Finding
    from k8e.distro.components import Component

NETWORKS = ("all", "cilium", "basic", "none")
_LINE_SECONDS = 30.0  # between two lines of progress without a terminal
_WIDTH = 110
_TERMINATED = 143  # 128 + SIGTERM, as shells report it


def add_components(commands: Commands) -> None:
    group = commands.add(
        "components",
        "get, build, list and verify the upstream programs that k8e server and k8e agent run",
        "k8e components install",
    )
    below = group.commands(required=True)
    install_parser = below.add(
        "install",
        "get missing or damaged components: upstream's release, or a build from its source",
        "k8e components install --cni basic",
        install,
    )
    listing_parser = below.add(
        "list", "list the components, and which of them are present", "k8e components list", listing
    )
    verify_parser = below.add(
        "verify",
        "read every byte, and compare it with the recorded digests",
        "k8e components verify",
        verify,
    )
    build_parser = below.add(
        "build",
        "build from source, even components that are present; needs Go",
        "k8e components build runc",
        build,
    )
    for parser in (install_parser, listing_parser, verify_parser, build_parser):
        parser.add_argument("name", nargs="*", help="a component; by default all of a cluster")
        parser.add_argument(
            "--cni", choices=NETWORKS, default="all", help="only what a node with this needs"
        )
        parser.add_argument(
            "--dir", metavar="PATH", help="where they are kept [K8E_COMPONENTS_DIR]"
        )
        parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
    for parser in (install_parser, build_parser):
        parser.add_argument(
            "--jobs", type=int, default=0, metavar="N", help="compile so many packages at once"
        )


def install(options: argparse.Namespace) -> int:
    return _get(options, build=False)


def build(options: argparse.Namespace) -> int:
    return _get(options, build=True)


def _get(options: argparse.Namespace, *, build: bool) -> int:
    from k8e.distro.component_builds import Builder

    store, wanted = _store(options), _wanted(options)
    signal.signal(signal.SIGTERM, _leave)
    began = time.monotonic()
    with Lines([item.name for item in wanted], os.isatty(2)) as lines:
        got = Builder(store, lines.tell, options.jobs).install(wanted, build=build)
    names = [item.name for item in got]
    told = {
        "dir": str(store.folder),
        "installed": names,
        "present": [item.name for item in wanted if item not in got],
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.json or not os.isatty(1):
        output.answer(told)
    else:
        new = ", ".join(names) or "nothing was missing"
        fast.write(1, f"{store.folder}: {new}\n".encode())
    return 0


def _leave(*_: object) -> NoReturn:
    """End with an exception, so that the build ends with us and its files are removed."""
    sys.exit(_TERMINATED)


def listing(options: argparse.Namespace) -> int:
    _show(options, thorough=False)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Print what was found; 0 if every component can be used."""
    from k8e.distro.component_store import State

    found = _show(options, thorough=True)
    return 0 if all(item.state is State.PRESENT for item in found) else 1


def _show(options: argparse.Namespace, *, thorough: bool) -> list[Finding]:
    store = _store(options)
    found = [store.look(item, thorough=thorough) for item in _wanted(options)]
    if options.json or not os.isatty(1):
        told = {"components": [_told(item) for item in found], "dir": str(store.folder)}
        output.answer(told)
    else:
        output.write_lines(component_table(found))
    return found


def _told(item: Finding) -> dict[str, Any]:
    component = item.component
    return {
        "detail": item.detail,
        "files": [*component.files, *component.folders],
        "licence": component.licence,
        "name": component.name,
        "size_bytes": item.size,
        "source": item.source,
        "state": str(item.state),
        "use": component.use,
        "version": component.version,
    }


def component_table(found: Sequence[Finding]) -> Iterator[str]:
    """The components as a table, and below it the defects."""
    rows = [("NAME", "VERSION", "STATE", "SIZE", "FROM", "USE")]
    for item in found:
        component = item.component
        # A version of a commit is a date and a hash, of which the date tells enough.
        version = component.version.partition("-20")
        shown = f"{version[0]}-20{version[2][:6]}" if version[1] else version[0]
        size = output.size(item.size) if item.size else ""
        use = item.detail if item.detail and not item.source else component.use
        rows.append((component.name, shown, str(item.state), size, item.source, use))
    yield from output.table(rows)
    wrong = [item for item in found if item.detail and item.size]
    yield from (f"{item.component.name}: {item.detail}" for item in wrong)


def _store(options: argparse.Namespace) -> ComponentStore:
    from k8e import settings
    from k8e.distro.component_store import ComponentStore

    return ComponentStore(settings.load(components_dir=options.dir).components_dir)


def _wanted(options: argparse.Namespace) -> list[Component]:
    from k8e.distro import components

    if not options.name:
        return list(components.needed(options.cni))
    try:
        return [components.by_name(name) for name in options.name]
    except LookupError as error:
        raise errors.InvalidRequest(
            f"there is no component {error.args[0]}",
            hint=f"known are {', '.join(item.name for item in components.COMPONENTS)}",
        ) from None


class Lines:
    """Progress on stderr: one line that changes on a terminal, else a line now and then."""

    def __init__(self, names: Sequence[str], is_terminal: bool) -> None:
        self._names = list(names)
        self._is_terminal = is_terminal
        self._told_at = 0.0
        self._told = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._told:
            fast.write(2, b"\n")

    def tell(self, name: str, text: str) -> None:
        """Report a component's progress; without a terminal, at intervals."""
        number = self._names.index(name) + 1 if name in self._names else 0
        line = f"[{number}/{len(self._names)}] {name}: {text}"
        what = f"{name} {text.partition(':')[0]}"
        is_new = what != self._told
        if self._is_terminal:
            start = "\n" if is_new and self._told else "\r\x1b[K"
            fast.write(2, f"{start}{line[:_WIDTH]}".encode("utf-8", "replace"))
        elif is_new or time.monotonic() >= self._told_at + _LINE_SECONDS:
            self._told_at = time.monotonic()
            fast.write(2, f"{line}\n".encode("utf-8", "replace"))
        self._told = what
