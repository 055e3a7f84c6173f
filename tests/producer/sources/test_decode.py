"""Image files as pixels: every format, colour model, depth and orientation, checked pixel by pixel."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.config import ImagesConfig, PixelsConfig, TarConfig, parse_config
from penstock_producer.sources.decode import AREA, ASPECT, FORMATS, Decoder, random_box
from penstock_producer.sources.open import open_source
from penstock_producer.sources.seeding import sample_rng
from tests.producer.sources.conftest import gradient

Pixels = NDArray[Any]


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def decoded(data: bytes, mode: Literal["rgb", "gray", "gray16"] = "rgb", **options: Any) -> Pixels:
    """Its pixels."""
    found = Decoder(PixelsConfig(mode=mode, **options)).decode(data, "a/b.img")
    assert isinstance(found, np.ndarray)
    return found


def png16(pixels: Pixels, colour_type: int) -> bytes:
    """A 16-bit PNG of any colour type, which Pillow cannot write; see PNG specification 11.2."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + pixels[row].astype(">u2").tobytes() for row in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("form", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 100}, 12),
        ("JPEG", {"quality": 100, "subsampling": 0}, 4),
        ("JPEG", {"quality": 100, "subsampling": 0, "progressive": True}, 4),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 4),
        ("JPEG2000", {}, 0),
        ("JPEG2000", {"no_jp2": True}, 0),
        ("ICO", {"sizes": [(96, 64)]}, 0),
        ("ICO", {"sizes": [(96, 64)], "bitmap_format": "bmp"}, 0),
    ],
)
def test_every_format_gives_its_pixels(form: str, options: dict[str, Any], tolerance: int) -> None:
    """A format that is listed is read right, not merely without an error."""
    pixels = np.repeat(np.repeat(gradient()[..., :2], 8, 0), 8, 1)
    pixels = np.concatenate([pixels, pixels[..., :1]], -1)
    found = decoded(encoded(Image.fromarray(pixels), form, **options))
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert np.abs(found.astype(int) - pixels).max() <= tolerance


@pytest.mark.parametrize(
    ("form", "options"),
    [("GIF", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("PNG", {}), ("AVIF", {"quality": 100})],
)
def test_the_first_frame_of_many_counts(form: str, options: dict[str, Any]) -> None:
    """Animations and multi-page scans are one sample."""
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == 2
    found = decoded(data)
    assert np.abs(found[1, 1].astype(int) - [255, 0, 0]).max() <= 2


def test_an_icon_is_its_largest_picture() -> None:
    """An icon holds one picture in several sizes; the directory cannot name one above 256."""
    large = Image.fromarray(np.repeat(np.repeat(gradient(), 16, 0), 16, 1))
    data = encoded(large, "ICO", sizes=[(16, 16), (48, 32), (192, 128)])
    assert decoded(data).shape == Decoder(PixelsConfig()).measure(data, "") == (128, 192, 3)
    picture = encoded(large.resize((640, 320)), "PNG")
    entry = struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, len(picture), 22)
    beyond = struct.pack("<HHH", 0, 1, 1) + entry + picture
    assert decoded(beyond).shape == Decoder(PixelsConfig()).measure(beyond, "") == (320, 640, 3)
    with pytest.raises(SampleError, match="640 x 320 pixels; at most 70000 are decoded"):
        decoded(beyond, max_pixels=70_000)


def test_a_jpeg_2000_that_lies_about_its_size_is_refused() -> None:
    """The size is judged before any memory is taken, so the pixels behind it must not be more."""
    data = encoded(Image.new("L", (512, 512)), "JPEG2000")
    at = data.index(b"ihdr") + 4
    with pytest.raises(SampleError, match="cannot be decoded"):
        decoded(data[:at] + struct.pack(">II", 8, 8) + data[at + 8 :])


