"""``k8e conformance run``: whether this machine keeps every promise, each by its id."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import textwrap
from collections.abc import Iterator
from typing import Any

from k8e import errors, settings
from k8e._version import __version__
from k8e.cli import fast, output
from k8e.cli.parser import Commands

_PACKAGE = "k8e.conformance"
_COLOURS = {"pass": "\033[32m", "fail": "\033[31m", "not applicable": "\033[33m"}
_PLAIN = "\033[0m"
_DEFAULT_WIDTH = 100
_INTERRUPTED = 128
_MARK = 14  # the longest verdict


def run(options: argparse.Namespace) -> int:
    """Check promises; 0 if none is broken."""
    conformance = _load()
    chosen = conformance.choose(options.only) if options.only else list(conformance.ALL)
    if options.list:
        return _list([conformance.ALL[name] for name in chosen], json=options.json)
    if os.geteuid() != 0:
        from k8e import rootless

        # Namespaces of their own: a gateway shows its sandboxes other files in the same place.
        rootless.enter(settings.load().run_dir / "checks", detach=False, shared=False)
    try:
        return asyncio.run(_run(options, chosen))
    except asyncio.CancelledError:
        return _INTERRUPTED + signal.SIGTERM


def _load() -> Any:
    """The checks, which an installation can leave out, and which need the extra ``gateway``."""
    try:
        return importlib.import_module(_PACKAGE)
    except ModuleNotFoundError as error:
        if error.name == _PACKAGE:
            raise errors.NotImplementedYet(
                "this installation of k8e has no conformance checks",
                hint="they were left out when it was made; install k8e without "
                "K8E_WITHOUT_CONFORMANCE=1: " + errors.install_extra("gateway"),
            ) from None
        raise errors.NotImplementedYet(
            f"the checks need the package {error.name}", hint=errors.install_extra("gateway")
        ) from None


def _list(behaviours: list[Any], *, json: bool) -> int:
    if json:
        rows = [{"gaps": dict(it.gaps), "id": it.id, "promise": it.promise} for it in behaviours]
        output.answer({"behaviours": rows})
        return 0
    width = max(len(item.id) for item in behaviours)
    for item in behaviours:
        fast.write(1, f"{item.id:{width}}  {item.promise}\n".encode())
    return 0


async def _run(options: argparse.Namespace, chosen: list[str]) -> int:
    from k8e.conformance import host as conformance_host

    _end_at_sigterm()
    told: list[dict[str, Any]] = []
    show = _Lines(len(chosen), quiet=options.json)
    async with conformance_host.own_host() as host:
        for runtime in await conformance_host.runtimes(host, options.runtime):
            show.begin(runtime.name)
            # Closed also when a signal comes: that is when its sandboxes end.
            async with contextlib.aclosing(
                conformance_host.results(host, runtime, chosen)
            ) as results:
                async for result in results:
                    told.append(_row(runtime.name, result))
                    show.result(told[-1])
    show.end()
    counts = {verdict: sum(row["verdict"] == verdict for row in told) for verdict in _COLOURS}
    if options.json:
        output.answer(
            {
                "failed": counts["fail"],
                "not_applicable": counts["not applicable"],
                "passed": counts["pass"],
                "results": told,
                "version": __version__,
            }
        )
    else:
        fast.write(1, f"{_summary(counts)}\n".encode())
    return 1 if counts["fail"] else 0


def _row(runtime: str, result: Any) -> dict[str, Any]:
    return {
        "id": result.behaviour.id,
        "promise": result.behaviour.promise,
        "reason": result.reason,
        "runtime": runtime,
        "seconds": round(result.seconds, 3),
        "verdict": str(result.verdict),
    }


def _summary(counts: dict[str, int]) -> str:
    parts = (f"{counts['pass']} passed", f"{counts['fail']} failed")
    return ", ".join((*parts, f"{counts['not applicable']} not applicable"))


class _Lines:
    """A line for every promise as it is checked; on a terminal also which one is next."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._quiet = quiet
        self._count = 0
        self._runtime = ""
        self._progress = os.isatty(2)
        self._colours = os.isatty(1)

    def begin(self, runtime: str) -> None:
        self._runtime, self._count = runtime, 0
        if not self._quiet:
            self._clear()
            fast.write(1, f"{runtime}\n".encode())
        self._draw()

    def result(self, row: dict[str, Any]) -> None:
        self._count += 1
        if not self._quiet:
            self._clear()
            lines = "".join(f"{line}\n" for line in _lines(row, colours=self._colours))
            fast.write(1, lines.encode("utf-8", "replace"))
        self._draw()

    def end(self) -> None:
        self._clear()

    def _draw(self) -> None:
        if self._progress and self._count < self._total:
            text = f"\r\x1b[K{self._runtime}: {self._count} of {self._total} promises checked …"
            fast.write(2, text.encode())

    def _clear(self) -> None:
        if self._progress:
            fast.write(2, b"\r\x1b[K")


def _lines(row: dict[str, Any], *, colours: bool) -> Iterator[str]:
    mark = f"{row['verdict']:{_MARK}}"
    if colours:
        mark = _COLOURS[row["verdict"]] + mark + _PLAIN
    yield f"  {mark}  {row['id']:32} {row['seconds']:6.2f} s"
    # A reason quotes what a sandbox said, which is hostile.
    plain = "".join(char if char.isprintable() else "\ufffd" for char in row["reason"])
    width = max(shutil.get_terminal_size((_DEFAULT_WIDTH, 0)).columns, 60)
    told = (row["promise"], plain) if row["verdict"] == "fail" else (plain,)
    for text in told:
        yield from (f"{'':{_MARK + 4}}{line}" for line in textwrap.wrap(text, width - _MARK - 4))


def _end_at_sigterm() -> None:
    """Let SIGTERM end the checks as Ctrl-C does, so that their sandboxes end too.

    Only what asks for it is cancelled, and once: what cleans up must come to its end.
    """
    loop, checks = asyncio.get_running_loop(), asyncio.current_task()

    def end() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if checks is not None:
            checks.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)


def add_conformance(commands: Commands) -> None:
    conformance = commands.add(
        "conformance",
        "check that sandboxes on this machine keep every promise, also under attack",
        "k8e conformance run",
    )
    parser = conformance.commands().add(
        "run",
        "check every promise and print pass, fail or not applicable for each; exits with 1 if one "
        "is broken; prints lines, or JSON",
        "k8e conformance run\n"
        "         k8e conformance run --runtime gvisor --only attacks --only network\n"
        "         k8e conformance run --list",
        run,
    )
    parser.add_argument(
        "--runtime",
        action="append",
        help="gvisor or container; repeatable (by default all that work on this machine)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="ID",
        help="a promise, or all whose id begins with this word; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="print the promises and check nothing")
    parser.add_argument("--json", action="store_true", help="print JSON, at the end")
