"""Images in a folder or a zip as samples, with the pixels ``x`` and label tensors.

``image_files`` finds and reads the files, ``labels`` labels them and ``decode`` decodes them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SampleError
from penstock_common.wire.spec import SpecLike
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.decode import Decoder, probed
from penstock_producer.sources.files import fingerprint, shown
from penstock_producer.sources.image_files import ImageFolder, ImageZip
from penstock_producer.sources.labels import Labels, from_file, from_folders, from_function
from penstock_producer.sources.protocol import Sample

MAX_LISTED = 10_000
"""The most images whose file names the stream stores, which takes about half a megabyte."""

MAX_ENDINGS = 100
"""The most endings of ignored files that the stream stores with their counts. The commonest are kept."""


class ImagesSource:
    """The images of a folder or zip by index, sorted by path."""

    unit: Literal["sample"] = "sample"
    repeatable = True

    def __init__(self, config: ImagesConfig) -> None:
        is_zip = config.path.lower().endswith(".zip")
        self._files: ImageFolder | ImageZip = (
            ImageZip(config.path) if is_zip else ImageFolder(config.path, config.files)
        )
        paths = [file.path for file in self._files.files]
        self._labels = _labels(config, paths)
        self._kept = range(len(paths)) if self._labels.kept is None else self._labels.kept
        self._decoder = Decoder(config)
        self.draws = self._decoder.is_random
        """Whether `read` uses its generator (see `protocol.draws`)."""
        left_out = {"path", "labels"} if config.files is not None else {"path", "labels", "files"}
        options = config.model_dump(mode="json", exclude=left_out) | {"labels": self._labels.digest}
        # Named files count by name: one that changes or is removed is a bad sample, and the source stays the same.
        kept = self._kept if config.files is None else ()
        self.fingerprint = fingerprint(options, (self._files.files[index] for index in kept))
        others = {shown(suffix): count for suffix, count in self._files.passed_over.most_common(MAX_ENDINGS)}
        self.info: dict[str, Any] = {"source": "images", "classes": self._labels.classes, "passed_over": others}
        if len(self._kept) <= MAX_LISTED and config.files is None:
            self.info["files"] = [self.key(index) for index in range(len(self))]

    def __len__(self) -> int:
        return len(self._kept)

    def key(self, index: int) -> str:
        """Return the path relative to the folder or within the zip."""
        return shown(self._files.files[self._kept[index]].path)

    @cached_property
    def spec(self) -> SpecLike:
        """Return the dtypes and shapes of pixels and labels.

        A size that neither resize nor crop fixes is read from up to 64 headers. It is None where they differ.
        """
        fixed = self._decoder.shape
        return {"x": (self._decoder.dtype, self._probed() if fixed is None else fixed), **self._labels.spec}

    def _probed(self) -> tuple[int | None, ...]:
        seen: set[tuple[int, int, int]] = set()
        for index in probed(len(self)):
            try:
                data = self._files.read(self._kept[index])
                seen.add(self._decoder.measure(data, self.key(index)))
            except SampleError:
                continue  # reading the sample names the error
        return seen.pop() if len(seen) == 1 else (None, None, self._decoder.channels)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return the pixels and labels of one image."""
        pixels = self._decoder.decode(self._files.read(self._kept[index]), self.key(index), rng)
        if isinstance(pixels, bytes):
            return {"x": pixels, **self._labels.row(index)}
        wanted = self.spec["x"][1]
        if any(want is not None and want != size for want, size in zip(wanted, pixels.shape, strict=True)):
            found = f"is {pixels.shape[0]} x {pixels.shape[1]} (height x width)"
            raise SampleError(
                f"{self.key(index)}: {found}, others {wanted[0]} x {wanted[1]}; set resize to make them equal"
            )
        return {"x": pixels, **self._labels.row(index)}

    def column(self, name: str) -> NDArray[Any] | None:
        """Return a label tensor of all images, or None where its shapes differ (see `Labelled`)."""
        found = self._labels.columns.get(name)
        return found.values if found is not None and isinstance(found.values, np.ndarray) else None

    def close(self) -> None:
        """Close the zip file, if it is one."""
        self._files.close()


def _labels(config: ImagesConfig, paths: list[str]) -> Labels:
    if config.labels:
        return from_file(paths, config.labels, config.unlabelled == "skip", config.classes)
    if config.label:
        return from_function(paths, config.label, config.classes)
    return from_folders(paths, config.classes, config.path)
