"""Templates: recipes that sessions are made from, which administrators can change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from k8e import errors
from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record, field


class Template(Record):
    """A named recipe that sessions are made from. Fields that it does not set are empty."""

    name: str
    source: str
    """``file``, ``api`` or ``built-in``."""
    description: str = ""
    runtime: str = ""
    rootfs: str = ""
    """``host``, ``dir:/PATH``, ``tar:/PATH`` or ``image:REFERENCE``; only admins see paths."""
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    allowed_hosts: list[str] | None = None
    """None means the gateway's default, an empty list nothing."""
    lifetime: float = 0
    idle_timeout: float = 0
    warm: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Languages whose interpreters wait for code, each with the modules that it has loaded."""
    pool: Mapping[str, int] = field(default_factory=dict[str, int])
    """``min`` and ``max`` of the sandboxes that are kept ready."""
    error: str = ""
    """Why it cannot be used; then only its name and source are set besides."""
    digest: str = ""
    """Changes with whatever a ready sandbox is made of."""


_FIELDS = frozenset(Template.__match_args__)


def _template(data: Mapping[str, Any]) -> Template:
    """A template from the wire; a newer gateway may send more than this client knows."""
    return Template(**{key: value for key, value in data.items() if key in _FIELDS})


def name_for_image(reference: str) -> str:
    """The name of the template with nothing but an image."""
    import hashlib  # takes time to import, and few choose images

    return f"image-{hashlib.sha256(reference.encode()).hexdigest()[:20]}"


def one(call: Mapping[str, Any]) -> Operation[Template]:
    return _template((yield from operations.call(call)))


def many() -> Operation[list[Template]]:
    told = yield from operations.call({"op": "list_templates"})
    return [_template(item) for item in told["templates"]]


def apply(recipe: Mapping[str, Any]) -> Operation[Template]:
    if not isinstance(recipe, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidRequest("a template is a mapping, with a name in it")
    return one({"op": "apply_template", "template": _plain(recipe)})


def _plain(value: Any) -> Any:
    """A recipe as it travels; the gateway checks it."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(item) for key, item in items.items()}
    return list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
