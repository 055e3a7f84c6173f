"""The allowlist of a worker: what `--allow` and `--root` permit, what a production planned, and the names in a job's
configs that are checked. `sources.allowed` has the rule for one name.

A program that can write to the queue can write any job. Both checks come before anything of a job is imported or
opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any, Final
from urllib.parse import unquote

from penstock_producer.jobs.task import ShardTask
from penstock_producer.sources.allowed import NotAllowed, allow_folders, allow_names, require_below, require_name
from penstock_producer.sources.config import (
    ArraysConfig,
    BalancedConfig,
    DatasetConfig,
    GeneratorConfig,
    ImagesConfig,
    InstalledConfig,
    KerasConfig,
    SourceConfig,
    SplitConfig,
    TarConfig,
    TorchConfig,
    WeightedConfig,
    parse_config,
)
from penstock_producer.sources.files import archive_of
from penstock_producer.sources.installed import module_of

_OWN_TO_A_SHARD: Final = ("epoch", "manifest_id", "shard")
_DIGEST_BYTES: Final = 32
_GIVEN: Final = 32
_MET: Final = 33
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_OF_FILES: Final = ("file", "local")
"""URL schemes of addresses that are paths of this host."""


@dataclass(frozen=True)
class Allowlist:
    """The modules and folders that jobs of a shared queue may name."""

    allow: tuple[str, ...] = ()
    """``module``, with all modules below it, or ``module:name``."""
    roots: tuple[str, ...] = ()
    """The folders that must contain every file."""
    is_unlimited: bool = False
    """Whether any code and any file is allowed. A program that can write to the queue then has the rights of this
    process's user."""

    def enforce(self) -> None:
        """Apply the list to this whole process, also to what shows only when a source is opened."""
        if not self.is_unlimited:
            allow_names(self.allow)
            allow_folders(self.roots)

    def check(self, task: ShardTask) -> None:
        """Raise NotAllowed naming the first name or path of a task that is not allowed. Nothing is imported or opened.

        Raises:
            NotAllowed: The text says what was named, and which option would allow it.
            SourceError: The task does not describe a valid source.
        """
        if self.is_unlimited:
            return
        roots = tuple(map(os.path.realpath, self.roots))
        if task.block_transform is not None:
            require_name(task.block_transform, self.allow)
        for config in _parts(parse_config(task.source)):
            for name in _names(config):
                if name is not None:
                    require_name(name, self.allow)
            for path in _paths(config):
                require_below(path, roots)


ANYTHING: Final = Allowlist(is_unlimited=True)


def options_for(source: SourceConfig, block_transform: str | None = None) -> list[str]:
    """Return the options by which a `penstock worker` may do the jobs of a source, and no others.

    Args:
        source: What the jobs read. Nothing of it is imported or opened.
        block_transform: ``module:function`` of many samples, or None.

    Returns:
        ``--allow`` for each name and ``--root`` for each folder, in words of a command line.

    Raises:
        NotAllowed: Only its producer's own workers can make the source.

    Example:
        >>> options_for(DatasetConfig(name="team:data", transform="team:augment"))
        ['--allow', 'team:augment', '--allow', 'team:data']
    """
    names, folders = {block_transform}, set[str]()
    for config in _parts(source):
        names.update(_names(config))
        for path in map(os.path.realpath, _paths(config)):
            folders.add(path if os.path.isdir(path) else os.path.dirname(path))  # noqa: PTH112, PTH120
    roots = [one for one in folders if not any(one != each and _is_inside(one, each) for each in folders)]
    allowed = [word for name in sorted(filter(None, names)) for word in ("--allow", name)]
    return allowed + [word for root in sorted(roots) for word in ("--root", root)]


def names_code(source: SourceConfig, block_transform: str | None = None) -> bool:
    """Return whether code of the user's makes or changes the samples of a source."""
    try:
        return "--allow" in options_for(source, block_transform)
    except NotAllowed:  # objects of a program
        return True


def _is_inside(folder: str, other: str) -> bool:
    return folder.startswith(other.rstrip("/") + "/")


