"""Import names of user code: found from the current directory, and errors that help to spell them."""

from __future__ import annotations

import sys
from importlib.util import LazyLoader, find_spec, module_from_spec

import pytest

from penstock_common.errors import SourceError
from penstock_producer.sources import allowed
from penstock_producer.sources.names import (
    import_name,
    lookup,
    register_alike,
    resolve,
    resolve_callable,
    resolve_object,
)
from tests.producer.sources.conftest import UserModule


def test_a_name_cannot_go_through_a_module_to_another(user_module: UserModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an allowed module would open everything that it imports, including os.system."""
    name = user_module("import os\ndef f(): return 1\n")
    monkeypatch.setattr(allowed, "_allowed", frozenset({name}))
    assert resolve(f"{name}:f")() == 1
    for wanted in (f"{name}:os.system", "os:system", f"{name}2:f"):
        with pytest.raises(SourceError, match=rf"is not allowed in this worker.*--allow {name}"):
            resolve(wanted)


def test_modules_of_the_current_directory_are_found(user_module: UserModule) -> None:
    """The command is installed elsewhere, but the user's code lies where it is called."""
    name = user_module("class Flip:\n    def make(): return 7\nvalue = 3\n")
    assert resolve(f"{name}:value") == 3
    assert resolve(f"{name}:Flip.make")() == 7
    assert resolve("os.path:join")("a", "b") == "a/b"


def test_the_name_of_a_function_of_a_notebook_is_told_from_an_import_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell defines it, so no module has it."""

    def aug(item: object) -> object:
        return item

    aug.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "aug", aug, raising=False)
    with pytest.raises(SourceError, match=r"write module:attribute, .*, or give the function itself, .*: aug$"):
        resolve("aug")


def test_functions_and_classes_are_called_objects_are_not(user_module: UserModule) -> None:
    """A dataset is named by its object, its class, or the function that makes it."""
    name = user_module(
        """
        class Data(list):
            def __init__(self): super().__init__([1, 2])
            def __call__(self): raise AssertionError
        data = Data()
        def make(): return data
        def fails(): return 1 / 0
        """
    )
    assert [resolve_object(f"{name}:{what}") for what in ("Data", "data", "make")] == [[1, 2]] * 3
    with pytest.raises(SourceError, match=rf"calling {name}:fails failed: ZeroDivisionError: .* \({name}\.py:7\)"):
        resolve_object(f"{name}:fails")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flip", "'flip' is not an import name; write module:attribute"),
        (":flip", "is not an import name"),
        ("augment.py:flip", "names a file; write the module instead: augment:flip"),
        ("code/augment.py:flip", "write the module instead: code.augment:flip"),
        ("no_such_module_anywhere:flip", "no module 'no_such_module_anywhere' on the import path"),
        ("os.path:joins", "os.path has no 'joins'; did you mean join"),
        ("os:PATHSEP", r"os has no 'PATHSEP'; did you mean pathsep"),
        ("os:path.nothing", "os has no 'nothing'"),
    ],
)
def test_a_wrong_name_says_what_is_nearest(name: str, message: str) -> None:
    """Users type import names."""
    with pytest.raises(SourceError, match=message):
        resolve(name)


def test_a_misspelt_module_is_compared_with_the_files_here(user_module: UserModule) -> None:
    """The module is nearly always a file in the current directory."""
    name = user_module("value = 3")
    with pytest.raises(SourceError, match=rf"no module '{name}s' .*did you mean {name}\?"):
        resolve(f"{name}s:value")


def test_a_module_that_fails_names_its_own_line(user_module: UserModule) -> None:
    """An error inside the user's module must not look like a missing module."""
    broken = user_module("import os\nimport no_such_thing_at_all\n")
    with pytest.raises(SourceError, match=rf"importing {broken} failed: ModuleNotFoundError: .* \({broken}\.py:2\)"):
        resolve(f"{broken}:value")
    syntax = user_module("def f(:\n")
    with pytest.raises(SourceError, match=rf"importing {syntax} failed: SyntaxError"):
        resolve(f"{syntax}:value")


@pytest.mark.parametrize(
    "script",
    [
        "import argparse\nargparse.ArgumentParser().parse_args(['--unknown'])\n",
        "import penstock\npenstock.Loader('train', group='g', batch_size=1, url='redis://localhost:1')\n",
    ],
)
def test_a_script_that_begins_when_it_is_imported_is_told_from_a_module(script: str, user_module: UserModule) -> None:
    """Many trainings are one file without a main guard. argparse would end the production with its own usage line."""
    name = user_module(f"{script}data = range(8)\n")
    with pytest.raises(SourceError, match=rf"importing {name} failed: .*belongs under `if __name__ == '__main__':`"):
        resolve(f"{name}:data")


def test_an_object_has_the_name_of_the_module_that_holds_it(
    user_module: UserModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run of a program knows its dataset by it. The look must import no lazy module."""
    held = list(range(8))
    name = user_module(f"data = {held}\n")
    assert import_name(resolve(f"{name}:data")) == f"{name}:data"
    monkeypatch.setattr(sys.modules["__main__"], "data", held, raising=False)
    spec = find_spec(user_module("raise AssertionError\n"))
    assert spec is not None
    assert spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    lazy = module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, spec.name, lazy)
    assert import_name(held) == ""  # every program's own module is called __main__


def test_one_object_without_a_name_gives_all_of_a_production_new_tokens(user_module: UserModule) -> None:
    """Another function under the same name would go on with this one's epoch."""
    data = resolve(f"{user_module('data = [1]')}:data")
    assert register_alike([data]) == register_alike([data])
    assert not set(register_alike([data, print])) & set(register_alike([data, lambda item: item]))
    assert lookup(register_alike([data])[0]) is data


def test_a_function_that_exits_is_named(user_module: UserModule) -> None:
    """It may parse a command line, which here is not its own."""
    name = user_module("import sys\ndef make(): sys.exit(3)\n")
    with pytest.raises(SourceError, match=rf"calling {name}:make failed: SystemExit: 3 \({name}\.py:2\)"):
        resolve_object(f"{name}:make")


def test_a_function_is_asked_for_by_what_was_found() -> None:
    """Naming the module's constant instead of its function is one letter away."""
    with pytest.raises(SourceError, match="'os:sep' is a str; expected a function"):
        resolve_callable("os:sep")
