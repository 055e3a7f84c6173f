"""Descriptions of sources as JSON, which a job carries so that a worker opens the same source. ``open`` opens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from penstock_common.errors import SourceError

Pixels = Annotated[int, Field(gt=0, le=1 << 16)]
Count = Annotated[int, Field(gt=0)]
Size = Pixels | tuple[Pixels, Pixels]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _TransformedConfig(_Config):
    """The option of every source whose samples may go through a function of the user's."""

    transform: str | None = None
    """``module:function`` that takes the sample or item, or it and a numpy Generator."""


class PixelsConfig(_Config):
    """The options that say how the bytes of images become arrays."""

    mode: Literal["rgb", "gray", "gray16", "encoded"] = "rgb"
    """rgb: uint8 [H, W, 3]. gray: uint8 [H, W, 1]. gray16: uint16 [H, W, 1]. encoded: the bytes of the file."""
    resize: Size | None = None
    """(height, width), or one number for the shorter side, which keeps the aspect ratio."""
    crop: Size | None = None
    """(height, width) cut from the centre after resizing, or one number for a square."""
    random_crop: Size | None = None
    """(height, width) that a random part of the image is resized to, or one number for a square."""
    flip: bool = False
    """Whether half of the images, at random, are mirrored left to right."""
    max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 89_478_485
    """The most pixels, of a file and after resizing. Larger images are refused before they are decoded.

    Pillow itself warns above the default and refuses images above the bound.
    """

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.random_crop and (self.resize or self.crop):
            raise ValueError("random_crop excludes resize and crop: it gives images of its own size")
        if self.mode == "encoded" and (self.random_crop or self.resize or self.crop or self.flip):
            raise ValueError("mode encoded sends files as they are: resize, crop, random_crop and flip need pixels")
        return self

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        crop = (self.crop, self.crop) if isinstance(self.crop, int) else self.crop
        resize = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        # one number is the shorter side, so only a crop that is too large for both sides is certainly wrong
        compare = all if isinstance(self.resize, int) else any
        if crop and resize and compare(c > r for c, r in zip(crop, resize, strict=True)):
            raise ValueError(f"crop {crop} is larger than resize {resize}; crop is cut from the resized image")
        return self


class ImagesConfig(PixelsConfig, _TransformedConfig):
    """A folder or a zip of images."""

    kind: Literal["images"] = "images"
    path: str
    """A folder, or a file that ends in .zip."""
    files: tuple[str, ...] | None = None
    """The relative paths of the images that are read from a folder. None means all of them."""
    label: str | None = None
    """``module:function`` that takes the relative path and returns ``y`` or a dict of tensors."""
    labels: str | None = None
    """A CSV, TSV, JSON array or JSON lines file. A row names its image, and its other values become tensors.

    The relative path of the image is the first column, or the key ``file``. Without ``label`` and ``labels``, the class
    of an image is its folder.
    """
    unlabelled: Literal["refuse", "skip"] = "refuse"
    """Whether images that the labels file does not name are an error or left out."""
    classes: tuple[str, ...] | None = None
    """Class names in the order of their ids, so that two folders agree. None means the names found, sorted."""

    @model_validator(mode="after")
    def _one_way_to_label(self) -> Self:
        if self.label and self.labels:
            raise ValueError("label (a function) and labels (a file) exclude each other: give one")
        return self


class TarConfig(PixelsConfig, _TransformedConfig):
    """Tars in webdataset's layout: members of one base name are one sample."""

    kind: Literal["tar"] = "tar"
    path: str
    """A .tar, a folder of .tar files, or a pattern such as ``train-{0000..0099}.tar`` or ``train-*.tar``."""
    fields: dict[str, str] | None = None
    """Tensor name -> field, the part of a member's name after its first dot. None means every field there is."""


