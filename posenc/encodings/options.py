"""The options of anything that a spec may name: which there are, and whether values fit."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from posenc.encodings.base import Dimensions, EncodingError, PositionalEncoding


class SpecError(EncodingError):
    """A spec that cannot be read, or that names something that does not exist."""


class Recipe:
    """An encoding named in an option, to be made when its dimensions are known.

    Args:
        name: as written.
        make: makes it for given dimensions.
    """

    def __init__(self, name: str, make: Callable[[Dimensions], PositionalEncoding]):
        self.name = name
        self.make = make

    def __call__(self, dims: Dimensions) -> PositionalEncoding:
        """Make it."""
        return self.make(dims)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which of the known names a misspelt one may have meant."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + (", ".join(known) or "none")


def options_of(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Give the options of a class by name: the keyword-only parameters of its constructor."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def defaults_of(cls: type[Any]) -> dict[str, Any]:
    """Give the default of every option of a class; ... where it has none."""
    return {
        name: ... if option.default is option.empty else option.default
        for name, option in options_of(cls).items()
    }


def fits(value: Any, hint: Any) -> bool:
    """Say whether an option's value is of the annotated type, as far as that can be told."""
    if hint is typing.Any:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(v, typing.get_args(hint)[0]) for v in value)
    return isinstance(value, hint) if isinstance(hint, type) else True


def checked(
    cls: type[Any], name: str, given: dict[str, Any], written: dict[str, str] | None = None
) -> dict[str, Any]:
    """Give the options that ``cls`` is made with, numbers as floats where floats are meant.

    Args:
        cls: what is to be made.
        name: what a spec calls it.
        given: options and their values.
        written: the values as the spec has them, for messages.

    Raises:
        SpecError: an option is unknown (with the nearest ones), lacking, or of another type.
    """
    known, hints = options_of(cls), typing.get_type_hints(cls.__init__)
    values = {}
    for key, value in given.items():
        if key not in known:
            raise SpecError(f"{name} has no option {key!r}: {nearest(key, known)}")
        hint = hints.get(key, Any)
        if not fits(value, hint):
            wanted = getattr(hint, "__name__", hint)
            shown = (written or {}).get(key, repr(value))
            raise SpecError(f"{name}({key}={shown}): takes {wanted}")
        values[key] = float(value) if hint is float else value
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise SpecError(f"{name} lacks an option: {name}({key}=...)")
    return values