class PlannedTasks:
    """The digest of the tasks of one production, in memory that only the production and its workers share.

    A job with other fields is another production's, or forged. Workers of the production return it untouched.
    """

    def __init__(self) -> None:
        self.cells: Any = RawArray("B", _MET + 1)
        """The digest, whether it is set, and whether a worker met another production's job since the last check."""

    def give(self, task: ShardTask) -> None:
        """Let the workers do jobs like this one, of any epoch and shard, and no others."""
        self.cells[:_DIGEST_BYTES] = _digest(task)
        self.cells[_GIVEN] = 1

    @property
    def are_given(self) -> bool:
        """Return whether tasks were planned yet."""
        return bool(self.cells[_GIVEN])

    def cover(self, task: ShardTask) -> bool:
        """Return True for a job as it was planned."""
        is_covered = self.are_given and bytes(self.cells[:_DIGEST_BYTES]) == _digest(task)
        if not is_covered:
            self.cells[_MET] = 1
        return is_covered

    def has_met_others(self) -> bool:
        """Return whether a worker met any other job since this was last asked."""
        met = bool(self.cells[_MET])
        self.cells[_MET] = 0
        return met


def _digest(task: ShardTask) -> bytes:
    said = {name: value for name, value in task.model_dump(mode="json").items() if name not in _OWN_TO_A_SHARD}
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).digest()


def _parts(config: SourceConfig) -> Iterator[SourceConfig]:
    """Yield the parts of several sources, or of a choice from one."""
    match config:
        case SplitConfig() | BalancedConfig():
            yield from _parts(config.source)
        case WeightedConfig():
            for part in config.parts:
                yield from _parts(part.source)
        case _:
            yield config


def _names(config: SourceConfig) -> Iterator[str | None]:
    match config:
        case ImagesConfig():
            yield from (config.label, config.transform)
        case TarConfig() | ArraysConfig():
            yield config.transform
        case TorchConfig() | DatasetConfig():
            yield from (config.name, config.transform)
        case KerasConfig():
            yield config.name
        case GeneratorConfig():
            yield from (config.name, *(config.pairs or {}).values(), config.transform)
        case InstalledConfig():
            yield from (module_of(config.name), config.transform)
        case _:
            raise NotAllowed(f"only its producer's own workers can make a source of kind {config.kind!r}")


def _paths(config: SourceConfig) -> Iterator[str]:
    match config:
        case ImagesConfig():
            yield config.path
            yield from (f"{config.path}/{file}" if not file.startswith("/") else file for file in config.files or ())
            yield from filter(None, [config.labels])
        case TarConfig():
            yield config.path
        case ArraysConfig():
            for paths in (*config.columns.values(), config.archives):
                yield from map(archive_of, paths)
        case InstalledConfig():
            yield from _paths_in(config.options)


def _paths_in(options: Any) -> Iterator[str]:
    """Yield what may be a path in an installed source's options: text with a slash, or the name of an existing file.

    A server's address is not a path, unless it names no host and its path is that of an existing file.
    """
    if isinstance(options, Mapping):
        for name, value in options.items():
            yield from _paths_in(name)
            yield from _paths_in(value)
    elif isinstance(options, str):
        for part in options.split("::"):  # libraries chain addresses, for example simplecache::file:///x
            yield from _path_in(part)
    elif isinstance(options, Sequence):
        for value in options:
            yield from _paths_in(value)


def _path_in(text: str) -> Iterator[str]:
    scheme, separator, rest = text.partition("://")
    is_address = bool(separator) and _SCHEME.fullmatch(scheme) is not None
    kind, _, path = text.partition(":")
    if kind.lower() in _OF_FILES and path.startswith("/"):
        yield path.removeprefix("//")
    elif is_address and rest.startswith("/"):  # sqlite:///x is below the current directory, and sqlite:////x is not
        relative = unquote(re.split("[?#]", rest)[0]).lstrip("/")
        yield from filter(os.path.lexists, (relative, f"/{relative}"))
    elif not is_address:
        path = text if "\0" in text else os.path.expanduser(text)  # noqa: PTH111
        if "/" in path or text == ".." or os.path.lexists(text):
            yield path