def test_photos_of_phones_that_hold_several_pictures_are_read() -> None:
    """Many phones write MPO under the name .jpg."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("white", "black")]
    data = encoded(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert decoded(data, resize=4).tolist() == np.full((4, 4, 3), 255).tolist()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    """Phones store pictures on their side and say so; a model must see them upright."""
    shown = np.repeat(np.repeat(gradient(), 8, 0), 8, 1)
    # how the stored rows and columns follow from the shown ones, EXIF 2.32 table 6
    turn = {
        1: shown,
        2: shown[:, ::-1],
        3: shown[::-1, ::-1],
        4: shown[::-1],
        5: shown.transpose(1, 0, 2),
        6: shown.transpose(1, 0, 2)[::-1],
        7: shown.transpose(1, 0, 2)[::-1, ::-1],
        8: shown.transpose(1, 0, 2)[:, ::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }  # fmt: skip
    stored = Image.fromarray(np.ascontiguousarray(turn[orientation]))
    data = encoded(stored, form, exif=exif, **options.get(form, {}))
    found = decoded(data)
    assert found.shape == shown.shape
    assert np.abs(found.astype(int) - shown)[2:-2, 2:-2, :2].max() <= 16
    assert found[3, 3, 2] > 128 > found[3, -3, 2]
    assert Decoder(PixelsConfig()).measure(data, "") == shown.shape
    assert decoded(data, resize=(16, 24)).shape == (16, 24, 3)
    assert decoded(data, resize=16).shape == (16, 24, 3)


def test_unreadable_exif_does_not_cost_the_image() -> None:
    """Viewers show such files, because many cameras write them."""
    data = encoded(Image.new("RGB", (8, 8), "white"), "JPEG", exif=b"Exif\0\0garbage garbage")
    assert decoded(data, resize=4)[0, 0].tolist() == [255, 255, 255]


def test_transparent_pixels_are_laid_on_white() -> None:
    """Colours below full transparency are arbitrary and were never meant to be seen."""
    half = Image.new("RGBA", (2, 1))
    half.putdata([(255, 0, 0, 0), (0, 0, 0, 128)])
    expected = [[255, 255, 255], [127, 127, 127]]
    assert decoded(encoded(half, "PNG"))[0].tolist() == expected
    assert decoded(encoded(half, "WEBP", lossless=True, exact=True))[0].tolist() == expected
    assert decoded(encoded(half, "TIFF"))[0].tolist() == expected
    assert decoded(encoded(half, "JPEG2000"))[0].tolist() == expected
    for form, options in (("ICO", {"sizes": [(16, 16)]}), ("AVIF", {"quality": 100, "subsampling": "4:4:4"})):
        clear = encoded(Image.new("RGBA", (16, 16), (255, 0, 0, 0)), form, **options)
        assert np.unique(decoded(clear)).tolist() == [255]
    grey = encoded(half.convert("LA"), "PNG")
    assert decoded(grey, "gray")[0].tolist() == [[255], [127]]
    assert decoded(grey, "gray16")[0].tolist() == [[65535], [127 * 257]]


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_palettes_and_their_transparent_entry_are_resolved(form: str) -> None:
    """Palette numbers are no colours."""
    image = Image.new("P", (3, 1))
    image.putpalette([0, 0, 255, 255, 0, 0, 0, 255, 0])
    image.putdata([0, 1, 2])
    assert decoded(encoded(image, form))[0].tolist() == [[0, 0, 255], [255, 0, 0], [0, 255, 0]]
    see_through = decoded(encoded(image, form, transparency=1))
    assert see_through[0].tolist() == [[0, 0, 255], [255, 255, 255], [0, 255, 0]]
    assert decoded(encoded(image, form), "gray")[0].tolist() == [[29], [76], [150]]


def test_a_transparent_colour_without_alpha_is_laid_on_white() -> None:
    """PNG's tRNS chunk makes one colour of an rgb image transparent."""
    image = Image.new("RGB", (2, 1), (9, 9, 9))
    image.putpixel((1, 0), (1, 2, 3))
    assert decoded(encoded(image, "PNG", transparency=(9, 9, 9)))[0].tolist() == [[255, 255, 255], [1, 2, 3]]


