"""`penstock produce` with every kind of source and choice of samples, through real workers."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.cli import Parser, WrongUsage
from penstock.cli.sources import add_sources, plans_of, source_of
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.streams import load_stream
from penstock_producer.sources.config import parse_config
from tests.front.test_cli_produce import ended, start
from tests.producer.reading import read_epoch


def run(*arguments: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr. Importing torch and TensorFlow takes time."""
    return ended(start(*arguments, cwd=cwd, **environment), 120)


def numbers(url: str, stream: str = "train", epoch: int = 0) -> list[int]:
    """Return the values of `x` in an epoch, in its order."""
    return [int(np.ravel(sample["x"])[0]) for _, sample in sorted(read_epoch(url, stream, epoch).items())]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write sixty numbers, a quarter of them of class 1, in files of every kind, into the current folder of
    commands.
    """
    x, y = np.arange(60), np.arange(60) % 4 == 0
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y.astype(np.int64))
    np.savez(tmp_path / "more.npz", x=x + 100, y=y.astype(np.int64))
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for number in x.tolist():
            for kind, content in (("id", str(number)), ("cls", str(int(y[number])))):
                info = tarfile.TarInfo(f"{number:03}.{kind}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))
    (tmp_path / "mydata.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(60), torch.arange(60) % 4)\n"
        "def loader(): return DataLoader(data, batch_size=7, num_workers=2)\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        ["arrays", "x.npy", "y.npy", "--transform", "builtins:dict"],
        ["arrays", "x=[x].npy", "y=y.npy"],
        ["tar", "shard.tar", "--field", "x=id", "--field", "y=cls"],
        ["torch", "mydata:data"],
        ["torch", "mydata:loader"],
    ],
    ids=["arrays", "columns", "tar", "torch dataset", "torch loader"],
)
def test_every_kind_of_source_becomes_an_epoch(any_url: str, data: Path, source: list[str]) -> None:
    """A user types this command for existing data."""
    code, out, err = run("produce", *source, "--workers", "1", "--url", any_url, cwd=data, PENSTOCK_CACHE=str(data))
    assert code == 0, err
    assert "60 samples, 0 bad" in out
    assert sorted(numbers(any_url)) == list(range(60))


def test_a_split_fills_two_streams_that_share_no_sample(any_url: str, data: Path) -> None:
    """One command makes training and validation streams, and a repair of one part puts the same samples back."""
    split = ["arrays", "x.npy", "y.npy", "--split", "train:0.8,val:0.2"]
    code, out, err = run("produce", *split, "--stream", "digits", "--epochs", "2", "--url", any_url, cwd=data)
    assert code == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "produced 2 epochs of 'digits.train'",
        "produced 2 epochs of 'digits.val'",
    ]
    train, val = (set(numbers(any_url, f"digits.{part}", 1)) for part in ("train", "val"))
    assert not train & val
    assert train | val == set(range(60))
    assert 4 <= len(val) <= 20
    before = read_epoch(any_url, "digits.val", 0)
    with redis.Redis.from_url(any_url) as client:
        entries = load_stream(client, "digits.val").partitions[0].entries(0)
        client.xdel(entries, *[entry for entry, _ in client.xrange(entries, count=1)])
        assert not audit_stream(client, "digits.val").is_clean
    code, _, err = run("audit", "digits.val", "--url", any_url, "--repair", *split, cwd=data)
    assert code == 2
    assert "--split gives 2 sources; say which one is meant: --only train" in err
    code, _, err = run("audit", "digits.val", "--url", any_url, "--repair", *split, "--only", "val", cwd=data)
    assert code == 0, err
    after = {place: int(sample["x"]) for place, sample in read_repaired(any_url).items()}
    assert after == {place: int(sample["x"]) for place, sample in before.items()}


def read_repaired(url: str) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """Return (shard, offset) -> sample, as a replay reads the epoch: repaired entries in their places."""
    import penstock

    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    with penstock.Replay("digits.val", epoch=0, batch_size=1, url=url) as replay:
        rows = [{name: values[0] for name, values in batch.items()} for batch in replay]
    places = read_places(url)
    assert len(rows) == len(places)
    found.update(zip(places, rows, strict=True))
    return found


def read_places(url: str) -> list[tuple[int, int]]:
    """Return (shard, offset) in canonical order."""
    with redis.Redis.from_url(url) as client:
        sizes = load_manifest(client, load_stream(client, "digits.val"), 0).sizes
    assert sizes is not None
    return [(shard, offset) for shard, size in enumerate(sizes) for offset in range(size)]


def test_classes_and_sources_are_chosen_by_weight(any_url: str, data: Path) -> None:
    """Three of one source to one of another, whose classes are balanced, counted in what trainers get."""
    command = [
        "produce", "mix", "--part", "3", "arrays x.npy y.npy", "--part", "1", "arrays more.npz --balance",
        "--samples", "80", "--workers", "2", "--url", any_url,
    ]  # fmt: skip
    code, out, err = run(*command, "--epochs", "2", cwd=data)
    assert code == 0, err
    assert "160 samples" in out
    for epoch in (0, 1):
        samples = read_epoch(any_url, epoch=epoch).values()
        assert Counter(int(s["x"]) >= 100 for s in samples) == {False: 60, True: 20}
        assert Counter(int(s["y"]) for s in samples if int(s["x"]) >= 100) == {0: 10, 1: 10}


TINY = '''
import numpy as np

class Squares:
    """Numbers and their squares."""

    unit = "sample"
    repeatable = True
    spec = {"x": ("int64", ()), "y": ("int64", ())}

    def __init__(self, count, start=0):
        self.count, self.start = count, start
        self.fingerprint = f"{count:08x}{start:08x}"
        self.info = {"source": "squares"}

    def __len__(self):
        return self.count

    def key(self, index):
        return f"squares[{index}]"

    def read(self, index, rng):
        return {"x": np.int64(self.start + index), "y": np.int64((self.start + index) ** 2)}

    def close(self):
        pass
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install a distribution with a source, as pip would."""
    site = tmp_path / "site"
    info = site / "tiny_squares-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tiny_squares.py").write_text(TINY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-squares\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.sources]\nsquares = tiny_squares:Squares\n")
    return site


