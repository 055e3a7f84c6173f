"""The page of `penstock monitor --web` shows what the monitor knows, to who has its token."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.__main__ import main
from tests.front.gateway.clients import PATHS


@contextmanager
def monitor_of(url: str, **environment: str) -> Iterator[str]:
    """Yield the address of a page, with its token, and end the monitor."""
    command = [sys.executable, "-m", "penstock", "monitor", "--web", "--every", "0.2", "--url", url]
    env = {**os.environ, "PYTHONPATH": PATHS, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].split(";")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def asked(address: str, path: str, *, method: str = "GET", token: str | None = None) -> tuple[int, bytes]:
    """Return the status and the content of an answer."""
    page, _, known = address.partition("#")
    headers = {"Authorization": f"Bearer {known if token is None else token}"}
    request = urllib.request.Request(page + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def told(address: str, path: str) -> Any:
    """Return the JSON of an answer."""
    status, content = asked(address, path)
    assert status == 200, content
    return json.loads(content)


def test_the_page_shows_the_record_of_the_monitor_and_the_newest_samples(any_url: str) -> None:
    """A page and a terminal never tell two stories, and a picture has the sample's own pixels."""
    pixels = np.random.default_rng(1).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    with (
        penstock.Writer("train", url=any_url, info={"classes": {"y": ["cat", "dog"]}}) as writer,
        writer.epoch() as out,
    ):
        for number, image in enumerate(pixels):
            out.write({"x": image, "y": np.int64(number % 2)})
    with monitor_of(any_url) as address:
        status, page = asked(address, "", token="")
        assert (status, b"Penstock monitor" in page) == (200, True)
        while not (found := told(address, "v1/streams"))["streams"]:
            pass
        (record,) = found["streams"]
        assert (record["stream"], record["bottleneck"]["cause"]) == ("train", "no trainers")
        samples = told(address, "v1/streams/train/samples")["samples"]
        assert [one["captions"][:2] for one in samples[:2]] == [["0/0/4", "y=cat"], ["0/0/3", "y=dog"]]
        for one, image in zip(samples, pixels[::-1], strict=True):
            rgb = np.frombuffer(base64.b64decode(one["rgb"]), np.uint8).reshape(one["height"], one["width"], 3)
            assert (rgb == image).all()


def test_a_sample_of_postscript_starts_no_program(any_url: str, tmp_path: Path) -> None:
    """Pillow gives PostScript to Ghostscript, and who writes to a stream must run nothing where it is shown."""
    started, ghostscript = tmp_path / "started", tmp_path / "gs"
    ghostscript.write_text(f'#!/bin/sh\necho "$@" >> {started}\n')
    ghostscript.chmod(0o700)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"
    icon = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(icon, "ICO")
    with penstock.Writer("train", url=any_url) as writer, writer.epoch() as out:
        for image in (postscript, icon.getvalue()):
            out.write({"x": image})
    with monitor_of(any_url, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}") as address:
        while not told(address, "v1/streams")["streams"]:
            pass
        shown, hidden = told(address, "v1/streams/train/samples")["samples"]
    assert (shown["width"], base64.b64decode(shown["rgb"])[:3]) == (16, b"\xff\0\0")
    assert hidden["words"][0].startswith("%!PS-Adobe")
    assert not started.exists()


def test_the_page_shows_nothing_without_its_token_and_changes_nothing(any_url: str) -> None:
    """Any page and any user of this host may ask. Only requests with the token are answered, and none may write."""
    with penstock.Writer("train", url=any_url) as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros(4)})
    with monitor_of(any_url) as address:
        for path in ("v1/streams", "v1/streams/train/samples"):
            for token in ("", "wrong", "ü"):
                status, content = asked(address, path, token=token.encode().decode("latin-1"))
                assert (status, json.loads(content)["code"]) == (401, "bad_token")
            assert asked(address, path, method="POST")[0] == 405
            assert asked(address, path, method="DELETE")[0] == 405
        assert asked(address, "v1/streams/other/samples")[0] == 404


def test_a_wrong_stream_is_an_error_of_the_command(any_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A page without a stream would say less than a line in the terminal."""
    assert main(["monitor", "nosuch", "--web", "--url", any_url]) == 1
    assert "nosuch" in capsys.readouterr().err
    assert main(["monitor", "--web", "--once", "--url", any_url]) == 2
