"""``k8e doctor``: what works on this host, and how to fix what does not."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from k8e.cli import fast, printing
from k8e.client.blocking import SandboxClient

_MARKS = {True: "yes", False: "no"}
_COLOURS = {True: "\033[32m", False: "\033[31m"}
_PLAIN = "\033[0m"
_DEFAULT_WIDTH = 100
_REMOVAL = "nothing to do: the gateway tries again; a restart of the machine ends what never ends"


def doctor(options: argparse.Namespace) -> int:
    """Print the table; 0 if any runtime can be used."""
    with SandboxClient() as client:
        found = client.doctor(fresh=options.fresh)
    if options.json:
        printing.answer(found)
    else:
        fast.write(1, "".join(f"{line}\n" for line in table(found, colours=os.isatty(1))).encode())
    return 0 if any(item["usable"] for item in found["runtimes"]) else 1


def table(found: dict[str, Any], *, colours: bool) -> Iterator[str]:
    """Each runtime and feature: usable, or why not and how to fix it."""
    rows: list[tuple[str, str, bool | None, str, str]] = [
        ("RUNTIME", "FEATURE", None, "DETAIL", "")
    ]
    for runtime in found["runtimes"]:
        rows.append((runtime["runtime"], "", runtime["usable"], runtime["detail"], runtime["fix"]))
        rows += [
            ("", item["name"], item["usable"], item["detail"], item["fix"])
            for item in runtime["features"]
        ]
    if egress := found.get("egress"):
        rows.append((egress["name"], "", egress["usable"], egress["detail"], egress["fix"]))
    if disk := found.get("disk"):
        rows.append(("disk", "", *_disk(disk)))
    rows += [
        (f"template {item['name']}", "", False, item["error"], "")
        for item in found.get("broken_templates", ())
    ]
    rows += [
        (item["sandbox_id"], "", False, f"not removed yet: {item['what']}", _REMOVAL)
        for item in found.get("removals", ())
    ]
    names = max(len(row[0]) for row in rows)
    features = max(len(row[1]) for row in rows)
    indent = names + features + 12
    width = max(shutil.get_terminal_size((_DEFAULT_WIDTH, 0)).columns, indent + 30)
    for name, feature, usable, detail, fix in rows:
        mark = f"{'USABLE' if usable is None else _MARKS[usable]:6}"
        if colours and usable is not None:
            mark = _COLOURS[usable] + mark + _PLAIN
        text = detail if not fix else f"{detail} → {fix}" if detail else f"→ {fix}"
        lines = textwrap.wrap(text, width - indent) or [""]
        yield f"{name:{names}}  {feature:{features}}  {mark}  {lines[0]}".rstrip()
        yield from (" " * indent + line for line in lines[1:])
    if found.get("warning"):
        yield ""
        yield from textwrap.wrap(f"warning: {found['warning']}", width)


def _disk(told: dict[str, int]) -> tuple[bool, str, str]:
    """Whether workspaces can grow, what there is, and what to do where there is too little."""
    mib = {name: value >> 20 for name, value in told.items()}
    detail = (
        f"{mib['free']} of {mib['total']} MiB free, {mib['kept_free']} of them stay free; the "
        f"gateway's reserve is {mib['reserve_held']} of {mib['reserve']} MiB"
    )
    if told["held_back"]:
        detail += f"; {told['held_back']} of {told['workspaces']} workspaces cannot grow"
    if told["broken"]:
        detail += f"; {told['broken']} workspaces are broken"
    well = told["free"] > told["kept_free"] and not told["held_back"] and not told["broken"]
    fix = "destroy sessions, remove snapshots and images, or use a larger disk (K8E_DATA_DIR)"
    return well, detail, "" if well else fix
