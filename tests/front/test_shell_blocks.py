"""The shell blocks of the pages: each is pasted into a shell as it stands, in a folder with a reader's files.

Blocks of pages that have a test of their own run there.
"""

from __future__ import annotations

import grp
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock_common.stream.servers.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^ *```(?:sh|bash|console).*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "acl": "tests/journeys/test_acl_page.py",
    "coming-from-dataloader": "tests/front/test_coming_from_pages.py",
    "coming-from-ray-data": "tests/front/test_coming_from_pages.py",
    "coming-from-tensorcom": "tests/integrations.py",
    "coming-from-tf-data": "tests/front/test_coming_from_pages.py",
    "coming-from-tf-data-service": "tests/front/test_coming_from_pages.py",
    "coming-from-webdataset": "tests/front/test_coming_from_pages.py",
    "commands": "tests/front/test_every_command.py",
    "decode-once": "tests/journeys/test_decode_once_page.py",
    "fleet": "tests/front/test_fleet_page.py",
    "javascript": "tests/front/test_node_pages.py",
    "kubernetes": "tests/journeys/test_kubernetes_page.py",
    "model-in-a-browser": "tests/integrations.py",
    "moving": "tests/front/test_moving_page.py",
    "moving-shapes": "tests/front/test_moving_page.py",
    "pytorch": "tests/front/test_snippets.py",
    "pytorch-trainers": "tests/integrations.py",
    "recipes": "tests/front/test_recipes_page.py",
    "redis-in-production": "tests/journeys/test_redis_in_production_page.py",
    "redis-keys": "tests/journeys/test_redis_cli.py",
    "slurm": "tests/journeys/test_slurm_page.py",
    "sweep": "tests/integrations.py",
    "transforms": "tests/producer/test_transforms_page.py",
    "tutorial": "tests/front/test_tutorial_page.py",
    "watch-folder": "tests/front/test_fleet_page.py",
}
"""The test that runs the blocks of a page."""
HERE = (
    "choosing-samples",
    "export",
    "faq",
    "gateway",
    "gateway-messages",
    "housekeeping",
    "howto",
    "looking",
    "managed-services",
    "metrics",
    "monitoring",
    "own-source",
    "python-sources",
    "security",
    "segments",
    "sources",
)
NOT_RUN = {
    "compose": "it needs Docker. `tests/journeys/test_compose.py` runs the services of the file as processes",
    "compression": "it installs packages",
    "performance": "it needs minutes. `tests/front/test_cli_bench.py` runs the command with `--seconds 2`",
    "shuffling": "it needs a minute, and `tests/test_house.py` imports the module",
}
STAYS = ("gateway t", "gateway --tokens", "exporter", "monitor", "worker")
"""Commands that stay in the foreground until Ctrl-C."""
READY = r"Ctrl-C|^train: |worker"
"""The pattern of the text that such a command prints once it is at work."""
MINE = """
import io
import itertools
from pathlib import Path

import numpy as np
import torch


class Boxes(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        target = {"boxes": torch.zeros(number % 3, 4), "labels": torch.ones(number % 3, dtype=torch.int64)}
        return torch.zeros(3, 8, 8 + number), target


class Flat(Boxes):
    def __getitem__(self, number):
        return torch.full((3, 8, 8), number, dtype=torch.uint8), number % 2


dataset = Boxes() if Path("boxes").exists() else Flat()
"""
CAMERA = """
import numpy as np


def frames():
    for number in range(40):
        yield {"x": np.full((8, 8), number, np.uint8)}
"""
AUGMENT = """
def flip(sample, rng):
    return sample
"""


def write_files(folder: Path) -> None:
    """Write what the blocks name: pictures, tars, arrays, labels and modules."""
    rng = np.random.default_rng(0)
    rows = []
    for kind in ("shards", "drawings"):
        (folder / kind).mkdir()
        with tarfile.open(folder / kind / "train-0000.tar", "w") as tar:
            for number in range(16):
                name = f"{('cat', 'dog')[number % 2]}/{number:03}.jpg"
                path = folder / "photos" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).save(path)
                rows += [{"file": name, "label": number % 2}] if kind == "shards" else []
                for field, content in (("jpg", path.read_bytes()), ("cls", str(number % 2).encode())):
                    member = tarfile.TarInfo(f"{number:04}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    (folder / "labels.json").write_text(json.dumps(rows))
    for number in range(2):
        np.save(folder / f"images-{number}.npy", rng.integers(0, 256, (5, 8, 8), np.uint8))
    np.save(folder / "labels.npy", np.arange(10))
    np.savez(folder / "data.npz", x=np.zeros((10, 4), np.float32), y=np.arange(10))
    for name, code in (("mydata", MINE), ("camera", CAMERA), ("augment", AUGMENT)):
        (folder / f"{name}.py").write_text(code)
    [code] = re.findall(r"^```python\n(.*?)^```", (DOCS / "own-source.md").read_text(), re.MULTILINE | re.DOTALL)
    package = folder / "site" / "waves-1.dist-info"
    package.mkdir(parents=True)
    (folder / "site" / "waves.py").write_text(code)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: waves\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[penstock.sources]\nwaves = waves:Waves\n")


def write_streams(url: str) -> None:
    """Write the streams that the pages read."""
    for stream in ("train", "digits"):
        tuning = penstock.Tuning(notify=lambda _: None)
        with penstock.Writer(stream, url=url, tuning=tuning) as writer, writer.epoch() as epoch:
            for number in range(40):
                epoch.write({"x": np.full((8, 8), number, np.uint8), "y": number % 10})


class Shell:
    """A reader's shell, in a folder with what the pages name."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self.url = url
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        paths = [str(ROOT / part) for part in ("common", "producer", "consumer", "front")]
        binaries = folder / "bin"
        binaries.mkdir(exist_ok=True)
        (binaries / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
        (binaries / "penstock").chmod(0o755)
        self._env |= {
            "HOME": str(folder),
            "PATH": os.pathsep.join([str(binaries), os.environ["PATH"], str(Path(sys.executable).parent)]),
            "PENSTOCK_URL": url,
            "PYTHONPATH": os.pathsep.join([*paths, str(folder / "site"), "."]),
        }

    def set(self, **variables: str) -> None:
        """Set variables that the page tells the reader to set."""
        self._env |= variables

    def _start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-ec", text], cwd=self._folder, env=self._env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def paste(self, text: str) -> str:
        """Run the commands to their end, and return what they print."""
        with self._start(text) as process:
            said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, f"{text}\n{said}"
        return said

    @contextmanager
    def staying(self, text: str, ready: str = READY) -> Iterator[str]:
        """Run commands that end with one that stays. Yield its first words, and press Ctrl-C after them."""
        with self._start(text) as process:
            assert process.stdout is not None
            heard = ""
            for line in process.stdout:
                heard += line
                if re.search(ready, line):
                    break
            else:
                process.wait()
                raise AssertionError(f"{text}\n{heard}")
            try:
                yield heard
            finally:
                os.killpg(process.pid, signal.SIGINT)
                process.communicate(timeout=60)


def blocks(page: str) -> list[str]:
    """Return the shell blocks of a page."""
    return BLOCK.findall((DOCS / f"{page}.md").read_text())


@pytest.fixture
def shell(tmp_path: Path, fresh_server: Callable[..., EmbeddedServer]) -> Shell:
    """Return the reader's shell."""
    write_files(tmp_path)
    return Shell(tmp_path, fresh_server().url)


def test_every_page_with_commands_is_run() -> None:
    """A block that nothing runs is wrong one day, and a reader finds it first."""
    pages = {path.stem for path in DOCS.glob("*.md") if BLOCK.search(path.read_text())}
    assert pages | {"acl"} == {*ELSEWHERE, *HERE, *NOT_RUN}
    for page, test in ELSEWHERE.items():
        text = (ROOT / test).read_text()
        assert page in text or page.removeprefix("coming-from-") in text, f"{test} does not read {page}"


def adapted(text: str, folder: Path, url: str) -> str:
    """Put the test's folder, group, ports and server in place of the page's, and leave out what installs."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("pip install", "docker compose"))]
    text = re.sub(r"(?<![\w/])/(?:dev/shm|mnt/nvme|data)\b", lambda found: f"{folder}{found[0]}", "\n".join(lines))
    text = text.replace("chgrp trainers", f"chgrp {grp.getgrgid(os.getgid()).gr_name}")
    text = text.replace("rediss://user:password@host:6379", url)
    text = text.replace("--samples 10000", "--samples 40").replace(
        "--epochs 90", "--epochs 2"
    )  # for seconds, not hours
    return re.sub(
        r"(penstock (?:gateway (?!--make)|exporter).*?)(?: --port \d+)?$", r"\1 --port 0", text, flags=re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), [(page, number) for page in HERE for number in range(len(blocks(page)))])
def test_a_block_runs_as_it_stands(page: str, number: int, shell: Shell, tmp_path: Path) -> None:
    """A reader pastes first and reads later."""
    if page == "gateway-messages":
        pytest.skip("test_the_requests_of_the_gateway runs it beside a gateway")
    text = adapted(blocks(page)[number], tmp_path, shell.url)
    if "penstock produce" not in text:
        write_streams(shell.url)
    if "y/boxes" in text:
        (tmp_path / "boxes").touch()
    for folder in ("data", "dev/shm/penstock"):  # what the page has made before, or the host has
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    before: list[str] = []
    for line in textwrap.dedent(text).splitlines():
        if not re.search(f"penstock (?:{'|'.join(STAYS)})", line):
            before.append(line)
            continue
        with shell.staying("\n".join([*before, f"exec {line}"])):
            before = []
    shell.paste("\n".join(before))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed, and the page's requests use it")
def test_the_requests_of_the_gateway_are_answered(shell: Shell) -> None:
    """Programs in other languages begin with these lines."""
    write_streams(shell.url)
    become, *rest = blocks("gateway-messages")[0].splitlines()
    with shell.staying("exec penstock gateway train/resnet --port 0", "the token of") as said:
        [port], [token] = re.findall(r":(\d+)", said)[:1], re.findall(r"for this run: (\S+)", said)
        shell.set(TOKEN=token)
        member = json.loads(shell.paste(become.replace("8466", port)))
        shell.set(MEMBER=member["member"])
        for line in rest:
            shell.paste(line.replace("8466", port).replace("curl -s", "curl -s --fail-with-body"))
