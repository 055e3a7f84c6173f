"""The objects that a config names: by an import name ``module:attribute``, or by a token where they have none.

Modules are imported from the current directory, too, as by ``python -m``. A token stands for an object of this process,
such as a notebook's dataset. It reaches a worker because the fork copies this module. It has the import name of an
attribute of a module, so that a later run knows the object again. Errors suggest similar names.
"""

from __future__ import annotations

import difflib
import importlib
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock_common.errors import PenstockError, SourceError
from penstock_producer.sources.allowed import require_attribute, require_import, require_own


def split_name(name: str) -> tuple[str, str]:
    """Return module and attribute of ``module:attribute`` without importing them.

    Raises:
        SourceError: the name has another form.
    """
    module_name, colon, attribute = name.partition(":")
    if "(" in name:
        called = name.partition("(")[0]
        raise SourceError(
            f"{name!r} is a call, expected an import name: write {called}, which is called without arguments; "
            "a function in the module may give it some"
        )
    if not colon or not module_name or not attribute:
        its_own = getattr(sys.modules["__main__"], name, None)
        is_local = callable(its_own) and getattr(its_own, "__module__", "") == "__main__"
        itself = f", or give the function itself, without quotes: {name}" if is_local else ""
        raise SourceError(f"{name!r} is not an import name; write module:attribute, like {_like(name)}{itself}")
    if module_name.endswith(".py") or "/" in module_name:
        wanted = Path(module_name).with_suffix("").as_posix().replace("/", ".")
        raise SourceError(f"{name!r} names a file; write the module instead: {wanted}:{attribute}")
    return module_name, attribute


def _like(name: str) -> str:
    """Return what a name without a colon was probably meant to be."""
    module, dot, attribute = name.rpartition(".")
    if ":" in name or not dot or not module:
        return "augment:flip"
    return f"{module}:NAME" if attribute == "py" else f"{module}:{attribute}"


def resolve(name: str) -> Any:
    """Return the object that ``module:attribute`` names.

    Args:
        name: the import name. Both sides may hold dots.

    Raises:
        NotAllowed: this process may not import it.
        SourceError: there is no such module or attribute, or the module fails.

    Example:
        >>> resolve("os:path.join").__name__
        'join'
    """
    module_name, attribute = split_name(name)
    require_import(name)
    found = _import(module_name)
    if (file := getattr(found, "__file__", None)) and (stamp := _stamp(file)):
        _FILES.setdefault(file, stamp)
    for part in attribute.split("."):
        require_attribute(name, part)
        if not hasattr(found, part):
            there = [n for n in dir(found) if not n.startswith("_")]
            near = _nearest(part, there) or (f"; it has {', '.join(there[:10])}" if there else "")
            raise SourceError(f"{name!r}: {module_name} has no {part!r}{near}")
        found = getattr(found, part)
        require_own(name, found)
    return found


_FILES: dict[str, tuple[int, int]] = {}
"""Source file of a module that `resolve` imported -> its time and size then."""


def changed_files() -> list[str]:
    """Return the source files that changed since `resolve` imported their modules. Each change is returned once."""
    changed = {file: now for file, then in _FILES.items() if (now := _stamp(file)) and now != then}
    _FILES.update(changed)
    return list(changed)


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        stat = Path(file).stat()
    except OSError:  # an editor may be replacing it
        return None
    return stat.st_mtime_ns, stat.st_size


def resolve_callable(name: str) -> Callable[..., Any]:
    """Return the function that ``module:attribute`` names. Raises SourceError for anything else (see `resolve`)."""
    found = resolve(name)
    if not callable(found):
        raise SourceError(f"{name!r} is a {type(found).__name__}; expected a function")
    return found  # type: ignore[no-any-return]


def resolve_object(name: str) -> Any:
    """Return the object that ``module:attribute`` names, or that the named class or function returns.

    A class or a plain function is called without arguments. Raises SourceError as `resolve` does, and where the call
    fails.
    """
    found = resolve(name)
    if not callable(found) or hasattr(type(found), "__getitem__") or hasattr(type(found), "__iter__"):
        return found
    try:
        return found()
    except (Exception, SystemExit) as error:  # argparse exits, since the arguments are those of penstock
        advice = ""
        if isinstance(error, TypeError) and " missing " in str(error) and error.__traceback__.tb_next is None:  # type: ignore[union-attr]
            module, _, attribute = name.partition(":")
            made = attribute.rpartition(".")[2].lower() + "_made"
            advice = (
                f"; it is called without arguments, so make the object in {module}, {made} = {attribute}(...), "
                f"and give {module}:{made}"
            )
        raise SourceError(f"calling {name} failed: {blame(error)}{advice}") from error


