"""Opening: from a config to the source that it describes, in the dispatcher and in every worker."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

from penstock_common.errors import SourceError
from penstock_common.hints import an
from penstock_producer.sources.arrays import ArraysSource
from penstock_producer.sources.choice import BalancedSource, SplitSource, WeightedSource, split
from penstock_producer.sources.config import (
    ArraysConfig,
    BalancedConfig,
    DatasetConfig,
    GeneratorConfig,
    ImagesConfig,
    InstalledConfig,
    KerasConfig,
    LocalConfig,
    SourceConfig,
    SplitConfig,
    TarConfig,
    TorchConfig,
    WeightedConfig,
)
from penstock_producer.sources.dataset import DatasetSource, require_rows
from penstock_producer.sources.files import require_local
from penstock_producer.sources.generator import GAVE_NOTHING, BrokenIterable, Factory, GeneratorSource, in_step
from penstock_producer.sources.installed import open_installed
from penstock_producer.sources.keras import KerasSource, is_keras
from penstock_producer.sources.names import lookup, name_in_token, resolve, resolve_object
from penstock_producer.sources.protocol import AnySource, Source
from penstock_producer.sources.transform import Transform, TransformedSource


def open_source(config: SourceConfig) -> AnySource:
    """Open the source that a config describes.

    Raises:
        SourceError: it cannot be opened. One line says what was found and what to do.
        NotAllowed: this worker may not import or read what the config names.

    Example:
        >>> source = open_source(ImagesConfig(path="photos", resize=224))
        >>> source.read(0, sample_rng(seed=0, epoch=0, shard=0, offset=0))["x"].shape
        (224, 298, 3)
    """
    match config:
        case SplitConfig():
            return split(open_source(config.source), config.parts, config.part, config.seed)
        case BalancedConfig():
            return BalancedSource(open_source(config.source), config.by, config.samples)
        case WeightedConfig():
            parts = [open_source(part.source) for part in config.parts]
            return WeightedSource(parts, [part.weight for part in config.parts], config.samples)
        case _:
            return _open_plain(config)


def _open_plain(config: Any) -> AnySource:
    match config:
        case ImagesConfig():
            return _images(config)
        case TarConfig():
            return _tar(config)
        case ArraysConfig():
            return _arrays(config)
        case TorchConfig():
            return _torch(config)
        case DatasetConfig():
            return _dataset(resolve_object(config.name), config.name, _transform(config.transform))
        case KerasConfig():
            return KerasSource(resolve_object(config.name), config.name, config.sizes)
        case GeneratorConfig():
            return _generator(config)
        case InstalledConfig():
            return _installed(config)
        case LocalConfig():
            return _local(config)
    raise SourceError(f"no source is of kind {type(config).__name__}")


def config_for_jobs(config: SourceConfig, source: AnySource) -> SourceConfig:
    """Return the config for jobs: with absolute paths, and with the batch sizes that opening learned."""
    match config:
        case SplitConfig() | BalancedConfig():
            assert isinstance(source, (SplitSource, BalancedSource))
            return config.model_copy(update={"source": config_for_jobs(config.source, source.inner)})
        case WeightedConfig():
            assert isinstance(source, WeightedSource)
            pairs = zip(config.parts, source.parts, strict=True)
            parts = tuple(part.model_copy(update={"source": config_for_jobs(part.source, own)}) for part, own in pairs)
            return config.model_copy(update={"parts": parts})
        case ImagesConfig():
            labels = {"labels": _absolute(config.labels)} if config.labels else {}
            return config.model_copy(update={"path": _absolute(config.path), **labels})
        case TarConfig():
            return config.model_copy(update={"path": _absolute(config.path)})
        case ArraysConfig():
            columns = {name: tuple(map(_absolute, paths)) for name, paths in config.columns.items()}
            return config.model_copy(update={"columns": columns, "archives": tuple(map(_absolute, config.archives))})
    if isinstance(config, (KerasConfig, LocalConfig)) and isinstance(source, KerasSource):
        return config.model_copy(update={"sizes": source.sizes})
    return config


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - Path.absolute keeps ".."


def _images(config: ImagesConfig) -> Source:
    from penstock_producer.sources.images import ImagesSource  # Pillow is an extra

    require_local(config.path, config.labels)
    return _transformed(ImagesSource(config), config.transform)


def _arrays(config: ArraysConfig) -> Source:
    require_local(*config.archives, *chain.from_iterable(config.columns.values()))
    return _transformed(ArraysSource(config), config.transform)


def _tar(config: TarConfig) -> Source:
    from penstock_producer.sources.tar import TarSource  # imports Pillow, too

    require_local(config.path)
    return _transformed(TarSource(config), config.transform)


def _installed(config: InstalledConfig) -> AnySource:
    source = open_installed(config.name, config.options)
    if config.transform is None:
        return source
    if source.unit != "sample":
        raise SourceError(f"source {config.name!r} gives each {source.unit} whole, which no transform is applied to")
    return _transformed(source, config.transform)


def _torch(config: TorchConfig) -> AnySource:
    from penstock_producer.sources.torch import open_torch  # torch is an extra, and takes seconds to import

    return open_torch(resolve_object(config.name), config.name, _transform(config.transform), config.limit)


def _transformed(source: Source, transform: str | None) -> Source:
    return TransformedSource(source, Transform.load(transform)) if transform else source


def _dataset(dataset: Any, name: str, transform: Transform | None) -> Source:
    if is_keras(dataset):
        raise SourceError(
            f"{name} is a Keras {type(dataset).__name__}: its items are batches; use the source kind keras"
        )
    return DatasetSource(dataset, name, transform)


def _generator(config: GeneratorConfig) -> GeneratorSource:
    if config.pairs:
        name = " + ".join(config.pairs.values())
        factory = in_step({key: _factory(value) for key, value in config.pairs.items()}, name)
    else:
        name = str(config.name)
        factory = _factory(name)
    return GeneratorSource(factory, name, _transform(config.transform), batched=config.batched, limit=config.limit)


def require_iterable(config: SourceConfig) -> None:
    """Raise SourceError for a function that gives nothing to iterate, before a stream is made for it.

    It is called once more for that, as a dataset's is. An iterator is left alone, because it can be read only once.
    """
    if isinstance(config, GeneratorConfig):
        for name in config.pairs.values() if config.pairs else [str(config.name)]:
            found = resolve(name)
            if callable(found) and not isinstance(found, Iterable):
                iter(GeneratorSource(_factory_of(found, name), name))


def _factory(name: str) -> Factory:
    found = resolve(name)
    return _factory_of(found, name)


def _factory_of(found: Any, name: str) -> Factory:
    """Return a function that begins a pass. A function of the user's is called for each pass."""
    require_rows(found, name)
    if isinstance(found, Iterator):
        return _once(found, name)
    if hasattr(type(found), "__iter__") or hasattr(type(found), "__getitem__"):
        return lambda: _walked(found, name)
    if callable(found):
        return lambda: _walked(found(), name)
    raise SourceError(f"{name} is {an(found)}; expected an iterable, or a function giving one")


