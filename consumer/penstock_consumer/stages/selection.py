"""Choose the tensors that a dataset gives, and their form: dicts, tuples, bare tensors. No framework is used here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock_common.hints import an, did_you_mean
from penstock_common.wire.spec import Spec

Select = str | tuple[str, ...] | None
"""The selection of a dataset: None for dicts of all tensors, a tuple of names for tuples, one name for a bare tensor.

A name may be a prefix of others. If a stream has ``image/left`` and ``image/right``, ``image`` is the dict of both.
"""


def chosen(names: tuple[str, ...], select: Select) -> tuple[str, ...]:
    """Return the names of the selected tensors. Raises ValueError for a name that the stream lacks."""
    if select is None:
        return names
    if not isinstance(select, str) and not all(isinstance(name, str) for name in _listed(select)):
        raise TypeError(f"select is {select!r:.60}, {an(select)}; expected names, select=('x', 'y') or select='x'")
    found: list[str] = []
    for wanted in (select,) if isinstance(select, str) else tuple(select):
        below = [wanted] if wanted in names else [name for name in names if name.startswith(f"{wanted}/")]
        if not below:
            raise ValueError(f"select={select!r}: the stream has {', '.join(names)}{did_you_mean(wanted, names)}")
        found += below
    if not found:
        raise ValueError(f"select={select!r}: the stream has {', '.join(names)}")
    return tuple(dict.fromkeys(found))


def _listed(select: object) -> list[object]:
    return list(select) if isinstance(select, Iterable) else [select]


def shaped(values: Mapping[str, Any], select: Select, *, is_nested: bool = False) -> Any:
    """Return the values in the form that ``select`` asks for. ``is_nested`` makes all of them dicts within dicts."""
    if select is None:
        return nested(values) if is_nested else dict(values)
    return _part(values, select) if isinstance(select, str) else tuple(_part(values, name) for name in select)


def _part(values: Mapping[str, Any], wanted: str) -> Any:
    if wanted in values:
        return values[wanted]
    folder = f"{wanted}/"
    return nested({name.removeprefix(folder): value for name, value in values.items() if name.startswith(folder)})


def refuse_ragged(spec: Spec, names: tuple[str, ...], framework: str) -> None:
    """Raise ValueError if one of these tensors is ragged, because ``framework`` has no type for it."""
    for tensor in (spec[name] for name in names):
        if tensor.is_ragged:
            raise ValueError(
                f"tensor {str(tensor)!r} is ragged, and {framework} wants arrays of one shape; pad it with "
                f"map=lambda batch: {{**batch, {tensor.name!r}: batch[{tensor.name!r}].padded()}}, "
                "or leave it out with select="
            )


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return names like ``a/b`` as dicts within dicts. Raises ValueError if a name is both a tensor and a prefix."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split("/")
        here = found
        for folder in folders:
            here = here.setdefault(folder, {})
            if not isinstance(here, dict):
                raise ValueError(f"tensor {name!r} lies below another tensor, so they cannot be nested")
        if last in here:
            raise ValueError(f"tensor {name!r} is a name and a prefix of others, so they cannot be nested")
        here[last] = value
    return found
