"""Samples as pictures: every array is drawn correctly, in colours, in letters and as PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from PIL import Image

from penstock.views.pictures import LOST, fitted, lines_of, picture_of, spark
from penstock.views.png import SheetTile, bars, contact_sheet, decode, make_folder, save
from penstock_common.errors import PenstockError
from penstock_common.wire.dtypes import NAMES, numpy_dtype

DTYPES = st.sampled_from([numpy_dtype(name) for name in NAMES if name not in ("bfloat16", "bytes")])


@given(arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6)))
@example(np.full((5, 5, 1), 256))  # in one colour, and beyond any known range
@settings(deadline=None, max_examples=300)
def test_any_array_is_drawn_or_has_nothing_to_draw(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Streams of users have NaN, infinities, empty axes and five dimensions, and showing them must not fail."""
    picture = picture_of(array, side=16)
    assert (picture is None) == (array.ndim == 0 or array.size == 0)
    if picture is not None:
        assert picture.rgb.dtype == np.uint8
        assert picture.rgb.ndim == 3
        assert picture.rgb.shape[-1] == 3
        assert fitted(picture.rgb, 12, 12).shape[:2] <= (12, 12)


def test_an_image_is_drawn_as_it_is() -> None:
    """A contact sheet that changes pixels would hide the fault that a user looks for."""
    image = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    for value in (image, image.transpose(2, 0, 1), (image / 255).astype(np.float32), np.stack([image * 0, image])):
        picture = picture_of(value)
        assert picture is not None
        assert np.abs(picture.rgb.astype(int) - image).max() <= 1
    narrow = picture_of(image[:, :4].transpose(2, 0, 1))  # four wide, which is no alpha channel
    assert narrow is not None
    assert (narrow.rgb == image[:, :4]).all()
    grey = picture_of(image[..., :1])
    assert grey is not None
    assert (grey.rgb == image[..., :1]).all()
    scaled = picture_of(image.astype(np.float32) * 10 - 5)
    assert scaled is not None
    assert re.fullmatch(r"-5 to 2\.5\d*e\+03", scaled.note)
    broken = (image / 255).astype(np.float32)
    broken[3, 4] = np.nan
    lost = picture_of(broken)
    assert lost is not None
    assert tuple(lost.rgb[3, 4]) == LOST
    assert (fitted(image, 16, 18)[::2, ::2] == image).all()
    assert fitted(np.full((50, 50, 3), 77, np.uint8), 7, 7).tolist() == [[[77] * 3] * 7] * 7


def test_a_series_is_a_line_from_left_to_right() -> None:
    """Sound and sensors are shown as curves, and a missing value leaves a gap."""
    rising = np.linspace(0, 1, 64)
    rising[32:40] = np.nan
    picture = picture_of(rising, side=64)
    assert picture is not None
    drawn: NDArray[np.bool_] = np.asarray((picture.rgb < 200).any(axis=-1))
    heights = [column.nonzero()[0] for column in drawn.T]
    assert [len(rows) > 0 for rows in heights] == [not 32 <= x < 40 for x in range(64)]
    assert (heights[0].max(), heights[63].min()) == (63, 0)
    assert picture.note == "0 to 1"


def test_a_terminal_shows_two_pixels_a_character() -> None:
    """Half blocks give twice the rows that letters would; without colours there are letters."""
    rgb = np.zeros((4, 3, 3), np.uint8)
    rgb[0, 0], rgb[3, 2] = (255, 0, 0), (255, 255, 255)
    black = ("▀", "#000000 on #000000")
    assert lines_of(rgb, has_colours=True) == [
        [("▀", "#ff0000 on #000000"), black, black],
        [black, black, ("▀", "#000000 on #ffffff")],
    ]
    assert lines_of(np.full((3, 2, 3), 255, np.uint8), has_colours=False)[0] == ["@@"]
    assert spark([0, 1, 1000]) == " ▁█"


def test_sheets_and_charts_are_written_whole(tmp_path: Path) -> None:
    """A page that reloads the PNG must never meet half of one, and a folder that cannot be written is a one-line
    error.
    """
    image = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    tiles = [SheetTile(image, [], ["0/0/1", "y=кот" * 40]), SheetTile(None, ["some", "text"], ["0/0/2"])]
    (tmp_path / "deep").mkdir()
    save(contact_sheet(tiles, "train: two", side=64, columns=2), tmp_path / "deep" / "sheet.png")
    with Image.open(tmp_path / "deep" / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    assert (pixels[34:98, 12:76] == image.repeat(2, axis=0).repeat(2, axis=1)).all()
    chart = np.asarray(bars("classes", [1, 0, 4], ["a", "b", "c"]))
    blue = (chart == (31, 90, 160)).all(axis=-1)
    assert blue[:, 20:200].sum() * 3 < blue[:, 440:620].sum()
    assert not blue[:, 225:415].any()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sheet.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(PenstockError, match=r"cannot write '.*sheet.png'"):
        save(contact_sheet(tiles, ""), tmp_path / "file" / "sheet.png")
    with pytest.raises(PenstockError, match=r"there is no folder '.*/lost/deep' to write 'sheet.png' in"):
        save(contact_sheet(tiles, ""), tmp_path / "lost" / "deep" / "sheet.png")
    assert not (tmp_path / "lost").exists()  # a mistyped path made folders at the root
    make_folder(tmp_path / "plots")
    make_folder(tmp_path / "plots")
    with pytest.raises(PenstockError, match=r"cannot make the folder '.*/lost/plots': No such file or directory"):
        make_folder(tmp_path / "lost" / "plots")


def test_encoded_images_are_decoded_to_be_looked_at_and_bombs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of unchanged files (`--mode encoded`) are shown, too, and damaged ones must not end the command."""
    image, data = np.full((20, 30, 3), 99, np.uint8), io.BytesIO()
    Image.fromarray(image).save(data, format="PNG")
    found = decode(data.getvalue())
    assert found is not None
    assert (found == image).all()
    assert decode(data.getvalue()[:40]) is None
    assert decode(b"no image") is None
    monkeypatch.setattr("penstock.views.png.MOST_PIXELS", 599)
    assert decode(data.getvalue()) is None
