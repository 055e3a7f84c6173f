"""Tars in webdataset's layout: grouping, fields, damage, and the index that is remembered."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources import tar as tars
from penstock_producer.sources import tar_index
from penstock_producer.sources.config import TarConfig
from penstock_producer.sources.image_files import passed_over
from penstock_producer.sources.open import config_for_jobs, open_source
from penstock_producer.sources.protocol import Source
from penstock_producer.sources.seeding import sample_rng
from penstock_producer.sources.tar import matches
from penstock_producer.sources.tar_index import TarShard, scan, split_name
from tests.contracts.source import SourceContract, digest, in_fork, read


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(grey: int, height: int = 4, width: int = 6) -> bytes:
    """A picture of one colour."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (grey,) * 3).save(out, "PNG")
    return out.getvalue()


def npy(array: Any) -> bytes:
    """The bytes of an .npy file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def pack(path: Path, members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    """A tar of these members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def sample(number: int, key: str = "") -> dict[str, bytes]:
    """Every kind of field, for one sample."""
    key = key or f"cat/{number:04}"
    return {
        f"{key}.png": png(10 * number),
        f"{key}.cls": f"{number % 3}\n".encode(),
        f"{key}.txt": "grün".encode() * number,
        f"{key}.meta.json": json.dumps({"wide": number, "box": [0.5, 1.5]}).encode(),
        f"{key}.depth.npy": npy(np.full((2, 2), number, np.float32)),
    }


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two tars of four and three samples, in a folder."""
    root = tmp_path / "shards"
    for tar, numbers in enumerate((range(4), range(4, 7))):
        pack(root / f"train-{tar}.tar", {k: v for n in numbers for k, v in sample(n).items()})
    return root


class TestTars(SourceContract):
    """A folder of tars keeps every promise of a source."""

    @pytest.fixture
    def config(self, shards: Path) -> TarConfig:
        """Return what a job would carry."""
        return TarConfig(path=str(shards))

    @pytest.fixture
    def source(self, config: TarConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source


def opened(config: TarConfig) -> Any:
    """The source, untransformed."""
    source = open_source(config)
    assert source.unit == "sample"
    return source


def test_members_of_one_name_are_one_sample(shards: Path) -> None:
    """Webdataset's convention: the base name up to the first dot; each field is read by what its name ends in."""
    source = opened(TarConfig(path=str(shards)))
    made = read(source, 5)
    assert source.key(5) == "train-1.tar:cat/0005"
    assert made["x"].tolist() == np.full((4, 6, 3), 50).tolist()
    assert (int(made["y"]), made["txt"], made["meta/wide"]) == (2, "grün".encode() * 5, 5)
    assert made["meta/box"] == [0.5, 1.5]
    assert made["depth"].tolist() == [[5, 5], [5, 5]]
    assert source.column("y").tolist() == [n % 3 for n in range(7)]
    assert split_name("./a.b/c.SEG.png") == ("a.b/c", "seg.png")


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("train-{0..1}.tar", ["train-0.tar:cat/0000", "train-1.tar:cat/0004"]),
        ("train-{1,0}.tar", ["train-1.tar:cat/0004", "train-0.tar:cat/0000"]),
        ("tr*-?.tar", ["train-0.tar:cat/0000", "train-1.tar:cat/0004"]),
        ("{train,more}-[1].tar", ["train-1.tar:cat/0004", "more-1.tar:dog/0000"]),
        ("more-{08..09}.tar", ["more-08.tar:dog/0000", "more-09.tar:dog/0000"]),
        ("../*/train-0.tar", ["shards/train-0.tar:cat/0000"]),
    ],
)
def test_a_pattern_names_tars_as_webdataset_does(pattern: str, keys: list[str], shards: Path) -> None:
    """A user of webdataset already has the pattern in a script."""
    for name in ("more-1", "more-08", "more-09"):
        pack(shards / f"{name}.tar", sample(0, "dog/0000"))
    config = TarConfig(path=f"{shards}/{pattern}")
    source = opened(config)
    found = [source.key(index) for index in range(len(source))]
    assert [key for index, key in enumerate(found) if key.partition(":")[0] not in
            [other.partition(":")[0] for other in found[:index]]] == keys  # fmt: skip
    assert open_source(config_for_jobs(config, source)).fingerprint == source.fingerprint


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("train-{0..3}.tar", "no tars at .*train-2.tar, one of the 4 names of .*: found nothing there"),
        ("val-*.tar", r"no tars at .*val-\*.tar: found nothing there"),
        ("train-{0..99999999}.tar", "train-{0..99999999}.tar is over 1048576 names; give a folder, or shorter ranges"),
        ("train-{0..1999}{0..999}.tar", "train-{0..1999}{0..999}.tar is over 1048576 names"),
    ],
)
def test_a_pattern_without_a_tar_says_which_is_missing(pattern: str, message: str, shards: Path) -> None:
    """A shard that is left out in silence is a smaller training set."""
    with pytest.raises(SourceError, match=message):
        opened(TarConfig(path=f"{shards}/{pattern}"))


