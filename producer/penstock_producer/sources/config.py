"""What a job must carry to open the same source again: JSON only. Opening is ``open``'s."""

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


class PixelsConfig(_Config):
    """How the bytes of images become arrays."""

    mode: Literal["rgb", "gray", "gray16", "encoded"] = "rgb"
    """uint8 [H, W, 3], uint8 [H, W, 1], uint16 [H, W, 1], or the file as it is, bytes."""
    resize: Size | None = None
    """(height, width), or one number: the shorter side, keeping the aspect ratio."""
    crop: Size | None = None
    """(height, width) cut from the centre after resizing; one number: a square."""
    random_crop: Size | None = None
    """(height, width) that a random part of the image is resized to; one number: a square."""
    flip: bool = False
    """Half of the images are mirrored, left to right, at random."""
    max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 89_478_485
    """Larger images are refused before they are decoded. Pillow warns above the default and refuses above the bound."""

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
        # one number is the shorter side: only what is too large for both sides is surely wrong
        compare = all if isinstance(self.resize, int) else any
        if crop and resize and compare(c > r for c, r in zip(crop, resize, strict=True)):
            raise ValueError(f"crop {crop} is larger than resize {resize}; crop is cut from the resized image")
        return self


class ImagesConfig(PixelsConfig):
    """A folder or a zip of images."""

    kind: Literal["images"] = "images"
    path: str
    """Folder, or file ending in .zip."""
    files: tuple[str, ...] | None = None
    """Only these of a folder, by relative path. None: all."""
    label: str | None = None
    """``module:function`` of the relative path, giving ``y`` or a dict of tensors. Else class folders."""
    labels: str | None = None
    """CSV or TSV (first column), JSON array or JSON lines (key ``file``) of relative paths; the rest become tensors."""
    unlabelled: Literal["refuse", "skip"] = "refuse"
    """What becomes of images that the labels file does not name."""
    classes: tuple[str, ...] | None = None
    """Class names in id order, so that two folders agree. None: the names found, sorted."""
    transform: str | None = None
    """``module:function`` of the sample, or of the sample and a numpy Generator."""

    @model_validator(mode="after")
    def _one_way_to_label(self) -> Self:
        if self.label and self.labels:
            raise ValueError("label (a function) and labels (a file) exclude each other: give one")
        return self


class TarConfig(PixelsConfig):
    """Tars in webdataset's layout: members of one base name are one sample."""

    kind: Literal["tar"] = "tar"
    path: str
    """A .tar, or a folder of them."""
    fields: dict[str, str] | None = None
    """Tensor name -> field, which is what a member's name holds behind its first dot. None: all that are there."""
    transform: str | None = None
    """``module:function`` of the sample, or of the sample and a numpy Generator."""


class ArraysConfig(_Config):
    """Rows of numpy files, side by side."""

    kind: Literal["arrays"] = "arrays"
    columns: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Tensor name -> .npy files, whose rows follow each other."""
    archives: tuple[str, ...] = ()
    """.npz files, whose rows follow each other; every array in them is a column."""
    transform: str | None = None
    """``module:function`` of the sample, or of the sample and a numpy Generator."""

    @model_validator(mode="after")
    def _some_file(self) -> Self:
        if not self.archives and not any(self.columns.values()):
            raise ValueError("no file: give .npy files as columns, or .npz files as archives")
        return self


class _IterableConfig(_Config):
    """What can be said of every iterable."""

    endless: bool = False
    """Fed into a stream as it comes, without epochs, by the one process that is told to."""


class TorchConfig(_IterableConfig):
    """A torch Dataset, IterableDataset or DataLoader, found by import name."""

    kind: Literal["torch"] = "torch"
    name: str
    """``module:attribute``; a function or class is called without arguments."""
    transform: str | None = None
    """``module:function`` of the item, or of the item and a numpy Generator."""
    limit: Count | None = None
    """As in GeneratorConfig; not for a Dataset with a length."""


class DatasetConfig(_Config):
    """An object with ``__len__`` and ``__getitem__``, or equally long arrays, found by import name."""

    kind: Literal["dataset"] = "dataset"
    name: str
    """``module:attribute``; a function or class is called without arguments."""
    transform: str | None = None
    """``module:function`` of the item, or of the item and a numpy Generator."""


class KerasConfig(_Config):
    """A Keras Sequence or PyDataset: index -> batch."""

    kind: Literal["keras"] = "keras"
    name: str
    """``module:attribute``; a function or class is called without arguments."""
    sizes: tuple[Count, Count] | None = None
    """Samples of every batch but the last, and of the last. None: found by reading the first and the last batch."""


class GeneratorConfig(_IterableConfig):
    """An iterable, or several walked in step; read once in order by one job."""

    kind: Literal["generator"] = "generator"
    name: str | None = None
    """``module:attribute``: an iterable, or a function giving one."""
    pairs: dict[str, str] | None = None
    """Tensor name -> ``module:attribute``: iterables whose n-th items together are one sample."""
    batched: bool = False
    """Items are batches, not samples."""
    limit: Count | None = None
    """End the pass after so many items; generators made for Keras never end by themselves."""
    transform: str | None = None
    """``module:function`` of the item, or of the item and a numpy Generator."""

    @model_validator(mode="after")
    def _one_of_two(self) -> GeneratorConfig:
        if bool(self.name) == bool(self.pairs):
            raise ValueError("give either name (one iterable) or pairs (tensor name -> iterable)")
        return self


class LocalConfig(_Config):
    """An object of this process and of those forked from it, put into ``names``' registry."""

    kind: Literal["local"] = "local"
    token: str
    reads_as: Literal["dataset", "keras", "generator"] | None = None
    """None: found out by looking at the object."""
    sizes: tuple[Count, Count] | None = None
    """As in KerasConfig."""
    batched: bool = False
    """As in GeneratorConfig."""
    limit: Count | None = None
    """As in GeneratorConfig."""
    transform: str | None = None
    """``module:function``, or the token of a registered function."""


