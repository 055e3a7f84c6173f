"""Decoding: from the bytes of an image file to an array of pixels, resized and cropped.

No other file here uses Pillow. Files, paths and labels are not known here.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SampleError
from penstock_common.extras import needed
from penstock_producer.sources.config import PixelsConfig, Size

with needed("PIL", "reading images"):
    from PIL import Image, UnidentifiedImageError
    from PIL.IcoImagePlugin import IcoFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")
"""The formats that Pillow may try, because a PostScript file named .jpg must not start Ghostscript.

Icons are not among them: `opened` reads their pictures one at a time.
"""

_ICON = b"\0\0\1\0"
"""The first bytes of an .ico."""

_GAP = 2.0
"""A JPEG is decoded to at least this multiple of the wanted size, then resized, as Pillow does for thumbnails."""

_DRAFTED = ("JPEG", "MPO")
"""The formats that can decode to a smaller size. Many phones write MPO files named .jpg."""

_ORIENTATION = 0x0112
"""The EXIF tag of the orientation. Images with the values 5 to 8 are turned by a quarter."""
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
"""The samples that are measured to learn which sizes all have in common."""


def probed(length: int) -> list[int]:
    """Return the indices of the samples that are measured, spread over the source."""
    return [int(index) for index in np.linspace(0, length - 1, min(PROBES, length), dtype=int)]


@dataclass(frozen=True)
class Decoder:
    """The way from an image file to pixels, with the options that the config of a source holds.

    - Transparent pixels are laid on white. Without that, any colour could appear, and black would hide dark drawings.
    - 16-bit grey is scaled (65535 becomes 255) and never clipped. Colour of more than 8 bits is read as 8 bits.
    - An animation gives its first frame, and a TIFF its first page.
    - Colour profiles are not applied.
    """

    options: PixelsConfig

    @property
    def is_random(self) -> bool:
        """Tell whether `decode` needs a generator."""
        return bool(self.options.random_crop) or self.options.flip

    @property
    def dtype(self) -> str:
        """Return the dtype of `decode`'s result."""
        return {"gray16": "uint16", "encoded": "bytes"}.get(self.options.mode, "uint8")

    @property
    def channels(self) -> int:
        """Return the number of channels."""
        return 3 if self.options.mode == "rgb" else 1

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return [H, W, C] where resizing or cropping makes it the same for all images, else None.

        Encoded images have the shape ().
        """
        if self.options.mode == "encoded":
            return ()
        resize = self.options.resize if isinstance(self.options.resize, tuple) else None
        fixed = _pair(self.options.random_crop) or _pair(self.options.crop) or resize
        return (*fixed, self.channels) if fixed else None

    def decode(self, data: bytes, key: str, rng: np.random.Generator | None = None) -> NDArray[Any] | bytes:
        """Return the pixels [H, W, C], writable and contiguous, or in mode "encoded" the bytes.

        Args:
            data: the bytes of the file. In mode "encoded", too, they must begin as an image.
            key: the sample's name, for the error.
            rng: the sample's generator, which random crops and flips need.

        Raises:
            SampleError: the bytes are no image, are damaged, or hold too many pixels or pixels of an unknown meaning.
        """
        try:
            with opened(data) as image:
                self._bound(image, key)
                return data if self.options.mode == "encoded" else self._pixels(image, key, rng)
        except SampleError:
            raise
        except UnidentifiedImageError:
            raise SampleError(f"{key}: not a readable image: {_opening(data)}") from None
        except Image.DecompressionBombError as error:
            found = re.search(r"\d+ pixels", str(error))  # Pillow refuses far larger images before we do
            raise SampleError(
                f"{key}: {found[0] if found else 'too many pixels'}; at most {self.options.max_pixels} are decoded"
            ) from error
        except Exception as error:  # with damaged files, decoders raise errors of nearly any class
            raise SampleError(f"{key}: cannot be decoded: {type(error).__name__}: {error}") from error

    def measure(self, data: bytes, key: str) -> tuple[int, int, int]:
        """Return the shape [H, W, C] of `decode`'s result from the header alone. Raises the same SampleError."""
        try:
            with opened(data) as image:
                self._bound(image, key)
                width, height = _upright_size(image)
        except Exception as error:
            raise SampleError(f"{key}: cannot be decoded: {type(error).__name__}: {error}") from error
        if self.options.resize:
            height, width = self._target(height, width, key)
        return (*(_pair(self.options.random_crop) or _pair(self.options.crop) or (height, width)), self.channels)

    def _pixels(self, image: Image.Image, key: str, rng: np.random.Generator | None) -> NDArray[Any]:
        if image.format not in _DRAFTED:
            image.load()  # before the orientation is read, which a PNG may hold after the pixels
        width, height = _upright_size(image)
        target, box = self._target(height, width, key), (0.0, 0.0, float(width), float(height))
        if self.options.random_crop:
            assert rng is not None, "random crops need a generator"
            box = random_box(height, width, rng)
        self._draft(image, target, box, width, height)
        image.load()
        upright = _upright(image)
        plain = _deep(upright, key) if self.options.mode == "gray16" else _shallow(upright, self.options.mode, key)
        plain = self._cropped(_resized(plain, target, box, width, height), key)
        return self._array(plain, is_flipped=self.options.flip and rng is not None and rng.random() < 0.5)

    def _bound(self, image: Image.Image, key: str) -> None:
        if image.width * image.height > self.options.max_pixels:
            raise SampleError(
                f"{key}: {image.width} x {image.height} pixels; at most {self.options.max_pixels} are decoded"
            )

    def _target(self, height: int, width: int, key: str) -> tuple[int, int]:
        """Return height and width after resizing.

        Raises:
            SampleError: They are too many pixels. With ``resize=256``, a picture of 4000 x 1 would take a gigabyte.
        """
        target = self._wanted(height, width)
        if math.prod(target) > self.options.max_pixels:
            raise SampleError(
                f"{key}: {width} x {height} pixels would be resized to {target[1]} x {target[0]}; at most "
                f"{self.options.max_pixels} are made"
            )
        return target

    def _wanted(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after resizing. The longer side is rounded down, as torchvision does."""
        if self.options.random_crop:
            return _pair(self.options.random_crop) or (height, width)
        resize = self.options.resize
        if not isinstance(resize, int):
            return resize or (height, width)
        if height < width:
            return resize, max(1, resize * width // height)
        return max(1, resize * height // width), resize

    def _draft(self, image: Image.Image, target: tuple[int, int], box: Box, width: int, height: int) -> None:
        """Let the JPEG decoder leave out detail that resizing drops, and colour that grey drops.

        Other formats are decoded whole.
        """
        if image.format not in _DRAFTED:
            return
        # the size of the whole image at which the box has the size of the target
        wanted = [_GAP * width * target[1] / (box[2] - box[0]), _GAP * height * target[0] / (box[3] - box[1])]
        if _orientation(image) >= 5:
            wanted.reverse()
        image.draft("L" if self.options.mode == "gray" else None, (int(wanted[0]), int(wanted[1])))

    def _cropped(self, image: Image.Image, key: str) -> Image.Image:
        crop = _pair(self.options.crop)
        if crop is None or crop == (image.height, image.width):
            return image
        if crop[0] > image.height or crop[1] > image.width:
            found = f"{image.height} x {image.width} (height x width)"
            raise SampleError(f"{key}: is {found}, too small to crop to {crop[0]} x {crop[1]}; set resize as well")
        top, left = (image.height - crop[0]) // 2, (image.width - crop[1]) // 2
        return image.crop((left, top, left + crop[1], top + crop[0]))

    def _array(self, image: Image.Image, *, is_flipped: bool) -> NDArray[Any]:
        pixels = np.asarray(image)
        pixels = np.array(
            pixels[:, ::-1] if is_flipped else pixels, order="C"
        )  # writable, because transforms may change it in place
        if self.options.mode == "gray16":
            pixels = pixels.clip(0, 0xFFFF).astype(np.uint16)
        return pixels.reshape(image.height, image.width, self.channels)


def opened(data: bytes) -> Image.Image:
    """Open an image file of one of FORMATS, or an icon, and read its header only.

    An icon gives its largest picture. Pillow would decode all of it first, and the sizes in an icon's directory may be
    wrong.
    """
    if data.startswith(_ICON):
        icon = IcoFile(io.BytesIO(data))
        return icon.getimage(max(icon.sizes(), key=math.prod))
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _pair(size: Size | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _resized(image: Image.Image, target: tuple[int, int], box: Box, width: int, height: int) -> Image.Image:
    """Cut out the box and resize it to the target.

    The box is in pixels of the full width and height. The image itself may have been decoded to a smaller size.
    """
    if box == (0, 0, width, height):
        if target == (image.height, image.width):
            return image
        return image.resize(target[::-1], Image.Resampling.BILINEAR, reducing_gap=_GAP)
    across, down = image.width / width, image.height / height
    right, bottom = min(box[2] * across, image.width), min(box[3] * down, image.height)
    part = (box[0] * across, box[1] * down, right, bottom)
    return image.resize(target[::-1], Image.Resampling.BILINEAR, part, _GAP)


def _orientation(image: Image.Image) -> int:
    """Return the orientation from 1 to 8. An image with unreadable EXIF is upright, as in every viewer."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return found if isinstance(found, int) else 1


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height as a viewer shows them. Pillow's TIFF reader turns image and size itself."""
    turned = image.format != "TIFF" and _orientation(image) >= 5
    return (image.height, image.width) if turned else image.size


def _upright(image: Image.Image) -> Image.Image:
    turn = _UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _shallow(image: Image.Image, mode: str, key: str) -> Image.Image:
    """Return the image as 8-bit grey or rgb."""
    if image.mode == "F" or image.mode.startswith("I"):
        # rounds to the nearest, because 257 = 65535 / 255
        image = Image.fromarray(((_grey16(image, key).astype(np.uint32) + 128) // 257).astype(np.uint8))
    elif image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    elif image.mode == "P":
        image = image.convert("RGB")
    wanted = "RGB" if mode == "rgb" else "L"
    return image if image.mode == wanted else image.convert(wanted)


def _deep(image: Image.Image, key: str) -> Image.Image:
    """Return the image as 16-bit grey in 32-bit integers, which Pillow can resize.

    The values of 8-bit images are spread over the whole range.
    """
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
"""The smallest and largest part of the image's area, as in torchvision and in the training of Inception."""
ASPECT = (3 / 4, 4 / 3)
"""The smallest and largest ratio of width to height. Its logarithm is drawn evenly."""
_TRIES = 10

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


def random_box(height: int, width: int, rng: np.random.Generator) -> Box:
    """Draw a random box inside the image, for a random-resized crop.

    If ten boxes do not fit, the result is the largest box of an allowed ratio in the centre.
    """
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