@pytest.mark.parametrize("form", ["PNG", "TIFF", "BMP"])
def test_one_bit_is_black_and_white(form: str) -> None:
    """Scans are often one bit; 1 means white, not 1 of 255."""
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert decoded(encoded(image, form), "gray")[0].tolist() == [[0], [255]]
    assert decoded(encoded(image, form))[0].tolist() == [[0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk_becomes_the_colours_it_prints(form: str) -> None:
    """Adobe stores CMYK JPEGs inverted; read naively they come out as negatives."""
    options = {"quality": 100} if form == "JPEG" else {}
    for ink, colour in (((255, 0, 0, 0), (0, 255, 255)), ((0, 255, 255, 0), (255, 0, 0)), ((0, 0, 0, 255), (0, 0, 0))):
        found = decoded(encoded(Image.new("CMYK", (8, 8), ink), form, **options))
        assert np.abs(found[4, 4].astype(int) - colour).max() <= 2


@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG2000"])
def test_sixteen_bit_grey_is_scaled_not_clipped(form: str) -> None:
    """Pillow's own conversion clips at 255, which turns X-rays white."""
    deep = np.array([[0, 128, 129, 257, 4000, 32768, 65535]], dtype=np.uint16)
    data = encoded(Image.fromarray(deep), form)
    expected = np.rint(deep / 257).astype(int)
    assert decoded(data, "gray")[..., 0].tolist() == expected.tolist()
    assert decoded(data)[..., 2].tolist() == expected.tolist()
    kept = decoded(data, "gray16")
    assert kept.dtype == np.uint16
    assert kept[..., 0].tolist() == deep.tolist()


def test_big_endian_sixteen_bit_tiff_is_read_right() -> None:
    """Microscopes write both byte orders."""
    deep = np.array([[0, 256, 65535]], dtype=np.uint16)
    image = Image.frombytes("I;16B", (3, 1), deep.astype(">u2").tobytes())
    assert decoded(encoded(image, "TIFF"), "gray16")[..., 0].tolist() == deep.tolist()


def test_sixteen_bit_colour_is_read_as_eight() -> None:
    """Deep colour is rare enough to lose the low byte, never enough to come out wrong."""
    deep = np.array([[[0, 65535, 32768], [257, 4000, 60000]]], dtype=np.uint16)
    assert np.abs(decoded(png16(deep, 2)).astype(float) - deep / 257).max() <= 1
    alpha = np.concatenate([deep, np.full((1, 2, 1), 65535, np.uint16)], -1)
    assert np.abs(decoded(png16(alpha, 6)).astype(float) - deep / 257).max() <= 1


def test_eight_bits_spread_over_sixteen() -> None:
    """A folder of mixed depth has one white."""
    assert decoded(encoded(Image.new("L", (1, 1), 255), "PNG"), "gray16").item() == 65535


@pytest.mark.parametrize("value", [np.float32(0.5), np.int32(70000), np.int32(-1)])
def test_pixels_without_an_eight_bit_meaning_are_refused(value: Any) -> None:
    """Guessing the scale of scientific data would be wrong in silence."""
    data = encoded(Image.fromarray(np.full((2, 2), value)), "TIFF")
    with pytest.raises(SampleError, match=r"^a/b.img: has .* expected 8 or 16 bits: .*dataset source"):
        decoded(data)


def test_resizing_takes_height_then_width_or_the_shorter_side() -> None:
    """Width first is Pillow's order and everyone's first bug."""
    data = encoded(Image.fromarray(gradient(40, 60)), "PNG")
    assert decoded(data, resize=(10, 20)).shape == (10, 20, 3)
    assert decoded(data, resize=10).shape == (10, 15, 3)
    assert decoded(encoded(Image.fromarray(gradient(60, 40)), "PNG"), resize=10).shape == (15, 10, 3)
    assert decoded(data, resize=80).shape == (80, 120, 3)
    assert decoded(data, resize=20, crop=(16, 12)).shape == (16, 12, 3)
    for options in ({"resize": 10}, {"resize": 20, "crop": (16, 12)}, {"crop": 8}, {"resize": (10, 20)}):
        assert Decoder(PixelsConfig(**options)).measure(data, "") == decoded(data, **options).shape


def test_a_crop_is_cut_from_the_centre() -> None:
    """The crop is the one of torchvision's CenterCrop."""
    pixels = gradient(7, 10)
    assert decoded(encoded(Image.fromarray(pixels), "PNG"), crop=(3, 4)).tolist() == pixels[2:5, 3:7].tolist()
    with pytest.raises(SampleError, match=r"is 7 x 10 \(height x width\), too small to crop to 8 x 8; set resize"):
        decoded(encoded(Image.fromarray(pixels), "PNG"), crop=8)


@pytest.mark.parametrize("mode", ["rgb", "gray", "gray16"])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_shrinking_averages(mode: Literal["rgb", "gray", "gray16"], form: str) -> None:
    """JPEGs are shrunk while decoding; that must look like shrinking, in every mode."""
    rows, columns = np.mgrid[0:512, 0:512]
    stripes = ((rows + columns) % 2 * 255).astype(np.uint8)
    shade = (columns // 2).astype(np.uint8)
    for pixels, expected in ((stripes, np.full((32, 32), 127.5)), (shade, np.arange(32)[None] * 8 + 3.75)):
        found = decoded(encoded(Image.fromarray(pixels), form, quality=100), mode, resize=(32, 32))[..., 0]
        scale = 257 if mode == "gray16" else 1
        assert np.abs(found / scale - expected)[2:-2, 2:-2].max() < 4


def test_deep_images_keep_their_depth_when_resized() -> None:
    """Resizing in 8 bits would leave 256 levels."""
    ramp = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (16, 1))
    found = decoded(encoded(Image.fromarray(ramp), "PNG"), "gray16", resize=(4, 64))
    assert len(np.unique(found)) == 64
    assert np.abs(found[0, :, 0].astype(float) - ramp[0].reshape(64, 4).mean(1)).max() < 200


def test_images_too_large_are_refused_before_they_are_decoded() -> None:
    """A bomb of a few kilobytes must not take the worker's memory."""
    small = encoded(Image.new("L", (8, 8)), "PNG")
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + small[24:29]
    with pytest.raises(SampleError, match="900000000 pixels; at most"):
        decoded(small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:])
    with pytest.raises(SampleError, match="8 x 8 pixels; at most 63 are decoded"):
        decoded(encoded(Image.new("L", (8, 8)), "PNG"), max_pixels=63)


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000)])
def test_a_picture_of_one_row_is_refused_before_it_is_resized(size: tuple[int, int]) -> None:
    """A PNG of 92 bytes had the shorter side made 256 pixels, and took a gigabyte of a worker's memory."""
    data = encoded(Image.new("RGB", size), "PNG")
    large = " x ".join(str(256 * side) for side in size)
    reason = f"{size[0]} x {size[1]} pixels would be resized to {large}; at most 89478485 are made"
    with pytest.raises(SampleError, match=reason):
        decoded(data, resize=256, crop=224)
    with pytest.raises(SampleError, match=reason):
        Decoder(PixelsConfig(resize=256)).measure(data, "a/b.img")
    with pytest.raises(SampleError, match="resized to 65536 x 65536"):
        decoded(data, resize=(65_536, 65_536))
    with pytest.raises(SampleError, match="resized to 8 x 8; at most 63"):
        decoded(encoded(Image.new("RGB", (4, 4)), "PNG"), resize=8, max_pixels=63)