def test_a_pattern_of_many_tars_makes_no_name_beyond_the_first_that_is_missing(shards: Path) -> None:
    """A forged job may name a million files that are nowhere. Their names took a hundred megabytes of a worker."""
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=r"no tars at .*/00\.tar, one of the 1000000 names of"):
            matches(f"{shards}/{{0..999}}{{0..999}}.tar")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_of_braces_within_braces_are_bounded(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level doubles the names, so a short pattern may be any number of them."""
    monkeypatch.setattr(tars, "_MOST_NAMES", 16)
    nested = "{train-0,{train-0,{train-0,{train-0,train-1}}}}"
    assert matches(f"{shards}/{nested}.tar") == [f"{shards}/train-0.tar", f"{shards}/train-1.tar"]
    monkeypatch.setattr(tars, "_MOST_NAMES", 15)
    with pytest.raises(SourceError, match="is over 15 names"):
        matches(f"{shards}/{nested}.tar")


def test_a_pax_header_of_any_length_or_number_is_read_or_passed_over(tmp_path: Path) -> None:
    """Python refuses to parse a number of 5000 digits, and a tar with one ended the source without a reason."""
    numbers = {"none": b"", "length": b"9" * 5000 + b" path=x\n", "size": b"5015 size=" + b"9" * 5004 + b"\n"}
    for name, record in numbers.items():
        header = tarfile.TarInfo("pax")
        header.type, header.size = tarfile.XHDTYPE, len(record)
        member = tarfile.TarInfo("1.cls")
        member.size = 1
        blocks = [header.tobuf(tarfile.USTAR_FORMAT), record.ljust(-len(record) % 512 + len(record), b"\0")]
        blocks += [member.tobuf(tarfile.USTAR_FORMAT), b"7".ljust(512, b"\0"), bytes(1024)]
        path = tmp_path / f"{name}.tar"
        path.write_bytes(b"".join(blocks))
        source = opened(TarConfig(path=str(path)))
        assert source.key(0) == f"{name}.tar:1"
        if name == "size":
            with pytest.raises(SampleError, match=r"\.cls has \d+ bytes; at most"):
                read(source, 0)
        else:
            assert int(read(source, 0)["y"]) == 7


def test_a_pax_header_of_many_records_is_walked_once() -> None:
    """Each record copied all that came after it, so a header of 256 KiB took half a second of a worker."""

    class Counted(bytes):
        copied = 0

        def __getitem__(self, part: Any) -> Any:
            found = Counted(super().__getitem__(part))
            Counted.copied += len(found)
            return found

    data = Counted(b"4 =\n" * 10_000 + b"18 path=cat/1.png\n")
    info = tarfile.TarInfo("pax")
    info.type = tarfile.XHDTYPE
    assert tar_index._more(info, data) == {"path": "cat/1.png"}
    assert Counted.copied <= len(data)


def test_the_order_and_form_of_a_tar_do_not_matter(tmp_path: Path) -> None:
    """Sorted by kind, with very long names, joined by cat: what unpacks to the same files is the same data."""
    long = "deep/" * 40 + "0001"
    names = {**sample(1, long), **sample(2)}
    by_kind = dict(sorted(names.items(), key=lambda item: item[0].rpartition(".")[2]))
    expected = None
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)):
        if form != tarfile.USTAR_FORMAT:
            one = opened(TarConfig(path=str(pack(tmp_path / f"{number}.tar", by_kind, form))))
        else:
            halves = [pack(tmp_path / f"half{n}.tar", sample(n, key)) for n, key in ((1, long[-90:]), (2, ""))]
            joined = tmp_path / "joined.tar"
            joined.write_bytes(b"".join(half.read_bytes() for half in halves))
            one = opened(TarConfig(path=str(joined)))
        found = sorted(
            str(sorted((k, np.asarray(v).tolist()) for k, v in read(one, i).items())) for i in range(len(one))
        )
        expected = expected or found
        assert len(found) == 2
        assert found == expected


def test_a_relative_path_hides_no_member(tmp_path: Path) -> None:
    """`tarfile.add("../data/001.png")` keeps the dots. Hidden members are left out, and counted also by the index."""
    names = (
        "../data/001",
        "./004",
        "a/./006",
        ".././a/../007",
        ".cache/002",
        "ok/003",
        "a/.b/005",
        "__MACOSX/ok/._003",
    )
    path = pack(tmp_path / "a.tar", {f"{name}.id": name[-1].encode() for name in names})
    for _ in range(2):
        source = opened(TarConfig(path=str(path)))
        keys = [source.key(index).removeprefix("a.tar:") for index in range(len(source))]
        assert keys == ["../data/001", "004", "a/./006", ".././a/../007", "ok/003"]
        assert [int(read(source, index)["id"]) for index in range(5)] == [1, 4, 6, 7, 3]
        assert passed_over(source.info) == (
            "3 hidden members of tars passed over: a part of their path begins with a dot, or is __MACOSX"
        )


def test_a_tar_whose_samples_were_left_out_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that an earlier version began without them must not go on with other samples under its numbers."""
    path = pack(tmp_path / "a.tar", {"../a/1.id": b"1", "b/2.id": b"2"})
    now = opened(TarConfig(path=str(path)))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(tar_index, "is_hidden", lambda name: name == "a/1.id")
    assert len(now) == 2
    assert opened(TarConfig(path=str(path))).fingerprint != now.fingerprint


def test_fields_are_chosen_and_named(shards: Path) -> None:
    """A classifier needs no captions, and a missing field is refused at once."""
    source = opened(TarConfig(path=str(shards), fields={"image": "png", "label": "cls"}, resize=(2, 2)))
    assert source.spec == {"image": ("uint8", (2, 2, 3)), "label": ("int64", ())}
    assert set(read(source, 0)) == {"image", "label"}
    with pytest.raises(SourceError, match=r"no sample has a \.jpg; the tars hold \.png, \.cls, \.txt, "):
        opened(TarConfig(path=str(shards), fields={"x": "jpg"}))


def test_an_image_and_its_mask_are_augmented_alike(tmp_path: Path) -> None:
    """A crop of the one that is not the crop of the other teaches nonsense."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(out, "PNG")
    path = pack(tmp_path / "a.tar", {"a.png": out.getvalue(), "a.seg.png": out.getvalue()})
    source = opened(TarConfig(path=str(path), random_crop=8, flip=True))
    made = [source.read(0, sample_rng(1, 0, 0, n)) for n in range(8)]
    assert all(np.array_equal(one["x"], one["seg"]) for one in made)
    assert len({one["x"].tobytes() for one in made}) == 8


INTERRUPTED = """
import gc, sys, threading, time
from penstock_producer.sources.config import TarConfig
from penstock_producer.sources.open import open_source
source = open_source(TarConfig(path=sys.argv[1], fields={"x": "npy"}))
failed = []
def work():
    for _ in range(300):
        try:
            source.read(0, None)
        except SystemError as error:
            failed.append(error)
gc.callbacks.append(lambda *_: time.sleep(1e-6))  # another thread goes on wherever garbage is looked for
gc.set_threshold(3)
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(f"{len(failed)} of {16 * 300}: {failed[0]}" if failed else 0)
"""


def test_arrays_are_read_in_threads_wherever_they_are_interrupted(tmp_path: Path) -> None:
    """CPython 3.11 fails to parse in two threads at once, which an array's header in numpy's format needs."""
    tar = pack(tmp_path / "one.tar", {"a.npy": npy(np.zeros((2, 2), np.float32))})
    command = [sys.executable, "-c", INTERRUPTED, str(tar)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_forked_while_a_thread_reads_an_array_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are forked, and a lock that another thread holds at that moment stays locked in them for ever."""
    source = opened(TarConfig(path=str(pack(tmp_path / "one.tar", {"a.npy": npy(np.zeros((2, 2), np.float32))}))))
    real, is_parsing = np.load, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        is_parsing.set()
        time.sleep(0.3)
        return real(*arguments, **options)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(np, "load", slow)
        reading = pool.submit(read, source, 0)
        assert is_parsing.wait(10)
        monkeypatch.setattr(np, "load", real)
        assert in_fork(lambda: digest(read(source, 0))) == digest(reading.result())


def test_sizes_that_differ_are_declared_free(tmp_path: Path) -> None:
    """The first picture's size must not be made everybody's spec."""
    path = pack(tmp_path / "a.tar", {"1.png": png(1), "1.cls": b"1", "2.png": png(2, 5, 6), "2.cls": b"0"})
    assert opened(TarConfig(path=str(path))).spec == {"x": ("uint8", (None, 6, 3)), "y": ("int64", ())}


def test_an_empty_list_is_a_list_of_no_rows(tmp_path: Path) -> None:
    """A picture without boxes has ``[]`` in its JSON. As the first one, it must not decide what a box is."""
    boxes: list[list[list[int]]] = [[], [[1, 2, 3, 4]], [], [[1, 2, 3, 4], [5, 6, 7, 8]]]
    members = {f"{n}.json": json.dumps({"boxes": each, "none": []}).encode() for n, each in enumerate(boxes)}
    source = opened(TarConfig(path=str(pack(tmp_path / "a.tar", members))))
    assert source.spec == {"boxes": ("int64", (None, 4)), "none": ("float64", (0,))}


def test_a_damaged_tar_loses_nothing_in_silence(shards: Path) -> None:
    """A header overwritten in the middle: it is named, and everything behind it is still there."""
    path = shards / "train-0.tar"
    data = bytearray(path.read_bytes())
    at = data.index(b"cat/0001.cls")
    data[at : at + 512] = b"?" * 512
    cut = data.index(b"cat/0003.depth.npy") + 520
    path.write_bytes(data[:cut])
    source = opened(TarConfig(path=str(shards)))
    bad = {}
    for index in range(len(source)):
        try:
            read(source, index)
        except SampleError as error:
            bad[source.key(index)] = str(error)
    assert len(source) == 9
    assert bad == {
        "train-0.tar:cat/0001": "train-0.tar:cat/0001: has no .cls; it has png, txt, meta.json, depth.npy",
        f"train-0.tar:@{at}": f"train-0.tar:@{at}: damaged: train-0.tar has no tar header at byte {at}",
        "train-0.tar:cat/0003": "train-0.tar:cat/0003: cut off: train-0.tar ends after 8 of the 144 bytes of "
        ".depth.npy",
        f"train-0.tar:@{cut}": f"train-0.tar:@{cut}: {ends_at(cut)}",
    }


def ends_at(byte: int) -> str:
    """Return the reason for a tar that ends without the zeros at its end."""
    return (
        f"cut off: train-0.tar ends at byte {byte} without the zeros that end an archive, so samples may be missing; "
        "if it is whole, `truncate -s +1024` adds them"
    )


@pytest.mark.parametrize("behind", [0, 1, 300], ids=["all", "all_but_a_byte", "data"])
def test_a_tar_that_is_cut_between_members_is_not_short_in_silence(shards: Path, behind: int) -> None:
    """Nothing else says that half of a download is missing: all the samples before the cut are whole."""
    path = shards / "train-0.tar"
    data = path.read_bytes()
    cut = data.index(b"cat/0002.png") - behind
    path.write_bytes(data[:cut])
    source = opened(TarConfig(path=str(path)))
    assert [source.key(index) for index in range(len(source))] == [
        "train-0.tar:cat/0000", "train-0.tar:cat/0001", f"train-0.tar:@{cut}"
    ]  # fmt: skip
    assert int(read(source, 1)["y"]) == 1
    with pytest.raises(SampleError) as caught:
        read(source, 2)
    assert str(caught.value) == f"train-0.tar:@{cut}: {ends_at(cut)}"
    with path.open("r+b") as file:  # what the message advises for a whole tar of a tool that writes no zeros
        file.truncate(cut + 1024)
    assert len(opened(TarConfig(path=str(path)))) == 2


def test_a_tar_that_is_cut_in_a_header_names_the_place(shards: Path) -> None:
    """The member of that header, and all behind it, are lost."""
    path = shards / "train-0.tar"
    data = path.read_bytes()
    header = data.index(b"cat/0002.png")
    path.write_bytes(data[: header + 100])
    source = opened(TarConfig(path=str(path)))
    assert len(source) == 3
    with pytest.raises(SampleError, match=f"damaged: train-0.tar has no tar header at byte {header}$"):
        read(source, 2)


def test_a_field_of_a_sample_that_is_whole_hides_no_cut(shards: Path) -> None:
    """The cut is in a field that the user left out, so no sample of the chosen ones is bad."""
    path = shards / "train-0.tar"
    data = path.read_bytes()
    cut = data.index(b"cat/0001.depth.npy") + 520
    path.write_bytes(data[:cut])
    source = opened(TarConfig(path=str(path), fields={"x": "png"}))
    assert [source.key(index) for index in range(len(source))][2:] == [f"train-0.tar:@{cut}"]


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("cls", b"dog", r"its \.cls cannot be read: invalid literal"),
        ("json", b"{", r"its \.json cannot be read: Expecting"),
        ("json", b'{"a": null}', "a is null; expected a number"),
        ("npy", b"\x93NUMPY", r"its \.npy cannot be read"),
        ("npy", b"junk" * 9, r"its \.npy cannot be read: it does not begin as numpy\.save writes it; it begins with"),
        ("npy", npy(np.array([{}], object)), "it holds Python objects, which are pickles"),
        ("png", b"\x89PNG\r\n", "not a readable image"),
    ],
)
def test_a_field_that_cannot_be_read_names_its_sample(tmp_path: Path, field: str, content: bytes, message: str) -> None:
    """Among a million members the bad one must be found; nothing in a tar is ever unpickled."""
    source = opened(TarConfig(path=str(pack(tmp_path / "a.tar", {f"k.{field}": content}))))
    with pytest.raises(SampleError, match=message) as caught:
        read(source, 0)
    assert str(caught.value).startswith("a.tar:k: ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nothing", "no tars at .*found nothing there"),
        (lambda root: root, "no tars in .*found 1 other files"),
        (lambda root: pack(root / "a.tar", {"README": b"x"}), "holds no samples"),
        (lambda root: pack(root / "a.tar", {"a.png": png(1), "./a.png": png(2)}), "holds './a.png' twice"),
        (
            lambda root: pack(root / "a.tar", {"a.png": png(1), "a.jpg": png(2)}),
            "both .png and .jpg would be tensor 'x'",
        ),
        (lambda root: root / "words.txt", "is not a tar: it does not begin with a tar header"),
        (lambda root: written(root / "a.tar", b""), "is not a tar: it is empty"),
        (lambda root: written(root / "a.tar", b"\x1f\x8b123"), r"is compressed \(gzip\)"),
    ],
)
def test_what_is_no_tar_is_refused_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    """When it is opened, not in the first job."""
    written(tmp_path / "words.txt", b"words" * 200)
    with pytest.raises(SourceError, match=message) as caught:
        opened(TarConfig(path=str(make(tmp_path))))
    assert "\n" not in str(caught.value)


