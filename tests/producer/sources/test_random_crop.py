"""Random crops, flips, and images that travel as they are: fast, repeatable, and alike for an image and its mask."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.config import ImagesConfig, TarConfig, parse_config
from penstock_producer.sources.decode import AREA, ASPECT, Decoder, random_box
from penstock_producer.sources.open import open_source
from penstock_producer.sources.seeding import sample_rng


def smooth(height: int, width: int) -> Image.Image:
    """Colours that change so slowly that decoding to a smaller size shows no difference."""
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.stack([255 * columns // width, 255 * rows // height, 255 * (rows + columns) // (height + width)], -1).astype(
            np.uint8
        )
    )


def jpeg(image: Image.Image, **options: Any) -> bytes:
    """Its file."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=95, **options)
    return out.getvalue()


def pixels_of(data: bytes, decoder: Decoder, offset: int = 0) -> NDArray[Any]:
    """With the generator of one identity."""
    found = decoder.decode(data, "a.jpg", sample_rng(0, 0, 0, offset))
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize(("height", "width"), [(375, 500), (1, 1), (1, 4000), (4000, 3), (50, 50)])
def test_a_random_box_lies_in_the_image_and_has_an_allowed_form(height: int, width: int) -> None:
    """A box outside would be filled with black; one of another form would be squeezed beyond what was asked for."""
    for offset in range(300):
        left, top, right, bottom = random_box(height, width, sample_rng(0, 0, 0, offset))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        if (height, width) in ((375, 500), (50, 50)):
            assert AREA[0] * 0.9 <= (right - left) * (bottom - top) / (height * width) <= AREA[1]
            assert ASPECT[0] * 0.9 <= (right - left) / (bottom - top) <= ASPECT[1] * 1.1


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_random_crop_is_what_a_full_decode_would_give(orientation: int) -> None:
    """Decoding no more than is needed is only speed: the part and its colours are the same."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = smooth(1200, 1600)
    data = jpeg(picture, exif=exif)
    upright = picture if orientation == 1 else picture.transpose(Image.Transpose.ROTATE_270)
    for offset in range(8):
        box = random_box(upright.height, upright.width, sample_rng(0, 0, 0, offset))
        expected = np.asarray(upright.resize((48, 32), Image.Resampling.BILINEAR, box)).astype(int)
        found = pixels_of(data, Decoder(random_crop=(32, 48)), offset)
        assert found.shape == (32, 48, 3)
        assert found.flags.writeable
        assert found.flags.c_contiguous
        assert np.abs(found - expected).max() <= 6


def test_about_half_of_the_images_are_mirrored_and_always_the_same_half() -> None:
    """A retried shard must give the same bytes."""
    data = jpeg(smooth(30, 40))
    plain = pixels_of(data, Decoder())
    flipped = [bool((pixels_of(data, Decoder(flip=True), offset) == plain[:, ::-1]).all()) for offset in range(200)]
    again = [bool((pixels_of(data, Decoder(flip=True), offset) != plain).any()) for offset in range(200)]
    assert flipped == again
    assert 70 < sum(flipped) < 130


def test_grey_is_decoded_as_grey() -> None:
    """A JPEG holds brightness on its own: converting colours to it afterwards costs time and gives the same."""
    data = jpeg(smooth(60, 80))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("L"))[..., None].astype(int)
    assert np.abs(pixels_of(data, Decoder("gray")) - expected).max() <= 2


def test_encoded_images_travel_as_they_are_if_they_are_images(tmp_path: Path) -> None:
    """Trainers that decode on the GPU want the file's bytes; a page that says 404 is still named as bad."""
    data = jpeg(smooth(30, 40))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(data)
    (tmp_path / "cat" / "b.jpg").write_bytes(b"<html>404</html>")
    source = open_source(ImagesConfig(path=str(tmp_path), mode="encoded"))
    assert source.unit == "sample"
    assert source.spec is not None
    assert source.spec["x"] == ("bytes", ())
    assert source.read(0, sample_rng(0, 0, 0, 0))["x"] == data
    with pytest.raises(SampleError, match=r"cat/b.jpg: not a readable image"):
        source.read(1, sample_rng(0, 0, 0, 1))


def test_an_image_and_its_mask_are_cropped_alike(tmp_path: Path) -> None:
    """A mask that is cropped elsewhere than its image is no mask."""
    out = io.BytesIO()
    smooth(60, 80).save(out, "PNG")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(6):
            for field in ("jpg.png", "seg.png"):
                info = tarfile.TarInfo(f"{number:03}.{field}")
                info.size = len(out.getvalue())
                archive.addfile(info, io.BytesIO(out.getvalue()))
    source = open_source(TarConfig(path=str(tmp_path / "a.tar"), random_crop=(16, 16), flip=True))
    assert source.unit == "sample"
    samples = [source.read(index, sample_rng(0, 0, 0, index)) for index in range(len(source))]
    assert all((first == second).all() for first, second in (tuple(sample.values()) for sample in samples))
    assert len({bytes(next(iter(sample.values()))) for sample in samples}) == 6
    source.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"random_crop": 224, "resize": 256}, "random_crop excludes resize and crop"),
        ({"random_crop": 224, "crop": 256}, "random_crop excludes resize and crop"),
        ({"mode": "encoded", "flip": True}, "mode encoded sends files as they are"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], why: str) -> None:
    """Which of two sizes was meant must not be guessed."""
    with pytest.raises(SourceError, match=why):
        parse_config({"kind": "images", "path": "photos", **options})