def test_a_long_panorama_is_resized() -> None:
    """A strip of forty to one is a picture, not an attack."""
    assert decoded(encoded(Image.new("RGB", (8000, 200)), "PNG"), resize=256, crop=224).shape == (224, 224, 3)


@pytest.mark.parametrize("form", [*FORMATS, "ICO"])
def test_a_file_cut_anywhere_names_the_sample_or_is_whole(form: str) -> None:
    """Half-copied files are the commonest damage: never another exception, never half-grey pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(pixels), form)
    whole = decoded(data)
    for cut in range(0, len(data) - 1, max(1, len(data) // 25)):
        try:
            found = decoded(data[:cut])
        except SampleError as error:
            assert str(error).startswith("a/b.img: ")  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert np.array_equal(found, whole)


def test_flipped_bytes_never_raise_anything_else() -> None:
    """Decoders of damaged files raise nearly anything; a worker knows only SampleError."""
    rng = np.random.default_rng(1)
    for form in (*FORMATS, "ICO"):
        data = encoded(Image.fromarray(gradient()), form)
        for _ in range(40):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), 3):
                broken[at] = int(rng.integers(0, 256))
            try:
                assert decoded(bytes(broken)).shape[2] == 3
            except SampleError as error:
                assert str(error).startswith("a/b.img: ")  # noqa: PT017


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a readable image: the file is empty"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "not a readable image: its 47 bytes begin with b'%!PS-Adobe-3",
        ),
        (b"<svg></svg>", "not a readable image: its 11 bytes begin"),
    ],
)
def test_other_formats_are_not_tried(data: bytes, reason: str) -> None:
    """A PostScript file named .jpg must not start Ghostscript."""
    with pytest.raises(SampleError) as caught:
        decoded(data)
    assert reason in str(caught.value)


def test_a_colour_profile_changes_nothing() -> None:
    """Profiles are not applied, and do no harm."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    pixels = gradient()
    assert np.array_equal(decoded(encoded(Image.fromarray(pixels), "PNG", icc_profile=profile)), pixels)