class ArraysConfig(_TransformedConfig):
    """Rows of numpy files, side by side."""

    kind: Literal["arrays"] = "arrays"
    columns: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Tensor name -> .npy files, or ``FILE.npz:ARRAY``, whose rows follow each other."""
    archives: tuple[str, ...] = ()
    """.npz files, whose rows follow each other. Every array in them is a column."""

    @model_validator(mode="after")
    def _some_file(self) -> Self:
        if not self.archives and not any(self.columns.values()):
            raise ValueError("no file: give .npy files as columns, or .npz files as archives")
        return self


class _IterableConfig(_TransformedConfig):
    """The options of every source that may be an iterable."""

    endless: bool = False
    """Whether one process feeds the items into a stream as they come, without a plan of epochs."""


class TorchConfig(_IterableConfig):
    """A torch Dataset, IterableDataset or DataLoader, found by import name."""

    kind: Literal["torch"] = "torch"
    name: str
    """``module:attribute``. A function or a class is called without arguments."""
    limit: Count | None = None
    """The number of items after which a pass ends. A Dataset with a length takes none."""


class DatasetConfig(_TransformedConfig):
    """An object with ``__len__`` and ``__getitem__``, or equally long arrays, found by import name."""

    kind: Literal["dataset"] = "dataset"
    name: str
    """``module:attribute``. A function or a class is called without arguments."""


class KerasConfig(_Config):
    """A Keras Sequence or PyDataset, which gives batches by index."""

    kind: Literal["keras"] = "keras"
    name: str
    """``module:attribute``. A function or a class is called without arguments."""
    sizes: tuple[Count, Count] | None = None
    """The samples of every batch but the last, and of the last. None means that opening reads these two batches."""


class GeneratorConfig(_IterableConfig):
    """An iterable, or several whose items are paired. One job reads it once, in its order."""

    kind: Literal["generator"] = "generator"
    name: str | None = None
    """``module:attribute`` of an iterable, or of a function that returns one."""
    pairs: dict[str, str] | None = None
    """Tensor name -> ``module:attribute`` of iterables, whose n-th items together are one sample."""
    batched: bool = False
    """Whether items are batches and not samples."""
    limit: Count | None = None
    """The number of items after which a pass ends, because generators made for Keras never end."""

    @model_validator(mode="after")
    def _one_of_two(self) -> GeneratorConfig:
        if bool(self.name) == bool(self.pairs):
            raise ValueError("give either name (one iterable) or pairs (tensor name -> iterable)")
        return self


class LocalConfig(_Config):
    """An object of this process and of the processes forked from it, registered in ``names``."""

    kind: Literal["local"] = "local"
    token: str
    sizes: tuple[Count, Count] | None = None
    """The sizes of batches (see KerasConfig)."""
    transform: str | None = None
    """``module:function``, or the token of a registered function."""


class InstalledConfig(_IterableConfig):
    """A source of another distribution: the class behind an entry point of the group ``penstock.sources``."""

    kind: Literal["installed"] = "installed"
    name: str
    """The name of the entry point. A job names no module, so it cannot choose what is imported."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The keyword arguments of the class, as JSON values."""


class SplitConfig(_Config):
    """One part of a source, by a hash of each sample's name."""

    kind: Literal["split"] = "split"
    source: _Splittable
    parts: tuple[tuple[str, Annotated[float, Field(gt=0, le=1)]], ...]
    """Name and fraction of every part, in order. If the fractions sum to less than 1, the other samples are unused."""
    part: str
    """The name of the part that is wanted."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of the hash alone. Another seed of the production leaves every sample in its part."""

    @model_validator(mode="after")
    def _parts_add_up(self) -> Self:
        names = [name for name, _ in self.parts]
        fractions = ",".join(f"{name}:{fraction:g}" for name, fraction in self.parts)
        if (total := sum(fraction for _, fraction in self.parts)) > 1 + 1e-9:
            raise ValueError(
                f"{fractions} add up to {total:g}, and fractions add up to at most 1: lower one, as in "
                "train:0.9,val:0.1"
            )
        if len(set(names)) != len(names):
            raise ValueError(f"{fractions} name a part more than once: give each a name of its own")
        if self.part not in names:
            raise ValueError(f"no part {self.part!r}; there are {', '.join(names)}")
        return self


