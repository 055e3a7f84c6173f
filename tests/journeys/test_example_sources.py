"""Data in other files: the examples over a dataset's index, each with real workers."""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.front.test_cli_sources import PATHS, run
from tests.producer.reading import read_epoch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "sources"
IMAGES = np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8)


def write_parquet(folder: Path) -> None:
    """Write forty rows in row groups of seven."""
    import pyarrow
    import pyarrow.parquet

    names = [f"n{n}" for n in range(40)]
    table = pyarrow.table({"x": IMAGES.reshape(40, 64).tolist(), "y": list(range(40)), "name": names})
    pyarrow.parquet.write_table(table, folder / "train.parquet", row_group_size=7)


def write_csv(folder: Path) -> None:
    """Write a head and forty rows."""
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a"] * 65, *([*row, n] for n, row in enumerate(IMAGES.reshape(40, 64).tolist()))])


def write_hf(folder: Path) -> None:
    """Write in a separate process, because the package starts threads and keeps files open."""
    script = (
        "import sys, numpy as np, datasets\n"
        "images = np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8)\n"
        "rows = {'image': images.tolist(), 'label': list(range(40)), 'text': [f'n{n}' for n in range(40)]}\n"
        "datasets.Dataset.from_dict(rows).save_to_disk('train')\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True)


def write_tfrecord(folder: Path) -> None:
    """Write in this process, which has usually imported TensorFlow before: that takes 6 s of CPU."""
    import tensorflow as tf

    example = tf.train
    with tf.io.TFRecordWriter(str(folder / "train.tfrecord")) as file:
        for n, image in enumerate(IMAGES):
            feature = {
                "image": example.Feature(bytes_list=example.BytesList(value=[image.tobytes()])),
                "label": example.Feature(int64_list=example.Int64List(value=[n])),
            }
            file.write(example.Example(features=example.Features(feature=feature)).SerializeToString())


@pytest.mark.slow
def test_a_damaged_tfrecord_file_gives_no_wrong_sample(any_url: str, tmp_path: Path) -> None:
    """One flipped bit of a pixel, and files that are cut off or compressed, must be named."""
    write_tfrecord(tmp_path)
    path = tmp_path / "train.tfrecord"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(IMAGES[3].tobytes()) + 5] ^= 1
    command = ["produce", "dataset", "tfrecord_rows:train", "--transform", "tfrecord_rows:to_sample", "--workers", "1"]
    places = {"PYTHONPATH": ":".join([str(EXAMPLES), *PATHS]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    for content, message in (
        (bytes(flipped), "40 samples, 1 of them bad"),
        (whole[:-3], "train.tfrecord is cut off or damaged, in record 39 or before it"),
        (gzip.compress(whole), "train.tfrecord is compressed (gzip), so it has no records by number"),
    ):
        path.write_bytes(content)
        code, out, err = run(*command, "--url", any_url, cwd=tmp_path, **places)
        assert (code == 0) == (content == flipped), err
        assert message in out + err
        if content == flipped:
            assert "bad sample: tfrecord_rows:train[3]: the dataset failed: DataLossError: corrupted record" in err
            assert {int(sample["y"]) for sample in read_epoch(any_url).values()} == set(range(40)) - {3}


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_parquet, ["parquet_rows:train"]),
        (write_csv, ["csv_rows:train"]),
        (write_hf, ["hf_rows:train", "--transform", "hf_rows:to_sample"]),
        pytest.param(
            write_tfrecord, ["tfrecord_rows:train", "--transform", "tfrecord_rows:to_sample"], marks=pytest.mark.slow
        ),
    ],
    ids=["parquet", "csv", "hugging face", "tfrecord"],
)
def test_an_example_makes_every_row_a_sample(
    any_url: str, tmp_path: Path, write: Callable[[Path], None], words: list[str]
) -> None:
    """A user with such files copies the example, so it must give each row, complete and once."""
    write(tmp_path)
    command = ["produce", "dataset", *words, "--workers", "1", "--url", any_url]
    path = ":".join([str(EXAMPLES), *PATHS])
    code, out, err = run(*command, cwd=tmp_path, PYTHONPATH=path, TF_CPP_MIN_LOG_LEVEL="3")
    assert code == 0, err
    assert "40 samples, 0 bad" in out
    samples = list(read_epoch(any_url).values())
    assert [int(sample["y"]) for sample in samples] != list(range(40))
    made = {int(sample["y"]): np.asarray(sample["x"]).reshape(8, 8) for sample in samples}
    assert all(np.array_equal(made[n], IMAGES[n]) for n in range(40))
