"""What a value looks like, in every way that it knows: text, HTML, pictures, JSON.

The methods are those that notebooks ask for (``_repr_html_`` and so on), so libraries have them.
A part of the program that runs Python contexts; it is the user's process, and nothing here is safe
from what runs in it.
"""

# Values of a user's program have no static type.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import sys
from typing import Any

TEXT = "text/plain"
PNG = "image/png"
METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    PNG: "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
BINARY = (PNG, "image/jpeg", "application/pdf")
MAX_TEXT = 1 << 20  # characters of one way to look
MAX_RICH = 6 << 20  # bytes of all ways together
MAX_TYPES = 32


def describe_value(value: Any) -> dict[str, Any]:
    """A value by media type. What ``__repr__`` raises is raised; the other ways are optional."""
    found: dict[str, Any] = {}
    if not isinstance(value, type):  # a class has these methods for its instances
        for kind, content in _ask(value, "_repr_mimebundle_", {}).items():
            _add_content(found, kind, content)
        for kind, method in METHODS.items():
            if kind not in found:
                _add_content(found, kind, _ask(value, method, None))
        if PNG not in found and _is_figure(value):
            found[PNG] = draw_figure(value)
    if TEXT not in found:
        found[TEXT] = repr(value)
    return found


def _ask(value: Any, method: str, otherwise: Any) -> Any:
    """What a method answers, if the value's class has it; a failing one is told and left out."""
    function = getattr(type(value), method, None)
    if not callable(function):
        return otherwise
    try:
        answer = function(value)
    except NotImplementedError:
        return otherwise
    except Exception:
        import traceback

        traceback.print_exc()
        return otherwise
    if isinstance(answer, tuple):  # what it is, and more about it
        answer = answer[0] if answer else None
    if otherwise is not None and not isinstance(answer, dict):
        return otherwise
    return answer


def _add_content(found: dict[str, Any], kind: Any, content: Any) -> None:
    """Keep one way to look: text, or bytes for what is binary."""
    if content is None or not isinstance(kind, str):
        return
    if kind in BINARY:
        content = _as_bytes(content)
    elif not isinstance(content, str):
        content = _as_json(content)
    if content is not None:
        found[kind] = content


def _as_bytes(content: Any) -> bytes | None:
    if isinstance(content, str):  # it may be given in base64
        from binascii import Error, a2b_base64

        try:
            return a2b_base64(content)
        except (Error, ValueError):
            return None
    return bytes(content) if isinstance(content, (bytes, bytearray, memoryview)) else None


def _as_json(content: Any) -> str | None:
    import json

    try:
        return json.dumps(content)
    except (TypeError, ValueError):
        return None


def fit_bundle(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What may be sent of it, and the types that were too large."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    room = MAX_RICH
    for kind, content in list(found.items())[:MAX_TYPES]:
        if kind == TEXT and len(content) > MAX_TEXT:
            content = f"{content[:MAX_TEXT]}… ({len(content)} characters)"
        if isinstance(content, str):
            content = content.encode("utf-8", "backslashreplace").decode()
            size = len(content.encode())
        else:
            size = len(content)
        if size > room:
            left_out.append(kind[:100])
            continue
        room -= size
        kept[kind[:100]] = content
    return kept, left_out


# matplotlib, where it is used.


def _is_figure(value: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, getattr(module, "Figure", ()))


def draw_figure(figure: Any) -> bytes:
    from io import BytesIO

    drawn = BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    return drawn.getvalue()


def take_figures() -> list[Any]:
    """The figures that are open; from now on they are not."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not hasattr(pyplot, "get_fignums"):
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures


class PyplotShow:
    """Makes ``matplotlib.pyplot.show`` ours once that module has been imported."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "matplotlib.pyplot":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load, show = loader.exec_module, self._show

            def show_open(*_: Any, **__: Any) -> None:  # matplotlib sets attributes of it
                show()

            def exec_module(module: Any) -> None:
                load(module)
                module.show = show_open

            loader.exec_module = exec_module
        return spec
