"""Rows of .npy and .npz files: mapped, side by side, one file after the other."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.cli import Parser
from penstock.cli.sources import add_sources, source_of
from penstock_common.errors import SourceError
from penstock_producer.jobs.allowlist import options_for
from penstock_producer.sources import allowed
from penstock_producer.sources.allowed import NotAllowed
from penstock_producer.sources.config import ArraysConfig
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import Source
from tests.contracts.source import SourceContract, read

X = np.arange(7 * 6, dtype=np.float32).reshape(7, 2, 3)
Y = np.arange(7) % 3


class TestFiles(SourceContract):
    """Several .npy files, one of them in Fortran order, and a tensor of one file keep every promise of a source."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> ArraysConfig:
        """Return what a job would carry."""
        np.save(tmp_path / "x0.npy", X[:3])
        np.save(tmp_path / "x1.npy", np.asfortranarray(X[3:]))
        np.save(tmp_path / "y.npy", Y.astype(">i4"))
        return ArraysConfig(columns={"x": (f"{tmp_path}/x0.npy", f"{tmp_path}/x1.npy"), "y": (f"{tmp_path}/y.npy",)})

    @pytest.fixture
    def source(self, config: ArraysConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source

    def test_rows_follow_each_other(self, source: Source) -> None:
        """The seventh row is in the second file."""
        assert [read(source, n)["x"].tolist() for n in range(7)] == X.tolist()
        assert [int(read(source, n)["y"]) for n in range(7)] == Y.tolist()
        assert source.spec == {"x": ("float32", (2, 3)), "y": ("int32", ())}
        assert source.key(4) == "x0.npy[4]"


class TestArchives(SourceContract):
    """A stored and a compressed .npz keep every promise of a source."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> ArraysConfig:
        """Return what a job would carry."""
        np.savez(tmp_path / "a.npz", x=X[:4], name=np.array(["a", "bb", "", "grün"]))
        np.savez_compressed(tmp_path / "b.npz", x=X[4:], name=np.array(["long one", "c", "d"]))
        return ArraysConfig(archives=(f"{tmp_path}/a.npz", f"{tmp_path}/b.npz"))

    @pytest.fixture
    def source(self, config: ArraysConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source

    def test_arrays_keep_their_names(self, source: Source) -> None:
        """Texts travel as bytes."""
        assert [read(source, n)["x"].tolist() for n in range(7)] == X.tolist()
        names = [read(source, n)["name"].decode() for n in range(7)]
        assert names == ["a", "bb", "", "grün", "long one", "c", "d"]


def opened(config: ArraysConfig) -> Any:
    """The source."""
    source = open_source(config)
    assert source.unit == "sample"
    return source


def test_only_the_rows_that_are_made_are_read(tmp_path: Path) -> None:
    """Arrays are often larger than memory: a sparse file of a terabyte must open at once."""
    huge = np.lib.format.open_memmap(tmp_path / "huge.npy", mode="w+", dtype=np.uint8, shape=(1 << 30, 1 << 10))
    huge[123_456_789, 5] = 7
    huge.flush()
    source = opened(ArraysConfig(columns={"x": (f"{tmp_path}/huge.npy",)}))
    assert len(source) == 1 << 30
    assert read(source, 123_456_789)["x"][5] == 7


def test_values_are_known_without_making_samples(tmp_path: Path) -> None:
    """Balancing classes must not read the pictures."""
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    source = opened(ArraysConfig(archives=(f"{tmp_path}/a.npz",)))
    assert source.column("y").tolist() == Y.tolist()
    assert source.column("z") is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x": X, "y": Y[:3]}, r"different lengths: {'x': 7, 'y': 3}"),
        ({"x": X[:0]}, "is empty"),
        ({"x": np.array(3)}, r"'x' has no rows: its shape is \(\)"),
        (
            {"x": np.array([{}], object)},
            r"not a readable .npy: it holds .* save texts as array\.astype\('S'\), .* each value of dicts as an array",
        ),
        ({"x": np.array(["2024-01-01"], "M8[D]")}, r"of dtype datetime64\[D\]; expected numbers or strings"),
        (
            {"x": np.ones(2, ml_dtypes.bfloat16)},
            r"\|V2; expected .* Save its bits as x\.view\('uint16'\), or give np\.load",
        ),
        ({"x": b"no array"}, "not a readable .npy"),
        ({"x": None}, "No such file or directory; give .npy or .npz files"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    """When they are opened, in one line; pickles are never loaded."""
    for name, content in files.items():
        path = tmp_path / f"{name}.npy"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            np.save(path, content, allow_pickle=True)
    columns: dict[str, tuple[str, ...]] = {name: (f"{tmp_path}/{name}.npy",) for name in files}
    with pytest.raises(SourceError, match=message) as caught:
        opened(ArraysConfig(columns=columns))
    assert "\n" not in str(caught.value)


def arrays_of(*words: str) -> Any:
    """The source of a command's files."""
    parser = Parser()
    add_sources(parser, Parser, production=False)
    return opened(source_of(parser.parse_args(["arrays", *words])))  # type: ignore[arg-type]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_archive_are_taken_by_name(tmp_path: Path, save: Any) -> None:
    """Training and test rows of MNIST lie in one file."""
    path = tmp_path / "mnist.npz"
    save(path, x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2], mean=np.float32(0.5))
    for words, rows in (
        ((f"x={path}:x_train", f"y={path}:y_train"), 7),
        ((f"x={path}:x_test", f"y={path}:y_test"), 2),
    ):
        source = arrays_of(*words)
        assert len(source) == rows
        assert [read(source, n)["x"].tolist() for n in range(rows)] == X[:rows].tolist()
        assert [int(read(source, n)["y"]) for n in range(rows)] == Y[:rows].tolist()
    assert arrays_of(f"x={path}:x_train").fingerprint != arrays_of(f"x={path}:y_train").fingerprint
    both = arrays_of(f"x={path}:x_train", f"x={path}:x_test")
    assert read(both, 8)["x"].tolist() == X[1].tolist()
    assert set(arrays_of(f"{path}:x_train", f"{path}:y_train").spec) == {"x_train", "y_train"}


