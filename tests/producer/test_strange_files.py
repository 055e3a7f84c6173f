"""A folder of strange files: each is read, named as bad, or passed over, and none of them stops the epoch."""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from PIL import Image

from penstock_common.errors import SampleError
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.files import shown
from penstock_producer.sources.image_files import ImageFolder
from tests.contracts.source import in_fork
from tests.producer.reading import read_epoch

GREY = np.full((20, 30), 128, np.uint8)
COLOUR = np.full((20, 30, 3), 128, np.uint8)


def bomb(side: int) -> bytes:
    """A PNG of side * side one-bit pixels in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((side // 8 + 1) * 64), 9)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def put_readable(at: Path) -> int:
    """Images of every odd kind that has pixels; returns how many."""
    pictures: dict[str, Callable[[Path], Any]] = {
        "plain.jpg": Image.fromarray(COLOUR).save,
        "cmyk.jpg": Image.fromarray(COLOUR).convert("CMYK").save,
        "deep.png": Image.fromarray(GREY.astype(np.uint16) * 257).save,
        "alpha.png": Image.fromarray(np.dstack([COLOUR, GREY])).save,
        "palette.gif": Image.fromarray(COLOUR).convert("P").save,
        "moves.gif": partial(Image.fromarray(GREY).save, save_all=True, append_images=[Image.new("L", (30, 20))]),
        "moves.webp": partial(Image.fromarray(COLOUR).save, save_all=True, append_images=[Image.new("RGB", (30, 20))]),
        "really a png.jpg": partial(Image.fromarray(COLOUR).save, format="PNG"),
        "one pixel.bmp": Image.fromarray(COLOUR[:1, :1]).save,
        "two\nlines \u00fc\u4e2d \U0001f40e.png": Image.fromarray(COLOUR).save,
        os.fsdecode(b"not \xff\xfe utf-8.png"): Image.fromarray(COLOUR).save,
    }
    for name, save in pictures.items():
        save(at / name)
    (at / "linked.jpg").symlink_to(at / "plain.jpg")
    inside = at / "folder.jpg"
    inside.mkdir()
    (inside / "inside.jpg").hardlink_to(at / "plain.jpg")
    return len(pictures) + 2


def put_unreadable(at: Path) -> dict[str, str]:
    """Files that are no images, though their names say so; returns name -> what must be said of them."""
    whole = (at / "plain.jpg").read_bytes()
    contents = {
        "empty.jpg": b"",
        "text.png": b"<html>404</html>",
        "truncated.jpg": whole[: len(whole) // 2],
        "zeros.tif": bytes(5000),
        "bomb.png": bomb(12_000),
        "vast.png": bomb(30_000),
        "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",
    }
    for name, data in contents.items():
        (at / name).write_bytes(data)
    (at / "nowhere.jpg").symlink_to(at / "is not there")
    (at / "itself.jpg").symlink_to(at / "itself.jpg")
    return {
        "empty.jpg": "the file is empty",
        "text.png": "begin with b'<html>404</h",
        "truncated.jpg": "cannot be decoded",
        "zeros.tif": "not a readable image",
        "bomb.png": "12000 x 12000 pixels; at most",
        "vast.png": "900000000 pixels; at most",
        "postscript.jpg": "not a readable image",
        "nowhere.jpg": "cannot be read: No such file",
        "itself.jpg": "cannot be read: Too many levels",
    }


def put_others(at: Path) -> None:
    """Add what must be ignored: no regular files, and files that neither are images nor claim to be."""
    os.mkfifo(at / "pipe.jpg")
    (at / "linked pipe.jpg").symlink_to(at / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(at / "socket.png"))
    (at / "device.jpg").symlink_to("/dev/zero")
    (at / ".hidden.jpg").write_bytes(b"no")
    (at / "notes.txt").write_text("no")
    (at / "again.jpg").symlink_to(at, target_is_directory=True)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_every_strange_file_is_read_or_named_or_passed_over(
    any_url: str, any_client: redis.Redis, tmp_path: Path
) -> None:
    """Data sets of the wild hold all of these: an epoch over them must end, and its books must balance."""
    at = tmp_path / "class"
    at.mkdir()
    good, bad = put_readable(at), put_unreadable(at)
    put_others(at)
    plan = ProductionPlan(stream="train", source=ImagesConfig(path=str(tmp_path), resize=(8, 8)), sample_limit_s=20)
    with Production(
        plan, WorkerOptions(url=any_url, queue_url=any_url), workers=2, notify=lambda _: None
    ) as production:
        list(production.run())
        summary = production.summary()
    (key,) = any_client.scan_iter("*:quarantine")
    held: Any = any_client.hvals(key)
    reasons = [json.loads(value)["why"] for value in held]
    for name, why in bad.items():
        assert [why in reason for reason in reasons if reason.startswith(f"class/{name}: ")] == [True], (name, reasons)
    assert (summary.samples - summary.bad, summary.bad) == (good, len(bad))
    samples = read_epoch(any_url)
    assert {sample["x"].shape for sample in samples.values()} == {(8, 8, 3)}
    assert len(samples) == good


@pytest.mark.parametrize("name", ["two\nlines.png", "red\x1b[31m.png", "under\u2028line.png"])
def test_names_are_shown_in_one_line(name: str) -> None:
    """Progress, logs and `penstock bad` are read line by line, in terminals that obey what they are sent."""
    assert shown(name).isprintable()
    assert shown(name) != name


def test_a_pipe_that_took_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    """Between planning and making lie hours."""
    (tmp_path / "a.jpg").write_bytes(b"was a file")
    folder = ImageFolder(str(tmp_path))
    (tmp_path / "a.jpg").unlink()
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(SampleError, match=r"a.jpg: is a pipe or a device now"):
        folder.read(0)


def test_a_file_nobody_may_read_is_named() -> None:
    """Root may read all: so it is another user who tries."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        secret = Path(path) / "secret.jpg"
        secret.write_bytes(b"x")
        secret.chmod(0)

        def as_nobody() -> str:
            if os.geteuid() == 0:
                os.setuid(65534)
            return str(ImageFolder(path).read(0))

        assert in_fork(as_nobody) == "SampleError: secret.jpg: cannot be read: Permission denied"
