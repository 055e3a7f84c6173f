"""Real files for the sources: folders and zips of images made by Pillow, and modules of user code."""

from __future__ import annotations

import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

UserModule = Callable[[str], str]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserModule]:
    """Writes a module of user code into the current directory, which is the test's own; returns its name."""
    before = set(sys.modules)
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    names = iter(f"user_{tmp_path.name}_{number}".replace("-", "_") for number in range(9))

    def write(code: str) -> str:
        name = next(names)
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of three images of 6 x 4 (height x width), each of one grey: 10 x its place among the paths."""
    root = tmp_path / "train"
    for number, path in enumerate(("cat/a.png", "cat/b.bmp", "cat/deep/c.png", "dog/a.png", "dog/b.tiff", "dog/c.png")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 6), (10 * number,) * 3).save(root / path)
    return root


@pytest.fixture
def zipped(folder: Path, tmp_path: Path) -> Path:
    """Return the same images in a zip: stored and deflated members, folders' own entries, and what macOS adds."""
    target = tmp_path / "train.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for number, path in enumerate(sorted(folder.rglob("*"))):
            method = zipfile.ZIP_STORED if number % 2 else zipfile.ZIP_DEFLATED
            archive.write(path, f"train/{path.relative_to(folder).as_posix()}", method)
        archive.writestr("__MACOSX/train/cat/._a.png", b"not an image")
    return target


def gradient(height: int = 8, width: int = 12) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """Pixels in which every turn and flip shows: red grows to the right, green downwards, blue marks one corner."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([columns * 20, rows * 30, np.zeros_like(rows)], axis=-1).astype(np.uint8)
    pixels[0, 0, 2] = 255
    return pixels