class InstalledConfig(_IterableConfig):
    """A source that another distribution brings: the class behind an entry point of group ``penstock.sources``."""

    kind: Literal["installed"] = "installed"
    name: str
    """The entry point's. A job names no module: what is imported was decided by who installed it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """JSON values, which the class is called with."""
    transform: str | None = None
    """``module:function`` of the sample, or of the sample and a numpy Generator."""


class SplitConfig(_Config):
    """One part of a source, by a hash of each sample's name."""

    kind: Literal["split"] = "split"
    source: _Splittable
    parts: tuple[tuple[str, Annotated[float, Field(gt=0, le=1)]], ...]
    """Name and fraction of every part, in order; what is left of 1 belongs to none."""
    part: str
    """The one that is meant."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the hash, and of nothing else: another training seed leaves every sample on its side."""

    @model_validator(mode="after")
    def _parts_add_up(self) -> Self:
        names = [name for name, _ in self.parts]
        told = ",".join(f"{name}:{fraction:g}" for name, fraction in self.parts)
        if (total := sum(fraction for _, fraction in self.parts)) > 1 + 1e-9:
            raise ValueError(
                f"{told} add up to {total:g}, and fractions add up to at most 1: lower one, as in train:0.9,val:0.1"
            )
        if len(set(names)) != len(names):
            raise ValueError(f"{told} name a part more than once: give each a name of its own")
        if self.part not in names:
            raise ValueError(f"no part {self.part!r}; there are {', '.join(names)}")
        return self


class BalancedConfig(_Config):
    """A source of which each epoch takes every class equally often."""

    kind: Literal["balanced"] = "balanced"
    source: _Balanceable
    by: str = "y"
    """The tensor that holds the class."""
    samples: Count | None = None
    """Of one epoch; None: as many as the source has. Within several sources its share of them counts."""


class WeightedPart(_Config):
    """One of several sources."""

    source: _Weighable
    weight: Annotated[float, Field(gt=0, lt=1e12)] = 1.0


class WeightedConfig(_Config):
    """Several sources as one, each with its share of every epoch."""

    kind: Literal["weighted"] = "weighted"
    parts: Annotated[tuple[WeightedPart, ...], Field(min_length=1, max_length=1000)]
    samples: Count | None = None
    """Of one epoch; None: as many as all sources have together."""


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
    """One part of a split of any source: what is chosen is chosen within the part. Raises SourceError."""
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
    """A config from its JSON object; raises SourceError naming the first field that is wrong."""
    try:
        config: SourceConfig = _ADAPTER.validate_python(dict(value), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "source"
        if first["type"] == "value_error":  # of one of the rules above, which says what it found
            raise SourceError(f"{field}: {first['ctx']['error']}") from None
        raise SourceError(f"source config, {field}: {first['msg']}; found {first['input']!r:.80}") from None
    return config
