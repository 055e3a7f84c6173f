"""The bytes of an image file as an array of pixels: orientation, palette, alpha, CMYK, 16 bit, resizing, cropping.

The only user of Pillow here. Which file and which label is not known.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SampleError
from penstock_common.extras import needed
from penstock_producer.sources.config import PixelsConfig, Size

with needed("PIL", "reading images"):
    from PIL import Image, UnidentifiedImageError
    from PIL.IcoImagePlugin import IcoFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")
"""The only decoders that are tried: a PostScript file named .jpg must not start Ghostscript.

Icons are taken apart here.
"""

_ICON = b"\0\0\1\0"
"""How an .ico begins."""

_GAP = 2.0
"""JPEGs are decoded to at least twice the wanted size before the last resize; Pillow's own choice for thumbnails."""

_DRAFTED = ("JPEG", "MPO")
"""Formats that can decode to a smaller size; MPO is what many phones write as .jpg."""

_ORIENTATION = 0x0112
"""EXIF tag; its values 5 to 8 lie on their side."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


PROBES = 64
"""Samples looked at, spread over the source, to learn which sizes all have in common."""


def probed(length: int) -> list[int]:
    """The indices of those samples."""
    return [int(index) for index in np.linspace(0, length - 1, min(PROBES, length), dtype=int)]


@dataclass(frozen=True)
class Decoder:
    """How files become pixels.

    Transparent pixels are laid on white, as a page would show them: dropping alpha would uncover whatever colour lies
    beneath, and black would swallow dark drawings. 16-bit grey is scaled (65535 -> 255), never clipped. Colour deeper
    than 8 bits is read as 8. The first frame of an animation or page of a TIFF counts. Colour profiles are not applied.
    """

    mode: Literal["rgb", "gray", "gray16", "encoded"] = "rgb"
    resize: Size | None = None
    crop: Size | None = None
    max_pixels: int = 89_478_485
    random_crop: Size | None = None
    flip: bool = False

    @classmethod
    def of(cls, config: PixelsConfig) -> Self:
        """As a source's config asks for."""
        return cls(config.mode, config.resize, config.crop, config.max_pixels, config.random_crop, config.flip)

    @property
    def is_random(self) -> bool:
        """Whether `decode` needs a generator."""
        return bool(self.random_crop) or self.flip

    @property
    def dtype(self) -> str:
        """Of what `decode` gives."""
        return {"gray16": "uint16", "encoded": "bytes"}.get(self.mode, "uint8")

    @property
    def channels(self) -> int:
        """Of the pixels."""
        return 3 if self.mode == "rgb" else 1

    @property
    def shape(self) -> tuple[int, ...] | None:
        """[H, W, C] where resizing or cropping fixes it for all images, else None; () for encoded ones."""
        if self.mode == "encoded":
            return ()
        fixed = _pair(self.random_crop) or _pair(self.crop) or (self.resize if isinstance(self.resize, tuple) else None)
        return (*fixed, self.channels) if fixed else None

    def decode(self, data: bytes, key: str, rng: np.random.Generator | None = None) -> NDArray[Any] | bytes:
        """Pixels [H, W, C], writable and contiguous, or the bytes as they are, of an image at least by its header.

        ``rng`` is needed for random crops and flips. Raises SampleError naming ``key`` and the reason.
        """
        try:
            with _opened(data) as image:
                self._bound(image, key)
                return data if self.mode == "encoded" else self._pixels(image, key, rng)
        except SampleError:
            raise
        except UnidentifiedImageError:
            raise SampleError(f"{key}: not a readable image: {_opening(data)}") from None
        except Image.DecompressionBombError as error:
            found = re.search(r"\d+ pixels", str(error))  # Pillow's own word comes before ours, of far larger ones
            raise SampleError(
                f"{key}: {found[0] if found else 'too many pixels'}; at most {self.max_pixels} are decoded"
            ) from error
        except Exception as error:  # decoders of damaged files raise nearly anything
            raise SampleError(f"{key}: cannot be decoded: {type(error).__name__}: {error}") from error

    def measure(self, data: bytes, key: str) -> tuple[int, int, int]:
        """[H, W, C] of what `decode` would give, from the header alone."""
        try:
            with _opened(data) as image:
                self._bound(image, key)
                width, height = _upright_size(image)
        except Exception as error:
            raise SampleError(f"{key}: cannot be decoded: {type(error).__name__}: {error}") from error
        if self.resize:
            height, width = self._target(height, width)
        return (*(_pair(self.random_crop) or _pair(self.crop) or (height, width)), self.channels)

    def _pixels(self, image: Image.Image, key: str, rng: np.random.Generator | None) -> NDArray[Any]:
        if image.format not in _DRAFTED:
            image.load()  # before asking for the orientation: PNG may hold it behind the pixels
        width, height = _upright_size(image)
        target, box = self._target(height, width), (0.0, 0.0, float(width), float(height))
        if self.random_crop:
            assert rng is not None, "random crops need a generator"
            box = random_box(height, width, rng)
        self._draft(image, target, box, width, height)
        image.load()
        upright = _upright(image)
        plain = _deep(upright, key) if self.mode == "gray16" else _shallow(upright, self.mode, key)
        plain = self._cropped(_resized(plain, target, box, width, height), key)
        return self._array(plain, is_flipped=self.flip and rng is not None and rng.random() < 0.5)

    def _bound(self, image: Image.Image, key: str) -> None:
        if image.width * image.height > self.max_pixels:
            raise SampleError(f"{key}: {image.width} x {image.height} pixels; at most {self.max_pixels} are decoded")

    def _target(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing; the longer side is rounded down, as torchvision does."""
        if self.random_crop:
            return _pair(self.random_crop) or (height, width)
        if not isinstance(self.resize, int):
            return self.resize or (height, width)
        if height < width:
            return self.resize, max(1, self.resize * width // height)
        return max(1, self.resize * height // width), self.resize

    def _draft(self, image: Image.Image, target: tuple[int, int], box: Box, width: int, height: int) -> None:
        """Let the JPEG decoder skip the detail that resizing would throw away, and the colour that grey would.

        Other formats take no notice.
        """
        if image.format not in _DRAFTED:
            return
        # the whole image's size at which the box has the target's
        wanted = [_GAP * width * target[1] / (box[2] - box[0]), _GAP * height * target[0] / (box[3] - box[1])]
        if _orientation(image) >= 5:
            wanted.reverse()
        image.draft("L" if self.mode == "gray" else None, (int(wanted[0]), int(wanted[1])))

    def _cropped(self, image: Image.Image, key: str) -> Image.Image:
        crop = _pair(self.crop)
        if crop is None or crop == (image.height, image.width):
            return image
        if crop[0] > image.height or crop[1] > image.width:
            found = f"{image.height} x {image.width} (height x width)"
            raise SampleError(f"{key}: is {found}, too small to crop to {crop[0]} x {crop[1]}; set resize as well")
        top, left = (image.height - crop[0]) // 2, (image.width - crop[1]) // 2
        return image.crop((left, top, left + crop[1], top + crop[0]))

    def _array(self, image: Image.Image, *, is_flipped: bool) -> NDArray[Any]:
        pixels = np.asarray(image)
        pixels = np.array(pixels[:, ::-1] if is_flipped else pixels, order="C")  # writable: transforms work in place
        if self.mode == "gray16":
            pixels = pixels.clip(0, 0xFFFF).astype(np.uint16)
        return pixels.reshape(image.height, image.width, self.channels)


def _opened(data: bytes) -> Image.Image:
    """Open an image file, of which only the header is read.

    An icon is its largest picture. Pillow would decode it before its size is known: the icon's directory may lie.
    """
    if data.startswith(_ICON):
        icon = IcoFile(io.BytesIO(data))
        return icon.getimage(max(icon.sizes(), key=math.prod))
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _pair(size: Size | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _resized(image: Image.Image, target: tuple[int, int], box: Box, width: int, height: int) -> Image.Image:
    """The box, given in pixels of an image of this width and height, whatever the image was drafted to."""
    if box == (0, 0, width, height):
        if target == (image.height, image.width):
            return image
        return image.resize(target[::-1], Image.Resampling.BILINEAR, reducing_gap=_GAP)
    across, down = image.width / width, image.height / height
    right, bottom = min(box[2] * across, image.width), min(box[3] * down, image.height)
    part = (box[0] * across, box[1] * down, right, bottom)
    return image.resize(target[::-1], Image.Resampling.BILINEAR, part, _GAP)


def _orientation(image: Image.Image) -> int:
    """1..8; unreadable EXIF counts as upright, as in every viewer."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return found if isinstance(found, int) else 1


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as shown. Pillow's TIFF reader turns the image and its size by itself."""
    turned = image.format != "TIFF" and _orientation(image) >= 5
    return (image.height, image.width) if turned else image.size


def _upright(image: Image.Image) -> Image.Image:
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _shallow(image: Image.Image, mode: str, key: str) -> Image.Image:
    """8-bit grey or rgb."""
    if image.mode == "F" or image.mode.startswith("I"):
        # round to nearest: 257 = 65535 / 255
        image = Image.fromarray(((_grey16(image, key).astype(np.uint32) + 128) // 257).astype(np.uint8))
    elif image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    elif image.mode == "P":
        image = image.convert("RGB")
    wanted = "RGB" if mode == "rgb" else "L"
    return image if image.mode == wanted else image.convert(wanted)


def _deep(image: Image.Image, key: str) -> Image.Image:
    """16-bit grey in 32-bit integers, which Pillow can resize; 8-bit images are spread over the range."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey16(image, key).astype(np.int32))
    return Image.fromarray(np.asarray(_shallow(image, "gray", key)).astype(np.int32) * 257)


def _grey16(image: Image.Image, key: str) -> NDArray[np.uint16]:
    pixels = np.asarray(image)
    if image.mode == "F" or (pixels.size and not 0 <= int(pixels.min()) <= int(pixels.max()) <= 0xFFFF):
        found = "float pixels" if image.mode == "F" else f"pixels from {pixels.min()} to {pixels.max()}"
        raise SampleError(f"{key}: has {found}; expected 8 or 16 bits: read such files through a dataset source")
    return pixels.astype(np.uint16)


def _opening(data: bytes) -> str:
    if not data:
        return "the file is empty"
    return f"its {len(data)} bytes begin with {data[:12]!r}"


AREA = (0.08, 1.0)
"""Part of the image's area; torchvision's defaults, which are those of Inception's training."""
ASPECT = (3 / 4, 4 / 3)
"""Width by height, evenly over its logarithm."""
_TRIES = 10

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


def random_box(height: int, width: int, rng: np.random.Generator) -> Box:
    """A box that lies in the image; after ten that do not fit, the largest central one of an allowed aspect."""
    low, high = (math.log(side) for side in ASPECT)
    for _ in range(_TRIES):
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * rng.random())
        aspect = math.exp(low + (high - low) * rng.random())
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    return _central(height, width)


def _central(height: int, width: int) -> Box:
    w, h = width, height
    if width < height * ASPECT[0]:
        h = max(1, round(width / ASPECT[0]))
    elif width > height * ASPECT[1]:
        w = max(1, round(height * ASPECT[1]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