def _walked(found: Any, name: str) -> Iterable[Any]:
    """Refuse an object that Python would iterate by index until an IndexError, because a torch-like Dataset may never
    raise one.
    """
    if not hasattr(type(found), "__iter__") and hasattr(type(found), "__len__"):
        raise SourceError(f"{name} has a length and items, but is no iterable: read it with the source kind dataset")
    require_rows(found, name)
    return found  # type: ignore[no-any-return]


def _once(iterator: Iterator[Any], name: str) -> Factory:
    """Return a factory that works once, because a second pass of an iterator would mostly be empty."""
    left = [iterator]

    def factory() -> Iterator[Any]:
        if not left:
            raise BrokenIterable(f"{name} is an iterator and was read already; give the function that makes it")
        return _unless_empty(left.pop(), name)

    return factory


def _unless_empty(iterator: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield the items of an iterator, and raise an error without any: somebody may have read it before."""
    is_empty = True
    for item in iterator:
        is_empty = False
        yield item
    if is_empty:
        raise BrokenIterable(f"{name} {GAVE_NOTHING}: an iterator can be read once; give the function that makes one")


def _local(config: LocalConfig) -> AnySource:
    found = lookup(config.token)
    transform = _transform(config.transform)
    name = f"{type(found).__name__} {name_in_token(config.token) or config.token}"
    if is_torch(found):
        from penstock_producer.sources.torch import open_torch  # its owner has imported torch already

        return open_torch(found, name, transform)
    kind = reads_as(found)
    if kind == "dataset":
        return _dataset(found, name, transform)
    if kind == "generator":
        return GeneratorSource(_factory_of(found, name), name, transform)
    if transform:
        raise SourceError(f"{name} gives batches, which no transform is applied to; transform in its __getitem__")
    return KerasSource(found, name, config.sizes)


def _transform(name: str | None) -> Transform | None:
    return None if name is None else Transform.load(name)


def is_torch(value: Any) -> bool:
    """Tell by the names of its classes whether an object is torch's Dataset or DataLoader."""
    kinds = type(value).__mro__
    return any(k.__module__.startswith("torch.utils.data.") and k.__name__ in ("Dataset", "DataLoader") for k in kinds)


def reads_as(value: Any) -> Literal["dataset", "keras", "generator"]:
    """Return how to read an object whose owner does not say it.

    A Keras dataset is known by its classes, a dataset by its length and its items by index. Other iterables, and
    functions, are read one item after the other.

    Raises:
        SourceError: the object is none of these.
    """
    if is_keras(value):
        return "keras"
    if hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__"):
        return "dataset"
    if hasattr(type(value), "__iter__") or callable(value):
        return "generator"
    if hasattr(type(value), "__getitem__"):
        raise SourceError(f"{an(value)} has items by index but no length: give it __len__, the number of its items")
    raise SourceError(
        f"{an(value)} cannot be read; expected items by index (len and []), a Keras PyDataset, "
        "an iterable, or a function giving one"
    )
