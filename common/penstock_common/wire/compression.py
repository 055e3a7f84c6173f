"""Compression of payload fields: the codecs, which tensors have which, and the bounds of decompression.

docs/wire-format.md defines the frames. A frame's own claim is compared with the size that the header's shapes give
before memory is taken, so a decompression bomb costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock_common.errors import BadEntry, BadSpec
from penstock_common.extras import needed
from penstock_common.wire.spec import Spec

ZSTD, BLOSC2 = "zstd", "blosc2"
ZSTD_LEVEL = 1
BLOSC2_LEVEL = 1
_USER = "a stream with compression={!r}"


class Codec(NamedTuple):
    """One way to compress a payload field."""

    load: Callable[[], Any]
    """Imports the package. Raises MissingExtra."""
    pack: Callable[[memoryview, int], bytes]
    """(bytes, item size) -> frame."""
    unpack: Callable[[Any, int], Any]
    """(frame, its size once unpacked) -> bytes. Raises ValueError for a frame of another size or form."""


def _zstandard() -> Any:
    with needed("zstandard", _USER.format(ZSTD)):
        import zstandard
    return zstandard


def _blosc2() -> Any:
    with needed("blosc2", _USER.format(BLOSC2)):
        import blosc2  # type: ignore[import-untyped,unused-ignore]
    return blosc2


_ZSTD_LEAST_WINDOW = 1024


def _pack_zstd(data: memoryview, itemsize: int) -> bytes:
    return bytes(_zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compress(data))


def _unpack_zstd(frame: Any, size: int) -> Any:
    zstandard = _zstandard()
    try:
        head = zstandard.get_frame_parameters(frame)
        if head.content_size != size or head.dict_id or head.window_size > max(size, _ZSTD_LEAST_WINDOW):
            raise ValueError(f"the zstd frame claims {head.content_size} bytes, a window of {head.window_size}")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


_BLOSC_HEAD = 32
_BLOSC_FORMAT_ZSTD = 4
_BLOSC_CODE_ZSTD = 5
_BLOSC_SHUFFLE = 1
_BLOSC_ZEROS = 0x10


def _pack_blosc2(data: memoryview, itemsize: int) -> bytes:
    blosc2 = _blosc2()
    return bytes(
        blosc2.compress2(
            data, typesize=itemsize, clevel=BLOSC2_LEVEL, codec=blosc2.Codec.ZSTD, nthreads=1,
            filters=[blosc2.Filter.SHUFFLE], filters_meta=[0],
        )
    )  # fmt: skip


def _unpack_blosc2(frame: Any, size: int) -> Any:
    data = memoryview(frame)
    if len(data) < _BLOSC_HEAD:
        raise ValueError("the Blosc2 chunk is cut off")
    head = bytes(data[:_BLOSC_HEAD])
    claimed, block, length = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8, 12))
    # only what writers write: other chunks may name plugins, dictionaries or files, which the library would load
    is_known = (
        head[0] == 5  # version of the chunk's format
        and head[2] & 0x05 == 0x05  # the long head, which has filters
        and head[2] >> 5 == _BLOSC_FORMAT_ZSTD
        and all(each in (0, _BLOSC_SHUFFLE) for each in head[16:22])
        and head[22] in (0, _BLOSC_CODE_ZSTD)
        and not any(head[23:31])
        and head[31] in (0, _BLOSC_ZEROS)
    )
    if not is_known:
        raise ValueError("the Blosc2 chunk is not in the form of docs/wire-format.md")
    if claimed != size or length != len(data) or not 0 < block <= max(size, 1) or not head[3]:
        raise ValueError(f"the Blosc2 chunk claims {claimed} bytes, compressed to {length}")
    unpacked = bytearray(size)
    try:
        _blosc2().decompress2(data, unpacked, nthreads=1)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"Blosc2 fails: {error}") from None
    return unpacked


CODECS: Mapping[str, Codec] = {
    ZSTD: Codec(_zstandard, _pack_zstd, _unpack_zstd),
    BLOSC2: Codec(_blosc2, _pack_blosc2, _unpack_blosc2),
}


def pack(codec: str, data: memoryview, itemsize: int) -> bytes | None:
    """Return a field compressed, or None where that does not make it smaller. Raises MissingExtra."""
    frame = CODECS[codec].pack(data, itemsize) if len(data) else b""
    return frame if len(frame) < len(data) else None


def unpack(codec: str, tensor: str, frame: Any, size: int) -> Any:
    """Return a tensor's bytes. The header's shapes announce ``size`` bytes. Raises BadEntry, MissingExtra."""
    if not len(frame) < size:
        raise BadEntry(f"tensor {tensor!r} is compressed to {len(frame)} bytes, its shapes say {size}")
    try:
        data = CODECS[codec].unpack(frame, size)
    except ValueError as error:
        raise BadEntry(f"tensor {tensor!r}: {error!s:.200}; its shapes say {size} bytes") from None
    if len(data) != size:
        raise BadEntry(f"tensor {tensor!r} has {len(data)} bytes, expected {size}")
    return data


@dataclass(frozen=True, slots=True)
class Compression:
    """The codecs of a stream's tensors. A false one compresses nothing."""

    every: str = ""
    """The codec of all tensors, or ''."""
    each: tuple[tuple[str, str], ...] = ()
    """(tensor, codec), where only some have one."""

    @classmethod
    def parse(cls, value: str | Mapping[str, str]) -> Compression:
        """Make a compression of ``zstd``, ``{"x": "zstd"}``, the text form ``x=zstd,y=blosc2``, or ``none``.

        Raises BadSpec.
        """
        if isinstance(value, str):
            if value in ("", "none", *CODECS):
                return cls("" if value == "none" else value)
            pairs = [part.rpartition("=")[::2] for part in value.split(",")]
        elif isinstance(value, Mapping):
            pairs = list(value.items())
        else:
            pairs = []
        is_good = bool(pairs) and all(type(name) is str and name and codec in CODECS for name, codec in pairs)
        if not is_good or len(dict(pairs)) != len(pairs):
            raise BadSpec(
                f"compression is {value!r:.80}, expected one of {', '.join(CODECS)} or none for all tensors, or a "
                "codec for some: {'x': 'zstd'}, as an option x=zstd,y=blosc2"
            )
        return cls("", tuple(pairs))

    def __str__(self) -> str:
        return self.every or ",".join(f"{name}={codec}" for name, codec in self.each) or "none"

    def __bool__(self) -> bool:
        return bool(self.every or self.each)

    def codec_of(self, tensor: str) -> str:
        """Return the codec of a tensor, or ''."""
        return self.every or dict(self.each).get(tensor, "")

    def require(self, spec: Spec | None) -> None:
        """Raise BadSpec for a tensor that a known spec lacks, and MissingExtra for a package that is not installed."""
        for name, _ in self.each:
            if spec is not None and name not in spec.names:
                raise BadSpec(f"compression names the tensor {name!r}; the spec has {', '.join(spec.names)}")
        for codec in {self.every, *dict(self.each).values()} - {""}:
            CODECS[codec].load()


UNCOMPRESSED = Compression()