def test_a_source_that_another_package_brings_is_as_good_as_ours(any_url: str, tmp_path: Path, site: Path) -> None:
    """It is a small class and an entry point, and a worker elsewhere makes it only if it is installed there."""
    path = os.pathsep.join([str(site), *PATHS])
    queue = ["produce", "source", "squares", "--option", "count=20", "--option", "start=5", "--url", any_url]
    code, _, err = run(*queue, "--no-workers", cwd=tmp_path, PYTHONPATH=path)
    assert code == 0, err
    without = start("worker", "--processes", "1", "--allow", "tiny_squares", "--url", any_url, cwd=tmp_path)
    assert without.stderr is not None
    said = next(line for line in without.stderr if "squares" in line)
    without.terminate()
    assert ended(without)[0] == 0
    assert "no source 'squares' is installed here; installed here: none" in said
    assert "; it is tried again" in said
    with redis.Redis.from_url(any_url) as client:
        client.flushall()
    code, _, err = run(*queue, "--workers", "1", "--balance", cwd=tmp_path, PYTHONPATH=path)
    assert code == 1
    assert "the classes of tensor 'y' are not known" in err
    code, _, err = run(*queue, "--workers", "2", cwd=tmp_path, PYTHONPATH=path)
    assert code == 0, err
    assert sorted(numbers(any_url)) == list(range(5, 25))
    for wrong, message in (
        (["square"], "no source 'square' is installed here; did you mean 'squares'?"),
        (["squares"], "source 'squares' cannot be opened: TypeError: "),
        (
            ["squares", "--option", "count=-1", "--balance"],
            "len() of source 'squares' failed: ValueError: __len__() should return >= 0",
        ),
    ):
        code, _, err = run("produce", "source", *wrong, "--url", any_url, cwd=tmp_path, PYTHONPATH=path)
        assert code == 1
        assert message in err
        assert "Traceback" not in err


