"""Wrote the fixtures of this folder, with the packages of commit 0be23fc. To write them again, from this repository:

    git worktree add --detach ../penstock-0be23fc 0be23fc
    old=$(cd ../penstock-0be23fc && pwd)
    PYTHONPATH=$old/common:$old/producer:$old/consumer:$old/front .venv/bin/python -m tests.kept.write
    git worktree remove ../penstock-0be23fc

It calls what users call, so any later commit could write its own. Each reader and writer is a process of its own. Most
of these processes are killed, so what they held is pending.

``keys.json``: every Redis key, see `tests.kept.keys`. ``segments.tar.gz``: the files of the stream ``files``.
``expected.json``: what the old code read, audited and saved: states, and what came after each.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis

import penstock
from penstock.__main__ import main as command
from tests.kept.keys import describe
from tests.kept.samples import SAMPLE_BYTES, SPEC, numbers, sample

HERE = Path(__file__).parent
COMMIT = "0be23fc"
ROOT = "/kept/segments"
"""Replaces the folder of segments in the fixture, and a test puts its own folder there."""
BATCH = 4
Writer: Any = penstock.Writer
Loader: Any = penstock.Loader
"""With the arguments of that commit, which no type checker knows today."""
SMALL_BUDGET = 32 << 10
"""The budget of the feed and of the stream in segments, in bytes.

The feed goes into its next epoch after an eighth of it, and the size of the segments follows from it.
"""
STREAMS = ("train", "feed", "files", "hurt")

Row = tuple[tuple[int, int, int], int]
"""(epoch, shard, offset), and the sample's number."""