def blame(error: BaseException) -> str:
    """Describe an error of user code with the deepest line that belongs to no library.

    The result looks like ``ZeroDivisionError: division by zero (augment.py:12)``.
    """
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_library(f.filename)]
    return f"{what} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else what


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether the user may have interrupted this process. A worker ignores Ctrl-C, so there user code raised."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def _is_library(filename: str) -> bool:
    here = str(Path(__file__).parent)
    return filename.startswith(("<frozen", here, _STDLIB)) or "site-packages" in filename


_STDLIB = str(Path(importlib.__file__).parent.parent)
_NO_SCRIPT = "workers import this file, so what parses arguments or trains belongs under `if __name__ == '__main__':`"


def _import(module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SourceError(f"importing {module_name} failed: {blame(error)}") from error
        near = _nearest(module_name, [p.stem for p in Path(here).iterdir() if p.suffix == ".py" or p.is_dir()])
        raise SourceError(f"no module {error.name!r} on the import path or in {here}{near}") from None
    except (PenstockError, SystemExit) as error:
        raise SourceError(f"importing {module_name} failed: {blame(error)}; {_NO_SCRIPT}") from error
    except Exception as error:
        raise SourceError(f"importing {module_name} failed: {blame(error)}") from error


def _nearest(word: str, known: list[str]) -> str:
    names = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), names, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(names[one] for one in close)}?" if close else ""


_PREFIX = "local-"
_PROGRAMS = ("__main__", "__mp_main__")
"""The modules of the program. `multiprocessing` uses the second name in processes that it spawns."""

_OBJECTS: dict[str, Any] = {}
"""Token -> object. An entry stays until `forget`. Workers that are forked later have all entries."""


def register(value: Any, name: str = "") -> str:
    """Keep an object under a token and return the token. It is a new one unless the object has a ``name``.

    Only workers that are forked afterwards know it.
    """
    token = _PREFIX + (name or secrets.token_hex(6))
    _OBJECTS[token] = value
    return token


def register_alike(values: Sequence[Any]) -> list[str]:
    """Return the tokens of the objects of one production: by their import names if each has one, otherwise new ones.

    A later run of the program gets the same tokens by import names, and so it continues what this run leaves.
    """
    names = [import_name(value) for value in values]
    return [register(value, name if all(names) else "") for value, name in zip(values, names, strict=True)]


def import_name(value: Any) -> str:
    """Return ``module:attribute`` of an object that is an attribute of a module, or ''.

    The module of the program itself does not count, because every program and notebook calls it ``__main__``.
    """
    found = [
        f"{module_name}:{attribute}"
        for module_name, module in list(sys.modules.items())
        if module_name not in _PROGRAMS and isinstance(module, ModuleType)
        # any other look would import a lazy module
        for attribute, each in list(object.__getattribute__(module, "__dict__").items())
        if each is value
    ]
    return min(found, default="")  # it does not depend on the order of imports


def name_in_token(token: str) -> str:
    """Return the import name with which an object was registered, or ''."""
    name = token.removeprefix(_PREFIX)
    return name if ":" in name else ""


def lookup(token: str) -> Any:
    """Return the object of a token.

    Raises:
        SourceError: this process was not forked from the one that registered the object.
    """
    if token not in _OBJECTS:
        raise SourceError(
            f"object {token!r} is not in this process: only workers forked after it was registered have it; "
            "put it into a module and use its import name for other workers"
        )
    return _OBJECTS[token]


def forget(token: str) -> None:
    """Drop an object. An unknown token is no error.

    An object with an import name stays, because another production may have it. Its module keeps it anyway.
    """
    if not name_in_token(token):
        _OBJECTS.pop(token, None)


def is_token(name: str) -> bool:
    """Tell whether a name is a token and not an import name."""
    return name.startswith(_PREFIX)
