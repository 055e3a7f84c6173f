"""penstock produce, worker and run from a shell: what they print, how they end, and what they leave."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from PIL import Image

import penstock
from penstock import __main__ as command_line
from penstock.cli.interrupts import end_by_signals
from penstock_common.local_servers import announced
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.producer.reading import read_epoch

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front", "."))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write twenty-four small pictures of two classes, one of them truncated."""
    rng = np.random.default_rng(0)
    for n in range(24):
        path = tmp_path / "photos" / ("cat" if n % 2 else "dog") / f"{n:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (12, 10, 3), dtype=np.uint8)).save(path)
    cut = tmp_path / "photos" / "dog" / "04.png"
    cut.write_bytes(cut.read_bytes()[:60])
    return tmp_path / "photos"


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a separate process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**clean, "PYTHONPATH": _PATHS, "COLUMNS": "120", **environment},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], timeout_s: float = 30) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


def run(*arguments: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Start a command and wait until it ends."""
    return ended(start(*arguments, cwd=cwd, **environment))


def awaited(look: Callable[[], Any]) -> Any:
    """Return the first true answer."""
    deadline = time.monotonic() + 20
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# --- produce ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_images_becomes_epochs(any_url: str, photos: Path) -> None:
    """A new user types this command. Its last line adds up, and the broken picture is named."""
    code, out, err = run(
        "produce", "images", "photos", "--epochs", "2", "--workers", "2", "--url", any_url, cwd=photos.parent
    )
    assert code == 0, err
    assert out.startswith("produced 2 epochs of 'train': 48 samples, 2 of them bad, ")
    assert "bad sample: dog/04.png: " in err
    assert "y: 2 classes: cat, dog\n" in err
    for epoch in (0, 1):
        samples = read_epoch(any_url, epoch=epoch)
        assert len(samples) == 23
        assert {int(s["y"]) for s in samples.values()} == {0, 1}
    with penstock.Loader("train", group="g", batch_size=8, url=any_url) as loader:
        replay = penstock.Replay("train", epoch=0, batch_size=8, url=any_url)
        assert loader.info["classes"] == replay.info["classes"] == {"y": ["cat", "dog"]}


def test_the_classes_of_a_table_are_told_at_the_start(any_url: str, photos: Path) -> None:
    """A misspelt text is a class of its own, and only its name shows it."""
    names = ["cat", "cat ", "Cat", *(f"n{n:02}" for n in range(20)), "pug"]
    rows = "".join(f"{'cat' if n % 2 else 'dog'}/{n:02}.png,{name},a\n" for n, name in enumerate(names))
    (photos.parent / "labels.csv").write_text(f"file,label,place\n{rows}")
    words = ["produce", "images", "photos", "--labels", "labels.csv", "--split", "a:0.5,b:0.5", "--no-workers"]
    code, _, err = run(*words, "--url", any_url, cwd=photos.parent)
    assert code == 0, err
    told = [line for line in err.splitlines() if "class" in line]
    assert told == [
        "label: 24 classes: Cat, cat, 'cat ', n00, n01, n02, n03, n04, n05, n06, ...",
        "place: 1 class: a",
    ]


def test_json_is_all_a_program_sees(any_url: str, photos: Path) -> None:
    """Scripts parse the result: counts, bytes, rate, and the workers."""
    code, out, _ = run("produce", "images", "photos", "--json", "--url", any_url, "--workers", "1", cwd=photos.parent)
    result = json.loads(out)
    assert code == 0
    assert (result["samples"], result["bad"], result["epochs"]) == (24, 1, [0])
    assert result["nbytes"] == 23 * (12 * 10 * 3 + 8)
    assert result["samples_per_s"] > 0
    assert len(result["workers"]) == 1


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, photos: Path) -> Iterator[Callable[[list[str]], int]]:
    """Run the command in this process, which is fast, in the pictures' parent folder."""
    monkeypatch.chdir(photos.parent)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield command_line.main
    for number, handler in before.items():
        signal.signal(number, handler)


def test_queued_epochs_are_told_to_programs_as_json(
    any_url: str, in_process: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """--json promises that stdout can be parsed, even if nothing was produced yet."""
    options = ["--no-workers", "--json", "--epochs", "2", "--stream", "queued", "--queue", "nobodys", "--url", any_url]
    assert in_process(["produce", "images", "photos", *options]) == 0
    assert json.loads(capsys.readouterr().out) == {"stream": "queued", "queued_epochs": [0, 1]}


def test_every_mistake_is_one_line_and_exit_code_1(
    any_url: str, photos: Path, in_process: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no traceback and no wait: the line says what was found, and what to do."""
    (photos.parent / "empty").mkdir()
    (photos.parent / "text").mkdir()
    (photos.parent / "text" / "a.txt").write_text("words")
    for arguments, expected in (
        (["images", "empty"], "no images in empty"),
        (["images", "text"], "1 x .txt"),
        (["images", "nowhere"], "no image folder at nowhere"),
        (["images", "photos", "--transform", "augment:flip"], "no module 'augment'"),
        (["dataset", "json:nothing"], "json has no 'nothing'"),
        (["images", "photos", "--on-error", "fail"], "dog/04.png"),
        (["images", "photos", "--url", "redis://localhost:1"], "no Redis answers"),
    ):
        given = ["produce", *arguments, *([] if "--url" in arguments else ["--url", any_url]), "--workers", "1"]
        code = in_process(given)
        out, err = capsys.readouterr()
        said = [line for line in err.splitlines() if line.startswith("penstock: ")]
        assert code == 1, (arguments, err)
        assert "Traceback" not in err + out
        assert expected in said[-1]


def test_another_spec_on_an_old_stream_is_answered_by_both_ways_out(
    any_url: str, in_process: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who tries another --resize needs another stream, or no longer needs the old one."""
    command = ["produce", "images", "photos", "--workers", "1", "--url", any_url]
    assert in_process([*command, "--resize", "8x8"]) == 0
    assert in_process([*command, "--resize", "6x6"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        "stream 'train' holds samples of another spec, (x: uint8[8, 8, 3], y: int64), found (x: uint8[6, 6, 3]" in told
    )
    assert "--stream NAME" in told
    advised = re.search("`penstock (delete train)`", told)
    assert advised is not None
    assert in_process([*advised.group(1).split(), "--yes", "--url", any_url]) == 0
    assert in_process([*command, "--resize", "6x6"]) == 0


@pytest.mark.parametrize("kind", ["dataset", "generator"])
def test_a_sample_that_does_not_fit_is_answered_by_a_spec_to_paste(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A user should not have to learn the JSON of a spec to take samples of different sizes."""
    (tmp_path / f"ragged_{kind}.py").write_text(
        "import numpy as np\ndata = [{'x': np.zeros((3 + n % 4, 2), np.float32), 'y': n} for n in range(20)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["produce", kind, f"ragged_{kind}:data", "--workers", "1", "--url", any_url]
    assert command_line.main(command) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    advised = re.search(r"fill another stream \(--stream NAME\) with (--spec '.*')", told)
    assert advised is not None, told
    assert command_line.main([*command, "--stream", "other", *shlex.split(advised.group(1))]) == 0
    assert len(read_epoch(any_url, "other")) == 20


@pytest.mark.parametrize(("kind", "is_declared"), [("dataset", True), ("generator", False)])
@pytest.mark.parametrize(
    ("odd", "advice"),
    [
        ("{'x': x}", "each sample needs the same tensors: add what is missing, or leave it out of all, in a transform"),
        ("{'x': x, 'y': n, 'z': n}", "each sample needs the same tensors: add what is missing, or leave it"),
        ("{'x': x[:, None], 'y': n}", "make samples alike in the source or in a transform"),
        ("{'x': x[:2], 'y': float(n)}", "make samples alike in the source or in a transform"),
        ("{'x': x.astype(float), 'y': n}", "if all samples of this source are float64, another stream takes them"),
    ],
)
def test_a_spec_that_other_samples_would_not_fit_is_not_proposed(
    any_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    is_declared: bool,
    odd: str,
    advice: str,
) -> None:
    """A user who pastes a spec without ``y`` loses each sample that has it."""
    (tmp_path / "odd.py").write_text(
        "import numpy as np\n"
        "def item(n):\n"
        "    x = np.full(4, n, np.float32)\n"
        f"    return {odd} if n == 7 else {{'x': x, 'y': n}}\n"
        "data = [item(n) for n in range(20)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    spec = ["--spec", '{"x": ["float32", [4]], "y": ["int64", []]}'] if is_declared else []
    command = ["produce", kind, "odd:data", "--workers", "1", "--no-shuffle", "--url", any_url, *spec]
    assert command_line.main(command) == (0 if is_declared else 1)
    told = next(line for line in capsys.readouterr().err.splitlines() if "odd:data[7]; " in line)
    assert advice in told
    assert "--spec '" not in told


@pytest.mark.parametrize("spec", [None, '{"x": ["float32", [3, null, null]], "y/boxes": ["float32", [null, 4]]}'])
def test_the_line_to_paste_for_boxes_fits_every_image(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str | None
) -> None:
    """A user without a complete spec pastes this line: areas and labels are as many as boxes."""
    name = "boxes_of_none" if spec is None else "boxes_of_half"
    (tmp_path / f"{name}.py").write_text(
        "import numpy as np\n"
        "def item(n):\n"
        "    boxes = np.full((5 + n % 3, 4), n, np.float32)\n"
        "    about = {'boxes': boxes, 'labels': np.arange(len(boxes)), 'image_id': n, 'area': boxes[:, 0]}\n"
        "    return np.full((3, 8 + n, 9), n, np.float32), about\n"
        "data = [item(n) for n in range(12)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["produce", "dataset", f"{name}:data", "--workers", "1", "--url", any_url]
    assert command_line.main([*command, *(["--spec", spec] if spec else [])]) == 1
    advised = re.findall(r"fill another stream \(--stream NAME\) with (--spec '.*?')", capsys.readouterr().err)
    assert command_line.main([*command, "--stream", "other", *shlex.split(advised[-1])]) == 0
    assert len(read_epoch(any_url, "other")) == 12


def boxes_that_rarely_differ(folder: Path, name: str) -> None:
    """A module whose ``data`` is 200 samples: each has another length, and every fifth has fewer boxes."""
    (folder / f"{name}.py").write_text(
        "import numpy as np\n"
        "def item(n):\n"
        "    boxes = np.zeros((2 if n % 5 == 4 else 3, 4), np.float32)\n"
        "    return {'x': np.zeros(5 + n, np.float32), 'boxes': boxes}\n"
        "data = [item(n) for n in range(200)]\n"
        "def same(block):\n"
        "    return block\n"
    )


@pytest.mark.parametrize("kind", ["dataset", "generator", "blocks"])
def test_the_line_to_paste_fits_samples_that_come_later(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The first two samples have as many boxes: a line of those two would make each sample of fewer a bad one."""
    boxes_that_rarely_differ(tmp_path, f"rarely_{kind}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "generator" if kind == "generator" else "dataset"
    command = ["produce", source, f"rarely_{kind}:data", "--workers", "1", "--no-shuffle", "--url", any_url]
    command += ["--block-transform", "rarely_blocks:same"] if kind == "blocks" else []
    assert command_line.main(command) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    looked_at = 65 if kind == "generator" else 25  # the next ones, or all of a shard
    assert f" (made from {looked_at} samples: other sizes that differ need null)" in told
    advised = re.search(r"with (--spec '.*')", told)
    assert advised is not None
    assert command_line.main([*command, "--stream", "other", *shlex.split(advised.group(1))]) == 0
    assert len(read_epoch(any_url, "other")) == 200


def test_a_declared_spec_that_many_samples_do_not_fit_is_answered_by_one_that_fits(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fifth of the samples lacks a box: the error must say so, not only how many are allowed."""
    boxes_that_rarely_differ(tmp_path, "declared")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["produce", "dataset", "declared:data", "--workers", "1", "--no-shuffle", "--url", any_url]
    spec = '{"x": ["float32", [null]], "boxes": ["float32", [3, 4]]}'
    declared = [*command, "--spec", spec, "--shard-samples", "20", "--max-bad", "30"]  # four bad samples a shard
    assert command_line.main(declared) == 1
    told = capsys.readouterr().err.splitlines()
    failed = next(line for line in told if "--max-bad 30 allows 30" in line)
    assert "tensor 'boxes': found shape (2, 4), expected shape (3, 4)" in failed
    advised = re.search(r"with (--spec '.*?')", failed)
    assert advised is not None
    assert command_line.main([*command, "--stream", "other", *shlex.split(advised.group(1))]) == 0
    assert len(read_epoch(any_url, "other")) == 200


def test_the_line_to_paste_knows_an_empty_list(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table's row without boxes has ``[]``, which has no dimensions that could be compared."""
    (tmp_path / "empty.py").write_text("data = [{'boxes': [[1.0, 2.0, 3.0, n]] * (n % 3)} for n in range(20)]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["produce", "dataset", "empty:data", "--workers", "1", "--no-shuffle", "--url", any_url]
    assert command_line.main(command) == 1
    advised = re.search(r"with (--spec '.*')", capsys.readouterr().err.splitlines()[-1])
    assert advised is not None
    assert json.loads(shlex.split(advised.group(1))[1]) == {"boxes": ["float64", [None, 4]]}
    assert command_line.main([*command, "--stream", "other", *shlex.split(advised.group(1))]) == 0
    assert len(read_epoch(any_url, "other")) == 20


def test_parts_of_a_split_are_made_of_one_dataset(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two names of the same samples divide differently, so most of the validation set would be trained on."""
    (tmp_path / "parted.py").write_text("augmented = plain = [{'y': n} for n in range(60)]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = ["--split", "train:0.8,val:0.2", "--workers", "1", "--url", any_url]
    assert command_line.main(["produce", "dataset", "parted:augmented", *parts, "--only", "train"]) == 0
    assert command_line.main(["produce", "dataset", "parted:plain", *parts, "--only", "val"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "'train.train' is a part of parted:augmented, 'train.val' would be one of parted:plain" in told
    assert "make all parts of parted:augmented, with --transform" in told
    assert command_line.main(["produce", "dataset", "parted:augmented", *parts, "--only", "val"]) == 0
    sides = [{int(s["y"]) for s in read_epoch(any_url, f"train.{part}").values()} for part in ("train", "val")]
    assert sorted([*sides[0], *sides[1]]) == list(range(60))
    assert command_line.main(["produce", "dataset", "parted:plain", *parts, "--stream", "other"]) == 0


def test_ctrl_c_stops_it_and_the_same_command_goes_on(any_url: str, tmp_path: Path) -> None:
    """Long productions are interrupted, and committed samples are not made again."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef each(n):\n    time.sleep(0.02)\n    return n\ndata = range(200)\n"
    )
    command = ["produce", "dataset", "slow:data", "--transform", "slow:each", "--shard-samples", "10", "--url", any_url]
    first = start(*command, "--workers", "2", cwd=tmp_path)
    with redis.Redis.from_url(any_url) as client:
        awaited(lambda: [key for key in client.scan_iter("penstock:*:entries") if client.xlen(key) > 2])
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does, to the workers, too
    code, _, err = ended(first)
    assert code == 130
    assert "the same command goes on" in err
    assert "Traceback" not in err
    code, out, err = run(*command, "--workers", "1", cwd=tmp_path)
    assert code == 0, err
    assert re.search(
        r"going on with epoch 0 of 'train', which an earlier run left unfinished\. Its \d+ samples of epoch 0 "
        r"stay as they are\. If your code changed since, stop, and `penstock epochs abandon train 0`: the next run",
        err,
    ), err
    found = re.search(r": 200 samples, 0 bad, (\d+) of them made before, .* \((\d+) samples/s\)$", out.strip())
    assert found is not None, out
    assert 0 < int(found[1]) < 200
    assert int(found[2]) <= 50, "one worker sleeps 20 ms for each sample"
    assert sorted(int(s["x"]) for s in read_epoch(any_url).values()) == list(range(200))


def test_a_second_run_at_once_says_that_it_helps(any_url: str, tmp_path: Path) -> None:
    """It said that the first run had left the epoch unfinished, while that run was making it."""
    command = ("produce", *slow_source(tmp_path, 60), "--workers", "1", "--url", any_url)
    first = start(*command, cwd=tmp_path)
    with redis.Redis.from_url(any_url) as client:
        awaited(lambda: client.zcard("rq:wip:penstock"))
    code, _, err = run(*command, cwd=tmp_path)
    assert (code, ended(first)[0]) == (0, 0), err
    assert "going on with epoch 0 of 'train', of which another run made a part in the last 5 s." in err
    assert "this one helps it and adds no epochs" in err
    assert "unfinished" not in err
    code, out, _ = run("epochs", "list", "train", "--json", "--url", any_url, cwd=tmp_path)
    assert [each["epoch"] for each in json.loads(out)] == [0]


def test_a_run_after_a_kill_says_that_it_waits_for_the_shard_of_the_killed_worker(any_url: str, tmp_path: Path) -> None:
    """It stood for ten seconds at 18 of 20 samples, with one second left, and did not say why."""
    command = ("produce", *slow_source(tmp_path, 20), "--workers", "1", "--shard-samples", "10", "--url", any_url)
    first = start(*command, cwd=tmp_path)
    with redis.Redis.from_url(any_url) as client:
        awaited(lambda: client.zcard("rq:wip:penstock"))
    os.killpg(first.pid, signal.SIGKILL)
    ended(first)
    again = start(*command, cwd=tmp_path)
    assert again.stderr is not None
    began, said = time.monotonic(), [""]
    try:
        while "waiting: " not in said[-1]:
            said.append(again.stderr.readline())
            assert said[-1], said
        assert time.monotonic() - began < 14
        told = r"waiting: no heartbeat came from the worker of shard \d for 5 s \(was it killed\?\)\. After 15 s"
        assert re.match(told, said[-1]), said
    finally:
        again.terminate()
        ended(again)


def test_an_iterable_that_fails_says_what_becomes_of_its_epoch(any_url: str, tmp_path: Path) -> None:
    """Twelve samples were gone without a word. Of an empty one, no worker was said to have taken the job."""
    (tmp_path / "gens.py").write_text(
        "def breaks():\n    for n in range(20):\n        if n == 12:\n            raise ValueError('a broken row')\n"
        "        yield {'n': n}\n\n\ndef empty():\n    return iter(())\n\n\ndef away():\n    yield open('rows.csv')\n"
    )
    produce = ("produce", "generator", "--workers", "1", "--url", any_url)
    code, _, err = run(*produce, "gens:breaks", cwd=tmp_path)
    assert code == 1
    assert (
        "gens:breaks failed at item 12: ValueError: a broken row (gens.py:4); the whole epoch is abandoned, with" in err
    )
    code, _, err = run(*produce, "gens:empty", "--stream", "other", cwd=tmp_path)
    assert (code, "has taken one of its jobs" in err) == (1, False), err
    assert "tried again" not in err
    assert err.rstrip().endswith("gens:empty gave no items")
    code, _, err = run(*produce, "gens:away", "--stream", "third", cwd=tmp_path)
    assert code == 1
    assert "waiting: a shard is tried again: gens:away failed at item 0: FileNotFoundError" in err


def test_workers_elsewhere_do_what_was_queued(any_url: str, photos: Path) -> None:
    """Producer and workers need not know each other: --no-workers queues the jobs, and other workers do them."""
    code, out, err = run("produce", "images", "photos", "--no-workers", "--url", any_url, cwd=photos.parent)
    command = f"penstock worker --root {photos.resolve()}"
    queued = "queued epoch 0 of 'train', of which nothing is made yet: start workers with "
    assert (code, out) == (0, f"{queued}`{command} --url URL`\n"), err
    told = command.removeprefix("penstock ").split()
    code, _, err = run(*told, "--processes", "2", "--burst", "--url", any_url, cwd=photos.parent)
    assert code == 0, err
    assert len(read_epoch(any_url)) == 23


def test_a_worker_says_that_code_changed_since_it_was_imported(any_url: str, tmp_path: Path) -> None:
    """It keeps its modules for days, and made epochs with the older transform in silence."""
    code = "data = range(4)\ndef plus(n):\n    return {'n': n + 1}\n"
    (tmp_path / "team.py").write_text(code)
    command = ("produce", "dataset", "team:data", "--transform", "team:plus", "--workers", "0", "--url", any_url)
    worker = start("worker", "--processes", "1", "--allow", "team", "--url", any_url, cwd=tmp_path)
    try:
        for text in (code, code.replace("n + 1", "n + 100")):
            (tmp_path / "team.py").write_text(text)
            status, _, err = run(*command, cwd=tmp_path)
            assert status == 0, err
        assert sorted(int(s["n"]) for s in read_epoch(any_url, epoch=1).values()) == [1, 2, 3, 4]
    finally:
        worker.terminate()
        _, _, err = ended(worker)
    told = f"{tmp_path / 'team.py'} changed since this worker imported it: restart the worker to use the new code"
    assert [line for line in err.splitlines() if "changed since" in line] == [f"penstock: worker: {told}"]


def test_a_worker_says_first_what_jobs_may_name(any_url: str, tmp_path: Path) -> None:
    """Otherwise a client that can write to a shared queue could run any code as the worker's user."""
    code, _, err = run("worker", "--url", any_url, cwd=tmp_path)
    assert code == 1
    assert "is not your own `penstock server`" in err
    assert "--allow MODULE[:NAME]" in err
    assert "--root DIR" in err
    assert "--allow-any" in err
    assert len(err.splitlines()) == 1
    code, _, err = run("worker", "--url", any_url, "--allow-any", "--allow", "good", cwd=tmp_path)
    assert (code, "--allow-any allows everything" in err) == (2, True)
    code, _, err = run("worker", "--url", any_url, "--allow-any", "--burst", "--processes", "1", cwd=tmp_path)
    assert code == 0, err


@pytest.mark.parametrize("password", [None, ""])
def test_a_worker_trusts_its_own_users_server(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path, password: str | None
) -> None:
    """Only this user has the password of a `penstock server`, and every user can use a server without one."""
    server = fresh_server(password=password)
    (tmp_path / "run").mkdir(mode=0o700)
    with announced(server.url, server.port, tmp_path / "run" / "penstock"):
        way = ("worker", "--burst", "--processes", "1", "--url", server.url)
        code, _, err = run(*way, cwd=tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "run"))
    assert (code, "is not your own" in err) == ((0, False) if password is None else (1, True)), err


def test_sigterm_ends_workers_in_moments(any_url: str, tmp_path: Path) -> None:
    """Containers are stopped with SIGTERM, and killed when they do not react."""
    (tmp_path / "photos").mkdir()
    worker = start("worker", "--processes", "2", "--root", "photos", "--url", any_url, cwd=tmp_path)
    with redis.Redis.from_url(any_url) as client:
        awaited(lambda: client.scard("rq:workers:penstock") == 2)
        began = time.monotonic()
        worker.terminate()
        code, _, err = ended(worker)
        assert (code, "Traceback" in err) == (0, False), err
        assert time.monotonic() - began < 5
        assert client.scard("rq:workers:penstock") == 0


def slow_source(tmp_path: Path, samples: int = 1000) -> tuple[str, ...]:
    """Return the words for a source that takes a tenth of a second a sample."""
    (tmp_path / "slow.py").write_text(
        f"import time\n\ndef data():\n    return range({samples})\n\n"
        "def step(n):\n    time.sleep(0.1)\n    return {'n': n}\n"
    )
    return ("dataset", "slow:data", "--transform", "slow:step")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP], ids=lambda end: end.name)
def test_a_producer_that_is_ended_leaves_no_job_in_the_queue(any_url: str, tmp_path: Path, end: signal.Signals) -> None:
    """Workers elsewhere would continue with jobs that no process waits for, and the next run would queue them again."""
    producing = start("produce", *slow_source(tmp_path), "--workers", "1", "--url", any_url, cwd=tmp_path)
    with redis.Redis.from_url(any_url) as client:
        awaited(lambda: client.llen("rq:queue:penstock") and client.keys("*entries"))
        os.kill(producing.pid, end)
        code, _, err = ended(producing)
        assert client.llen("rq:queue:penstock") == client.zcard("rq:wip:penstock") == 0
    assert code == 130
    assert err.endswith("stopped; what is committed stands, and the same command goes on from there\n"), err


def test_a_producer_that_is_refused_as_it_starts_ends_in_moments(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path
) -> None:
    """Its cleaning up waited twice for what the server had refused, 60 s each."""
    server = fresh_server()
    with redis.Redis.from_url(server.url) as admin:
        admin.replicaof("127.0.0.1", 1)
    producing = start("produce", *slow_source(tmp_path), "--workers", "1", "--url", server.url, cwd=tmp_path)
    assert producing.stderr is not None
    said = next(line for line in producing.stderr if "is a read-only replica" in line)
    assert said.endswith("trying again for 60 s\n")
    began = time.monotonic()
    producing.terminate()
    code, _, err = ended(producing)
    assert (code, "Traceback" in err) == (130, False), err
    assert time.monotonic() - began < 15


def on_terminal(*words: str, cwd: Path, ignores_hangup: bool = False) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a terminal of its own. Return it, and the end whose close closes the terminal."""
    near, far = os.openpty()
    begin = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); "
    begin += "signal.signal(signal.SIGHUP, signal.SIG_IGN); " if ignores_hangup else ""
    begin += "os.execv(sys.argv[1], sys.argv[1:])"
    started = subprocess.Popen(
        [sys.executable, "-c", begin, sys.executable, "-m", "penstock", *words],
        stdin=far, stdout=far, stderr=far, cwd=cwd, env={**os.environ, "PYTHONPATH": _PATHS}, start_new_session=True,
    )  # fmt: skip
    os.close(far)
    return started, near


def test_a_producer_whose_terminal_is_closed_leaves_no_job_in_the_queue(any_url: str, tmp_path: Path) -> None:
    """All of its processes get the signal, and from then on every print is an error."""
    producing, near = on_terminal("produce", *slow_source(tmp_path), "--workers", "2", "--url", any_url, cwd=tmp_path)
    try:
        with redis.Redis.from_url(any_url) as client:
            awaited(lambda: client.llen("rq:queue:penstock") and client.keys("*entries"))
            os.close(near)
            assert producing.wait(30) == 130
            assert client.llen("rq:queue:penstock") == client.zcard("rq:wip:penstock") == 0
    finally:
        producing.kill()
        producing.wait()


def test_a_producer_that_ignores_the_signal_outlives_its_terminal(any_url: str, tmp_path: Path) -> None:
    """The errors of printing, which may also come before the signal, must not end it."""
    words = ("produce", *slow_source(tmp_path, 60), "--workers", "2", "--url", any_url)
    producing, near = on_terminal(*words, cwd=tmp_path, ignores_hangup=True)
    try:
        with redis.Redis.from_url(any_url) as client:
            awaited(lambda: client.keys("*entries"))
            os.close(near)
            assert producing.wait(60) == 0
            assert client.hgetall("penstock:{train}:epochs") == {b"0": b"produced"}
    finally:
        producing.kill()
        producing.wait()


def test_nohup_keeps_a_command_alive() -> None:
    """A user who ignores SIGHUP wants a production to outlive the terminal."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        end_by_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_a_signal_that_comes_within_a_destructor_ends_the_command() -> None:
    """Python prints what a destructor raises and goes on, so the signal would be lost, and the command never ends."""
    script = """
        import os, signal, time
        from penstock.cli.interrupts import end_by_signals

        class Connection:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)

        end_by_signals()
        Connection()
        time.sleep(20)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": _PATHS},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert ran.returncode == -signal.SIGINT, ran.stderr


def test_sigterm_ends_commands_whose_server_stands_still(fresh_server: Any, tmp_path: Path) -> None:
    """A host goes down, and its Redis first: waits for an answer in each step of the end would add up to minutes."""
    server = fresh_server()
    asked = ("produce", *slow_source(tmp_path), "--workers", "0", "--url", server.url)
    producing = start(*asked, cwd=tmp_path)
    worker = start("worker", "--processes", "3", "--allow", "slow", "--url", server.url, cwd=tmp_path)
    with redis.Redis.from_url(server.url) as client:
        awaited(lambda: client.scard("rq:workers:penstock") == 3 and client.keys("*entries"))
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        worker.terminate()
        producing.terminate()
        codes = [ended(process, 60)[0] for process in (worker, producing)]
        took = time.monotonic() - began
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert codes == [0, 130]
    assert took < 25


# --- run --------------------------------------------------------------------------------------------------------------

TRAINER = """
    import os, sys, time
    from penstock_common.stream.client import connect
    from penstock_common.stream.manifest import retained_epochs
    from penstock_common.stream.streams import find_stream

    client = connect(os.environ["PENSTOCK_URL"])
    while (stream := find_stream(client, "train")) is None or not retained_epochs(client, stream):
        time.sleep(0.05)
    while set(retained_epochs(client, stream).values()) != {"produced"}:
        time.sleep(0.05)
    print("trained at", os.environ["PENSTOCK_QUEUE_URL"])
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """Return a script that waits for the data and ends with the given code."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAINER))
    return path


def test_run_brings_its_own_server_and_passes_the_exit_code_on(photos: Path, trainer: Path) -> None:
    """A first try is a folder, a script, and nothing else, and CI sees the script's exit code."""
    code, out, err = run("run", "images", "photos", "--", sys.executable, trainer.name, "7", cwd=photos.parent)
    assert code == 7, err
    assert re.match("trained at redis://default:[0-9a-f]{64}@127.0.0.1:", out)
    assert "for this run only" in err
    with pytest.raises(redis.ConnectionError, match="refused"), redis.Redis.from_url(out.split()[-1]) as client:
        client.ping()


def test_run_uses_the_server_that_is_named(any_server: EmbeddedServer, photos: Path, trainer: Path) -> None:
    """With PENSTOCK_URL set, the data stays there for other trainers."""
    command = ["run", "images", "photos", "--workers", "1", "--", sys.executable, trainer.name, "0"]
    code, out, err = run(*command, cwd=photos.parent, PENSTOCK_URL=any_server.url)
    assert (code, out) == (0, f"trained at {any_server.url}\n"), err
    assert len(read_epoch(any_server.url)) == 23


def test_a_failed_production_ends_the_trainer_with_one_line(photos: Path) -> None:
    """A trainer that would wait for ever gets the reason and is ended."""
    command = ["run", "images", "photos", "--on-error", "fail", "--workers", "1", "--", "sleep", "60"]
    began = time.monotonic()
    code, _, err = run(*command, cwd=photos.parent)
    assert code == 1
    assert "the production failed, so sleep is ended" in err
    assert "penstock delete" not in err  # the server has ended, so there is nothing to give back
    assert "dog/04.png" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert time.monotonic() - began < 15


def test_the_trainer_starts_before_the_first_sample_is_made(tmp_path: Path) -> None:
    """A framework takes a second to import, in which workers can make the samples of the first batch."""
    (tmp_path / "patient.py").write_text(
        "import pathlib, time\n"
        "def each(n):\n"
        "    deadline = time.monotonic() + 30\n"
        "    while not pathlib.Path('started').exists():\n"
        "        assert time.monotonic() < deadline, 'the trainer is not started'\n"
        "        time.sleep(0.01)\n"
        "    return n\n"
        "data = range(8)\n"
    )
    (tmp_path / "train.py").write_text(
        "import pathlib, penstock\n"
        "pathlib.Path('started').touch()\n"
        "with penstock.Loader('train', group='g', batch_size=8) as loader:\n"
        "    print(sum(len(batch['x']) for batch in loader))\n"
    )
    source = ("dataset", "patient:data", "--transform", "patient:each", "--workers", "1")
    code, out, err = run("run", *source, "--", sys.executable, "train.py", cwd=tmp_path)
    assert (code, out) == (0, "8\n"), err


def test_workers_leave_the_processor_to_the_training_command(tmp_path: Path) -> None:
    """On a host with few cores, workers made its framework's import a quarter longer, and would delay its steps."""
    (tmp_path / "rows.py").write_text("import os\n\ndef each(n):\n    return os.nice(0)\n\ndata = range(8)\n")
    (tmp_path / "train.py").write_text(
        "import os, penstock\n"
        "with penstock.Loader('train', group='g', batch_size=8) as loader:\n"
        "    print([n - os.nice(0) for batch in loader for n in batch['x'].tolist()])\n"
    )
    source = ("dataset", "rows:data", "--transform", "rows:each", "--workers", "1")
    code, out, err = run("run", *source, "--", sys.executable, "train.py", cwd=tmp_path)
    here = os.nice(0)
    added = min(here + 10, 19) - here  # 19 is the kernel's highest niceness, and the tests may run niced themselves
    assert (code, out) == (0, f"{[added] * 8}\n"), err


def test_run_makes_as_many_epochs_as_the_command_reads(tmp_path: Path) -> None:
    """A loop that ends by its steps has no number of epochs. A second number could differ from it."""
    (tmp_path / "mynumbers.py").write_text("data = range(8)\n")
    (tmp_path / "train.py").write_text(
        "import penstock\n"
        "with penstock.Loader('train', group='g', batch_size=8) as loader:\n"
        "    print([sum(int(x) for batch in loader for x in batch['x']) for _ in range(5)])\n"
    )
    source = ("dataset", "mynumbers:data", "--follow", "--workers", "1")
    code, out, err = run("run", *source, "--", sys.executable, "train.py", cwd=tmp_path)
    assert (code, out) == (0, "[28, 28, 28, 28, 28]\n"), err
    assert "whenever the trainer is about to need one, of 8 samples for stream 'train'" in err


def test_a_source_that_means_nothing_starts_no_trainer(tmp_path: Path) -> None:
    """A trainer may begin a run in a tracker, so an error that the command line alone shows must come before it."""
    command = ["sh", "-c", "touch started"]
    code, _, err = run("run", "images", "photos", "--resize", "8", "--crop", "9x9", "--", *command, cwd=tmp_path)
    assert (code, err) == (
        1,
        "penstock: images: crop (9, 9) is larger than resize (8, 8); crop is cut from the resized image\n",
    )
    assert not (tmp_path / "started").exists()


def test_a_source_that_cannot_be_opened_ends_the_trainer(tmp_path: Path) -> None:
    """The trainer would wait for data that never comes."""
    (tmp_path / "photos").mkdir()
    code, _, err = run("run", "images", "photos", "--", "sleep", "60", cwd=tmp_path)
    assert code == 1
    assert "the production failed, so sleep is ended" in err
    assert err.splitlines()[-1].startswith("penstock: no images in photos")


def test_without_rq_whoever_produces_is_told_what_to_install() -> None:
    """The library alone is enough for a trainer, and the first `penstock produce` there must not end in a traceback."""
    script = "import sys; sys.modules['rq'] = None; from penstock.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for argv in (["produce", "images", "photos"], ["run", "images", "photos", "--", "true"], ["worker"]):
        ended = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == 'penstock: producing needs rq: pip install "penstock[producer]"\n'


def test_ctrl_c_ends_trainer_workers_and_server(photos: Path, tmp_path: Path) -> None:
    """No process that run started may remain."""
    command = ["sh", "-c", 'echo "$PENSTOCK_URL"; exec sleep 60']
    session = start("run", "images", "photos", "--epochs", "50", "--budget", "64kb", "--", *command, cwd=tmp_path)
    assert session.stdout is not None
    url = session.stdout.readline().strip()
    with redis.Redis.from_url(url) as client:
        awaited(lambda: list(client.scan_iter("penstock:*:entries")))
    os.killpg(session.pid, signal.SIGINT)
    code, _, err = ended(session)
    assert code == 130, err
    assert "Traceback" not in err
    with pytest.raises(redis.ConnectionError), redis.Redis.from_url(url) as client:
        client.ping()