def main() -> None:
    """Writes the three files."""
    home = Path(penstock.__file__).parents[2]
    found = subprocess.run(["git", "-C", home, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    if not found.startswith(COMMIT):
        raise SystemExit(f"penstock is that of {home} at {found.strip()}, expected {COMMIT}: see the docstring")
    with tempfile.TemporaryDirectory() as folder, penstock.EmbeddedServer() as server:
        os.environ["PENSTOCK_URL"] = server.url
        root = Path(folder) / "segments"
        expected: dict[str, Any] = {"commit": found.strip(), "states": {}}
        write_train(expected["states"])
        write_feed()
        write_files(root)
        write_hurt(server.url)
        expected["epochs"] = {name: replayed(name) for name in STREAMS}
        expected["audits"] = {name: asked("audit", name, "--deep") for name in STREAMS}
        expected["bad"] = asked("bad", "list", "hurt")
        with redis.Redis.from_url(server.url) as client:
            keys = describe(client)
        text = lines(keys).replace(str(root), ROOT)
        (HERE / "keys.json").write_text(text)
        (HERE / "expected.json").write_text(lines(expected).replace(str(root), ROOT))
        with tarfile.open(HERE / "segments.tar.gz", "w:gz") as archive:
            archive.add(root, arcname="segments")


def lines(fields: dict[str, Any]) -> str:
    """A JSON object, a line for each of its fields."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()) + "\n}\n"


# --- processes --------------------------------------------------------------------------------------------------------


def in_process(work: Callable[[Callable[[Any], None]], None]) -> Any:
    """Return what ``work`` reports in a process that is then killed, or None if it ends without a report."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _run(work: Callable[[Callable[[Any], None]], None], pipe: Connection) -> None:
    def say_and_die(found: Any) -> None:
        pipe.send(found)
        os.kill(os.getpid(), signal.SIGKILL)

    work(say_and_die)


def asked(*arguments: str) -> Any:
    """Return a command's answer with ``--json``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command([*arguments, "--json"])
    return json.loads(printed.getvalue())


def told(*arguments: str) -> None:
    """Runs a command that must succeed."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert command(list(arguments)) == 0, arguments


def rows(batch: Any) -> list[Row]:
    """Each sample of a batch by identity and number, after comparing every byte."""
    return list(zip(batch.identities(), numbers(batch), strict=True))


def all_rows(batches: Iterable[Any]) -> list[Row]:
    """Those of several batches."""
    return [row for batch in batches for row in rows(batch)]


def replayed(name: str) -> dict[str, list[Row]]:
    """Complete epoch -> its samples in canonical order."""
    found = {}
    for epoch in asked("inspect", name)["epochs"]:
        if epoch["state"] == "produced":
            with penstock.Replay(name, epoch=epoch["epoch"], batch_size=BATCH) as replay:
                found[str(epoch["epoch"])] = all_rows(replay)
    return found


def write_epoch(writer: Any, sizes: list[int], first: int, bad: tuple[int, ...] = ()) -> None:
    """A planned epoch of the samples from ``first`` on."""
    epoch = writer.epoch(sizes=sizes, seed=7)
    for shard, size in enumerate(sizes):
        with epoch.shard(shard) as lane:
            for number in range(first, first + size):
                if number in bad:
                    lane.quarantine(f"sample {number} is bad on purpose")
                else:
                    lane.write(sample(number))
        first += size


# --- train: epochs, groups of both kinds, states ----------------------------------------------------------------------


def loader_of(stream: str, group: str, **settings: Any) -> Any:
    """A quiet loader."""
    return Loader(stream, group=group, batch_size=BATCH, notify=quiet, timeout_s=20, **settings)


def quiet(_: str) -> None:
    """Says nothing."""


def write_train(states: dict[str, Any]) -> None:
    """Epoch 0 is released, 1 read by some, 2 pinned and partly read, 3 open."""
    with Writer(
        "train", spec=SPEC, partitions=2, block_bytes=5 * SAMPLE_BYTES, info={"made": "kept"}, notify=quiet
    ) as writer:
        write_epoch(writer, [12, 9], 0)
        for group in ("resnet", "drained"):
            with loader_of("train", group) as loader:
                all_rows(loader)
        told("trim", "train", "--keep", "0")
        write_epoch(writer, [14, 11, 6], 100, bad=(103, 124))
        write_epoch(writer, [20, 16, 0], 200)
    told("epochs", "pin", "train", "2")
    told("groups", "declare", "train", "late")
    in_process(half_an_epoch)
    with loader_of("train", "resnet") as loader:
        all_rows(loader)
    leave_with_some_in_hand()
    states["shared"] = in_process(shared_state)
    for rank in (0, 1):
        states[f"rank {rank}"] = in_process(lambda say, rank=rank: ordered_state(say, rank))  # type: ignore[misc]
    states["torch"] = in_process(torch_state)
    states["mixture"] = in_process(mixture_state)


def half_an_epoch(say: Callable[[Any], None]) -> None:
    """A writer that is killed in an open epoch."""
    writer = Writer("train", notify=quiet)
    with writer.epoch().shard(0) as lane:
        for number in range(300, 317):
            lane.write(sample(number))
        lane.commit_all()
        say(None)


def leave_with_some_in_hand() -> None:
    """A member of resnet that acknowledges two batches of epoch 2 and hands the rest back."""
    with loader_of("train", "resnet", member="b", acknowledge="manual") as loader:
        batches = iter(loader)
        held = [next(batches) for _ in range(4)]
        for batch in held[:2]:
            loader.acknowledge(batch)


def shared_state(say: Callable[[Any], None]) -> None:
    """Member a of resnet saves a checkpoint in the middle of epoch 2, reads on, and is killed."""
    loader = loader_of("train", "resnet", member="a", acknowledge="on_checkpoint")
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    loader.checkpointed(state)
    say({"state": state, "after": all_rows(batches)})


def ordered_state(say: Callable[[Any], None], rank: int) -> None:
    """A rank of two saves a checkpoint after two steps of epoch 1, reads it to its end, and is killed."""
    loader = loader_of(
        "train", "ranks", order="canonical", rank=rank, world_size=2, start=1, acknowledge="on_checkpoint"
    )
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    loader.checkpointed(state)
    say({"state": state, "after": [rows(batch) for batch in batches]})


def torch_state(say: Callable[[Any], None]) -> None:
    """Report the state behind penstock.torch in the middle of epoch 1."""
    from penstock.torch import dataset

    loader = loader_of("train", "torched", order="canonical", start=1, acknowledge="on_checkpoint")
    data = dataset(loader)
    batches = iter(data)
    for _ in range(3):
        next(batches)
    state = data.state_dict()
    say({"state": state, "after": [[int(y) for y in batch["y"]] for batch in batches]})


def mixture_state(say: Callable[[Any], None]) -> None:
    """Report the state of a mixture of two ordered groups of one stream, in one pass."""
    loaders = [
        loader_of("train", group, order="canonical", start=start, acknowledge="on_checkpoint")
        for group, start in (("mixed1", 1), ("mixed2", 2))
    ]
    mixture = penstock.mix({loader.group: (loader, weight) for loader, weight in zip(loaders, (1, 1), strict=True)})
    batches = iter(mixture)
    for _ in range(5):
        next(batches)
    state = mixture.state_dict()
    say({"state": state, "after": [rows(batch) for batch in batches]})


# --- the others -------------------------------------------------------------------------------------------------------


def write_feed() -> None:
    """A feed whose epoch 0 is sealed and has an unfinished shard, and epoch 1 open; a group has read a part."""
    with Writer("feed", spec=SPEC, budget_bytes=SMALL_BUDGET, block_bytes=6 * SAMPLE_BYTES, notify=quiet):
        pass
    in_process(feed_a_little)
    in_process(feed_a_lot)
    told("groups", "declare", "feed", "tail")
    in_process(read_the_feed)


def feed_a_little(say: Callable[[Any], None]) -> None:
    """A writer that is killed in its shard."""
    writer = Writer("feed", notify=quiet)
    for number in range(400, 411):
        writer.write(sample(number))
    writer.flush()
    say(None)


def feed_a_lot(say: Callable[[Any], None]) -> None:
    """A writer that goes on into a second epoch, and seals the first by that."""
    writer = Writer("feed", notify=quiet)
    number = 500
    while len(asked("inspect", "feed")["epochs"]) < 2:
        for _ in range(100):
            writer.write(sample(number))
            number += 1
    writer.flush()
    say(None)


def read_the_feed(say: Callable[[Any], None]) -> None:
    """A member that settled some of the feed, holds some, and is killed."""
    loader = loader_of("feed", "tail", member="a", acknowledge="manual")
    batches = iter(loader)
    held = [next(batches) for _ in range(9)]
    for batch in held[:5]:
        loader.acknowledge(batch)
    say(None)


def write_files(root: Path) -> None:
    """Write one epoch in segments, and let a group read a part of it."""
    with Writer(
        "files",
        spec=SPEC,
        payload=f"segments:{root}",
        budget_bytes=SMALL_BUDGET,
        block_bytes=5 * SAMPLE_BYTES,
        notify=quiet,
    ) as writer:
        write_epoch(writer, [13, 9], 600, bad=(607,))
    in_process(read_the_files)


def read_the_files(say: Callable[[Any], None]) -> None:
    """A member that is killed."""
    loader = loader_of("files", "tail", member="a", acknowledge="manual")
    batches = iter(loader)
    held = [next(batches) for _ in range(4)]
    loader.acknowledge(held[0])
    loader.acknowledge(held[1])
    say(None)


def write_hurt(url: str) -> None:
    """Dead letters: an entry that no commit wrote, and one that an operator gave up."""
    with Writer("hurt", spec=SPEC, block_bytes=5 * SAMPLE_BYTES, notify=quiet) as writer:
        write_epoch(writer, [10, 10], 700)
    with redis.Redis.from_url(url) as client:
        entries = next(client.scan_iter(match="penstock:{hurt.*:entries"))
        given_up = client.xrange(entries, count=1)[0][0]
        client.xadd(entries, {"meta": "not a header"})
    in_process(hold_the_first)
    told("groups", "declare", "hurt", "g")
    told("bad", "drop", "hurt", "0", given_up.decode(), "--group", "g", "--reason", "kept")
    with loader_of("hurt", "g", member="a") as loader:
        all_rows(loader)


def hold_the_first(say: Callable[[Any], None]) -> None:
    """A member that is killed with all it was given."""
    next(iter(loader_of("hurt", "g", member="a")))
    say(None)


if __name__ == "__main__":
    main()
