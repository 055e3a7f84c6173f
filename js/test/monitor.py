"""A stream of small pictures, a group that reads it slowly, and the page of `penstock monitor --web`, for a browser."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time

import numpy as np

import penstock
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning

SIDE = 32
CLASSES = ["disc", "square", "<b>stripes</b>"]


def picture(number: int) -> np.ndarray:
    """Return a shape of the sample's class on a coloured ground."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    hue = np.array([(53 * number) % 200, (97 * number) % 200, 120], np.uint8)
    centre = SIDE // 2 + number % 5
    inside = [
        (x - centre) ** 2 + (y - centre) ** 2 < 90,
        (abs(x - centre) < 8) & (abs(y - centre) < 8),
        (x + number) % 8 < 4,
    ][number % 3]
    return np.where(inside[..., None], np.array([250, 240, 210], np.uint8), hue)


def write(url: str) -> None:
    """Write samples for ever, and say when the first ones are there."""
    spec = {"image": ("uint8", (SIDE, SIDE, 3)), "y": ("int64", ())}
    info = {"classes": {"y": CLASSES}}
    with penstock.Writer("shapes", spec=spec, info=info, url=url, tuning=Tuning(block_bytes=20_000)) as writer:
        for number in itertools.count():
            writer.write({"image": picture(number), "y": number % 3})
            time.sleep(0.01)


def read(url: str) -> None:
    """Read them as a member of a group."""
    tuning = Tuning(member="gpu-0", notify=lambda _: None)
    with penstock.Loader("shapes", group="resnet", batch_size=16, url=url, tuning=tuning) as loader:
        for _ in loader:
            time.sleep(0.2)


if __name__ == "__main__":
    with EmbeddedServer() as server:
        for work in (write, read):
            threading.Thread(target=work, args=(server.url,), daemon=True).start()
        time.sleep(0.5)
        words = ["monitor", "--web", "--json", "--every", "0.5", "--url", server.url]
        page = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)
        assert page.stdout is not None
        sys.stdout.write(json.dumps(json.loads("".join(itertools.islice(page.stdout, 3)))) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        page.terminate()
        page.wait()
