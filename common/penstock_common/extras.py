"""The optional packages: the extra that installs each, and the sentence for a package that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock_common.errors import MissingExtra


class OptionalPackage(NamedTuple):
    """A package that only some users need."""

    name: str
    """The name that pip knows."""
    extra: str
    """The extra of penstock that installs it."""


PACKAGES = {
    "rq": OptionalPackage("rq", "producer"),
    "PIL": OptionalPackage("Pillow", "producer"),
    "tensorflow": OptionalPackage("TensorFlow", "tensorflow"),
    "keras": OptionalPackage("Keras", "tensorflow"),
    "torch": OptionalPackage("torch", "torch"),
    "jax": OptionalPackage("JAX", "jax"),
    "prometheus_client": OptionalPackage("prometheus-client", "metrics"),
    "starlette": OptionalPackage("starlette", "gateway"),
    "uvicorn": OptionalPackage("uvicorn", "gateway"),
    "zstandard": OptionalPackage("zstandard", "zstd"),
    "blosc2": OptionalPackage("Blosc2", "blosc2"),
    "sklearn": OptionalPackage("scikit-learn", "demo"),
}
"""Imported module -> package."""


@contextmanager
def needed(module: str, user: str, hint: str = "") -> Iterator[None]:
    """Turn a failed import of an optional module into a sentence that names the extra.

    Args:
        module: A module of PACKAGES. An import of any other module fails as it did.
        user: The feature that needs it, at the start of the sentence.
        hint: Further advice, at its end.

    Raises:
        MissingExtra: The module is not installed. A module that is installed and broken raises its own error.

    Example:
        >>> with needed("rq", "producing"):
        ...     import rq
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        package = PACKAGES[module]
        text = f'{user} needs {package.name}: pip install "penstock[{package.extra}]"'
        raise MissingExtra(f"{text}; {hint}" if hint else text, name=module) from None
