"""Classes of named fields, like those that ``dataclass(frozen=True)`` makes.

``dataclasses`` imports ``inspect`` and compiles six functions for each class, which was a third of
what ``import k8e`` takes. These compile nothing. The functions of ``dataclasses`` (``asdict``,
``fields``, ``replace``) work with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

T = TypeVar("T", bound="Record")


LONG, HEAD, TAIL = 400, 200, 100
"""Characters or bytes of a value: how many its repr has at most, and what it has of more."""
_REQUIRED = object()


class _Field:
    """The options of a field that has more than a name and a type."""

    def __init__(self, default: Any, factory: Callable[[], Any] | None, shown: bool) -> None:
        self.default = default
        self.factory = factory
        self.shown = shown


def field(
    *,
    default: Any = _REQUIRED,
    default_factory: Callable[[], Any] | None = None,
    repr: bool = True,  # noqa: A002 - its name in dataclasses
) -> Any:
    return _Field(default, default_factory, repr)


class _Layout:
    """The fields of a class."""

    def __init__(self, given: dict[str, Any]) -> None:
        special = {name: one for name, one in given.items() if isinstance(one, _Field)}
        plain = given | {name: one.default for name, one in special.items()}
        self.defaults = {name: one for name, one in plain.items() if one is not _REQUIRED}
        self.factories = {name: one.factory for name, one in special.items() if one.factory}
        self.hidden = frozenset(name for name, one in special.items() if not one.shown)
        self.special = frozenset(special)


class _DataclassFields:
    """The attributes that ``dataclasses`` looks for; made when they are first asked for."""

    def __get__(self, instance: object, owner: type[Record]) -> dict[str, Any]:
        import dataclasses

        layout = owner.__layout__
        fields: list[tuple[str, Any, Any]] = []
        for name in owner.__match_args__:
            options: dict[str, Any] = {"repr": name not in layout.hidden}
            if name in layout.factories:
                options["default_factory"] = layout.factories[name]
            elif name in layout.defaults:
                options["default"] = layout.defaults[name]
            fields.append((name, owner.__annotations__[name], dataclasses.field(**options)))
        made: Any = dataclasses.make_dataclass(owner.__name__, fields)
        return made.__dataclass_fields__


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Its subclasses have the fields that they annotate, and no others."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    __layout__: ClassVar[_Layout] = _Layout({})
    __dataclass_fields__: ClassVar[Any] = _DataclassFields()

    def __init_subclass__(cls, *, frozen: bool = True) -> None:
        names = cls.__match_args__ = tuple(cls.__annotations__)
        cls.__layout__ = _Layout(
            {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        )
        for name in cls.__layout__.special:
            delattr(cls, name)
        if not frozen:
            cls.__setattr__ = cast("Any", object.__setattr__)
            cls.__delattr__ = cast("Any", object.__delattr__)
            cls.__hash__ = cast("Any", None)

    def __init__(self, *values: Any, **named: Any) -> None:
        names = self.__match_args__
        if values:
            placed = dict(zip(names, values))  # noqa: B905 - the difference is told below
            if len(values) > len(names) or not placed.keys().isdisjoint(named):
                raise TypeError(f"{type(self).__name__} got too many values")
            named = {**placed, **named}
        if len(named) != len(names) or not all(map(named.__contains__, names)):
            named = self._complete(named)
        self.__dict__.update(named)

    def _complete(self, named: dict[str, Any]) -> dict[str, Any]:
        whole = {**self.__layout__.defaults, **named}
        for name, make in self.__layout__.factories.items():
            if name not in whole:
                whole[name] = make()
        wanted = set(self.__match_args__)
        if wanted != whole.keys():
            wrong = ", ".join(sorted(wanted ^ whole.keys()))
            raise TypeError(f"{type(self).__name__} lacks, or does not know: {wrong}")
        return whole

    def __setattr__(self, name: str, value: object) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self.__match_args__))

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={shortened(value)}" for name, value in self._shown().items())
        return f"{type(self).__qualname__}({inside})"

    def _shown(self) -> dict[str, Any]:
        """The fields in a repr, without hidden ones: they may be long, or secret."""
        hidden = self.__layout__.hidden
        return {name: self.__dict__[name] for name in self.__match_args__ if name not in hidden}


def shortened(value: Any) -> str:
    """The repr of a value; of long text and bytes the beginning and the end."""
    if not isinstance(value, (str, bytes)) or len(value) <= LONG:
        return repr(value)
    left_out = len(value) - HEAD - TAIL
    return f"{value[:HEAD]!r}...{left_out} more...{value[-TAIL:]!r}"


def replace(record: T, **changes: Any) -> T:
    """A copy with some fields replaced."""
    return type(record)(**{**record.__dict__, **changes})