def written(path: Path, data: bytes) -> Path:
    """A file."""
    path.write_bytes(data)
    return path


def test_more_tars_than_files_may_be_open(tmp_path: Path) -> None:
    """Datasets of thousands of tars are common, and most systems allow 1024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 300
    for number in range(many):
        pack(tmp_path / "many" / f"{number:03}.tar", {f"{number}.id": str(number).encode()})
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        source = opened(TarConfig(path=str(tmp_path / "many")))
        assert [int(read(source, n)["id"]) for n in range(many)] == list(range(many))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_tar_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    """Its index would cut pictures out of the middle of others."""
    path = pack(tmp_path / "a.tar", {"1.id": b"1", "2.id": b"2"})
    source = opened(TarConfig(path=str(path)))
    pack(path, {"1.txt": b"3", "2.id": b"4", "3.id": b"5"})
    with pytest.raises(SampleError, match=r"a\.tar:1: a\.tar was changed after its index was made"):
        read(source, 0)


def test_the_index_is_found_once(shards: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker opens the source: a thousand tars must not be walked by each; a changed tar is walked again."""
    first = opened(TarConfig(path=str(shards)))
    scans: list[str] = []

    def seen(fd: int, path: str) -> TarShard:
        scans.append(path)
        return scan(fd, path)

    monkeypatch.setattr(tar_index, "scan", seen)
    again = opened(TarConfig(path=str(shards)))
    assert not scans
    assert [again.key(n) for n in range(7)] == [first.key(n) for n in range(7)]
    pack(shards / "train-1.tar", sample(9))
    changed = opened(TarConfig(path=str(shards)))
    assert [Path(path).name for path in scans] == ["train-1.tar"]
    assert changed.fingerprint != first.fingerprint
    for kept in cache.rglob("*.npz"):
        kept.write_bytes(b"damaged")
    assert len(opened(TarConfig(path=str(shards)))) == 5
    assert len(scans) == 3


@pytest.mark.parametrize("size", [b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"77777777777\0"])
def test_headers_made_to_mislead_end_the_pass(tmp_path: Path, size: bytes) -> None:
    """A negative or gigantic size must neither run in circles nor fill the memory."""
    path = pack(tmp_path / "a.tar", {f"{key}.bin": b"1" * 512 for key in "abc"})
    data = bytearray(path.read_bytes())
    header = data[1024:1536]
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[1024:1536] = header
    path.write_bytes(data)
    source = opened(TarConfig(path=str(path)))
    assert read(source, 0)["bin"] == b"1" * 512
    with pytest.raises(SampleError, match=r"damaged: |at most"):
        read(source, 1)