def test_ycbcr_and_lab_are_converted() -> None:
    """Printing departments save TIFFs in them."""
    image = Image.new("RGB", (4, 4), (200, 30, 60))
    found = decoded(encoded(image.convert("YCbCr"), "TIFF"))
    assert np.abs(found[0, 0].astype(int) - [200, 30, 60]).max() <= 3
    white = decoded(encoded(Image.new("LAB", (4, 4), (255, 128, 128)), "TIFF"))
    assert white.min() >= 250


# --- random crops and flips -------------------------------------------------------------------------------------------


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
        found = pixels_of(data, Decoder(PixelsConfig(random_crop=(32, 48))), offset)
        assert found.shape == (32, 48, 3)
        assert found.flags.writeable
        assert found.flags.c_contiguous
        assert np.abs(found - expected).max() <= 6


def test_about_half_of_the_images_are_mirrored_and_always_the_same_half() -> None:
    """A retried shard must give the same bytes."""
    data = jpeg(smooth(30, 40))
    plain = pixels_of(data, Decoder(PixelsConfig()))
    decoder = Decoder(PixelsConfig(flip=True))
    flipped = [bool((pixels_of(data, decoder, offset) == plain[:, ::-1]).all()) for offset in range(200)]
    again = [bool((pixels_of(data, decoder, offset) != plain).any()) for offset in range(200)]
    assert flipped == again
    assert 70 < sum(flipped) < 130


def test_grey_is_decoded_as_grey() -> None:
    """A JPEG holds brightness on its own: converting colours to it afterwards costs time and gives the same."""
    data = jpeg(smooth(60, 80))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("L"))[..., None].astype(int)
    assert np.abs(pixels_of(data, Decoder(PixelsConfig(mode="gray"))) - expected).max() <= 2


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