class BalancedConfig(_Config):
    """A choice of samples that takes every class equally often in each epoch."""

    kind: Literal["balanced"] = "balanced"
    source: _Balanceable
    by: str = "y"
    """The tensor that holds the class."""
    samples: Count | None = None
    """The samples of one epoch. None means as many as the source has. A weighted source sets the number itself."""


class WeightedPart(_Config):
    """One source of a weighted source."""

    source: _Weighable
    weight: Annotated[float, Field(gt=0, lt=1e12)] = 1.0


class WeightedConfig(_Config):
    """Several sources as one, each with its share of every epoch."""

    kind: Literal["weighted"] = "weighted"
    parts: Annotated[tuple[WeightedPart, ...], Field(min_length=1, max_length=1000)]
    samples: Count | None = None
    """The samples of one epoch. None means as many as all sources have together."""


_Plain = (
    ImagesConfig
    | TarConfig
    | ArraysConfig
    | DatasetConfig
    | KerasConfig
    | TorchConfig
    | GeneratorConfig
    | LocalConfig
    | InstalledConfig
)
_Splittable = Annotated[_Plain, Field(discriminator="kind")]
_Balanceable = Annotated[_Plain | SplitConfig, Field(discriminator="kind")]
_Weighable = Annotated[_Plain | SplitConfig | BalancedConfig, Field(discriminator="kind")]
SourceConfig = Annotated[_Plain | SplitConfig | BalancedConfig | WeightedConfig, Field(discriminator="kind")]

for _nested in (SplitConfig, BalancedConfig, WeightedPart, WeightedConfig):
    _nested.model_rebuild()


def part_of(config: SourceConfig, parts: tuple[tuple[str, float], ...], part: str, seed: int) -> SourceConfig:
    """Return the config of one part of any source.

    Choices apply within the part: a balanced or weighted source chooses among the samples of the part.

    Args:
        config: the whole source.
        parts: name and fraction of every part.
        part: the name of the part that is wanted.
        seed: the seed of the split.

    Raises:
        SourceError: the source is a part of a split already, or the fractions are wrong.
    """
    match config:
        case WeightedConfig():
            mine = [own.model_copy(update={"source": part_of(own.source, parts, part, seed)}) for own in config.parts]
            return config.model_copy(update={"parts": tuple(mine), "samples": _share(config.samples, parts, part)})
        case BalancedConfig():
            mine_alone = part_of(config.source, parts, part, seed)
            return config.model_copy(update={"source": mine_alone, "samples": _share(config.samples, parts, part)})
        case SplitConfig():
            raise SourceError("a part of a split is not split again: give all parts at once")
    return parse_config({"kind": "split", "source": config, "parts": parts, "part": part, "seed": seed})


def _share(samples: int | None, parts: tuple[tuple[str, float], ...], part: str) -> int | None:
    return None if samples is None else max(1, round(samples * dict(parts).get(part, 0)))


_ADAPTER: TypeAdapter[Any] = TypeAdapter(SourceConfig)


def parse_config(value: Mapping[str, Any]) -> SourceConfig:
    """Return the config that a JSON object describes.

    Raises:
        SourceError: a field is wrong. The message names the first one.

    Example:
        >>> parse_config({"kind": "images", "path": "photos", "resize": 224}).resize
        224
    """
    try:
        config: SourceConfig = _ADAPTER.validate_python(dict(value), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "source"
        if first["type"] == "value_error":  # one of the rules above, whose message says what was found
            raise SourceError(f"{field}: {first['ctx']['error']}") from None
        raise SourceError(f"source config, {field}: {first['msg']}; found {first['input']!r:.80}") from None
    return config