def test_a_worker_imports_only_what_it_was_told_to(any_url: str, tmp_path: Path) -> None:
    """A client that can write to the queue must not be able to call any function of any module."""
    (tmp_path / "good.py").write_text("data = list(range(8))\ndef same(n): return n\n")
    (tmp_path / "evil.py").write_text("open('imported', 'w').close()\ndef same(n): return n\n")
    for transform in ("good:same", "evil:same"):
        job = ["produce", "dataset", "good:data", "--transform", transform, "--no-workers", "--stream", transform[:4]]
        code, _, err = run(*job, "--shard-samples", "8", "--url", any_url, cwd=tmp_path)
        assert code == 0, err
    (tmp_path / "imported").unlink()  # the process that asked for it may import anything
    worker = start("worker", "--processes", "1", "--allow", "good", "--url", any_url, cwd=tmp_path)
    assert worker.stderr is not None
    said = next(line for line in worker.stderr if "evil" in line)
    assert "evil:same is not allowed in this worker, which was started with --allow good: start it with " in said
    worker.terminate()
    assert ended(worker)[0] == 0
    assert done(any_url, "good")
    assert not (tmp_path / "imported").exists()


def done(url: str, stream: str) -> bool:
    """Return whether its epoch 0 is produced."""
    with redis.Redis.from_url(url) as client:
        return load_manifest(client, load_stream(client, stream), 0).state == "produced"


PATHS = [str(Path(__file__).parents[2] / folder) for folder in ("common", "producer", "consumer", "front", ".")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("arrays x.npy --only val", "--only val names a part of --split, which is not given"),
        ("arrays x.npy --samples 3", "--samples says how many a choice takes"),
        (
            "arrays x.npy --split a:0.5,b:0.6",
            "split: a:0.5,b:0.6 add up to 1.1, and fractions add up to at most 1: lower one, as in train:0.9,val:0.1\n",
        ),
        (
            "arrays x.npy --split a:0.5,a:0.5",
            "split: a:0.5,a:0.5 name a part more than once: give each a name of its own\n",
        ),
        ("arrays x.npy --split a:0.5,b:0.5 --only c", "split: no part 'c'; there are a, b\n"),
        ("tar shards --field jpg", "--field 'jpg': write NAME=VALUE"),
        ("mix --part heavy 'arrays x.npy'", "--part 'heavy': write a weight above 0 and then a source"),
        ("mix --part 0 'arrays x.npy'", "--part '0': write a weight above 0 and then a source"),
        ("mix --part nan 'arrays x.npy'", "--part 'nan': write a weight above 0 and then a source"),
        ("mix --part 1 'arrays x.npy --split a:1' --split b:1", "a part of a split is not split again"),
    ],
)
def test_a_choice_that_makes_no_sense_is_one_line(words: str, message: str) -> None:
    """It is refused before anything is opened."""
    with pytest.raises(WrongUsage) as caught:
        source_of(parsed(words))
    assert message in f"{caught.value}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "mix",
            "required: --part: type `penstock produce mix --part WEIGHT SOURCE`; see penstock produce mix --help\n",
        ),
        ("mix --part 1 'images a --foo'", "--part WEIGHT images: unknown argument '--foo'"),
        ("mix --part 1 'images a --foo'", "; see penstock produce images --help\n"),
    ],
)
def test_a_wrong_part_names_commands_that_exist(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line that a user of a mixture pastes was a Python tuple, and the help was that of no command."""
    with pytest.raises(SystemExit):
        source_of(parsed(words))
    assert message in capsys.readouterr().err


def parsed(words: str) -> argparse.Namespace:
    """Return the options of `penstock produce`."""
    parser = Parser(prog="penstock produce")
    add_sources(parser, Parser)
    return parser.parse_args(shlex.split(words))


def test_a_choice_within_a_choice_is_split_first() -> None:
    """Classes are balanced among a part's own samples, and an epoch has the part's share of the samples."""
    plans = plans_of(parsed("mix --part 2 'images a --balance' --part 1 'images b' --samples 100 --split t:0.8,v:0.2"))
    sources: list[Any] = [plan.source for plan in plans.values()]
    assert [plan.stream for plan in plans.values()] == ["train.t", "train.v"]
    assert [source.samples for source in sources] == [80, 20]
    first, second = sources[1].parts
    assert (first.source.kind, first.source.source.kind, first.source.source.part) == ("balanced", "split", "v")
    assert (second.source.kind, second.weight) == ("split", 1.0)
    assert parse_config(json.loads(sources[1].model_dump_json())) == sources[1]