def test_errors_of_archives_name_the_way_to_take_an_array(tmp_path: Path) -> None:
    """The advice of one error must not lead to the next one."""
    path, mean = tmp_path / "mnist.npz", tmp_path / "mean.npz"
    np.savez(path, x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2])
    np.savez(mean, x=X, mean=np.float32(0.5))
    advice = rf"take some of them by name, as in x_train={path}:x_train y_train={path}:y_train$"
    with pytest.raises(SourceError, match=advice):
        arrays_of(str(path))
    with pytest.raises(SourceError, match=f"without a tensor's name, or take one by name, as in x={path}:x_train$"):
        arrays_of(f"x={path}")
    with pytest.raises(SourceError, match=r"'mean' has no rows: .*; take the others by name, as in x=FILE\.npz:ARRAY$"):
        arrays_of(str(mean))
    with pytest.raises(
        SourceError, match=r"^\S+mnist\.npz holds no array 'x_tain'; it holds x_train, .*; did you mean 'x_train'"
    ):
        arrays_of(f"x={path}:x_tain")
    with pytest.raises(SourceError, match=r"none\.npz:x: No such file"):
        arrays_of(f"x={tmp_path}/none.npz:x")


def test_names_of_arrays_may_have_slashes_and_colons(tmp_path: Path) -> None:
    """They are those of a model's parameters. The folder of the file is what a worker needs."""
    path = tmp_path / "params.npz"
    named: Any = {"dense/w": X, "a:b": Y}
    np.savez(path, **named)
    words = (f"x={path}:dense/w", f"y={path}:a:b")
    assert [int(read(arrays_of(*words), n)["y"]) for n in range(7)] == Y.tolist()
    parser = Parser()
    add_sources(parser, Parser, production=False)
    config: Any = source_of(parser.parse_args(["arrays", *words]))
    assert options_for(config) == ["--root", str(tmp_path)]


def test_the_name_of_an_array_hides_no_link_out_of_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with --root reads an archive by name only where it may read it whole."""
    (tmp_path / "root").mkdir()
    np.savez(tmp_path / "secret.npz", x=X)
    link = tmp_path / "root" / "link.npz"
    link.symlink_to(tmp_path / "secret.npz")
    monkeypatch.setattr(allowed, "_roots", (str(tmp_path / "root"),))
    with pytest.raises(NotAllowed, match=r"secret\.npz\) is outside the folders"):
        arrays_of(f"x={link}:x")


def claiming(rows: int, body: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An .npz whose header names this number of rows."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (rows,)})
        member.write(body)
    return out.getvalue()


WHOLE = claiming(10_000, bytes(10_000))
CENTRAL = WHOLE.rindex(b"PK\x01\x02")
STORED = claiming(3, b"abc", zipfile.ZIP_STORED)
PLACE = STORED.rindex(b"PK\x01\x02") + 42
"""The place of the offset of the member's header."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (claiming(10**15, b"abc"), "Unable to allocate"),
        (WHOLE[:60] + b"\xff" * 20 + WHOLE[80:], "Error -3 while decompressing data"),
        (WHOLE[: CENTRAL + 10] + b"\x63\0" + WHOLE[CENTRAL + 12 :], "compression method is not supported"),
        (WHOLE[: CENTRAL + 8] + b"\x01" + WHOLE[CENTRAL + 9 :], "encrypted"),
        (STORED[:PLACE] + b"\xff\xff\0\0" + STORED[PLACE + 4 :], "unpack requires"),
    ],
    ids=["more rows than memory", "damaged", "unknown compression", "encrypted", "a header beyond the end"],
)
def test_an_archive_that_is_no_whole_one_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    """The errors of zipfile and zlib name no file, and ended the command with a traceback."""
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=f"a.npz is not a readable .npz: .*{message}"):
        opened(ArraysConfig(archives=(str(path),)))


def test_files_of_one_tensor_must_agree(tmp_path: Path) -> None:
    """Else the spec would break at the first row of the second file, in the middle of an epoch."""
    np.save(tmp_path / "a.npy", X)
    np.save(tmp_path / "b.npy", X.astype(np.float64))
    with pytest.raises(SourceError, match=r"b\.npy: 'x' has rows float64\[2, 3\], .*a\.npy has float32\[2, 3\]"):
        opened(ArraysConfig(columns={"x": (f"{tmp_path}/a.npy", f"{tmp_path}/b.npy")}))
