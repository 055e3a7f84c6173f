"""`state_dict`: small, immediate, and refused by other streams and settings."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from penstock_common.errors import StateMismatch, WaitTimeout
from penstock_common.stream.commands import Client
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.feed import loader_of, numbers, produce


def test_a_state_is_small_json_and_asks_nobody(fresh_server: Any) -> None:
    """It is taken between two steps: a thousand times a second, even while the server stands still."""
    server = fresh_server()
    produce(server.url, "t", 100)
    with loader_of(server.url) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for _ in range(1000):
                state = loader.state_dict()
            assert time.monotonic() - began < 1
        finally:
            os.kill(server.pid, signal.SIGCONT)
        text = json.dumps(state)
        assert len(text) < 4096
        assert json.loads(text) == state
        loader.load_state_dict(json.loads(text))


def test_a_state_says_how_much_was_handed_to_training(any_url: str) -> None:
    """Prefetched samples do not count, and here the whole epoch is in memory."""
    produce(any_url, "t", 100, epochs=2)
    with loader_of(any_url) as loader:
        fresh = loader.state_dict()
        assert (fresh["epoch"], fresh["batches"], fresh["samples"]) == (None, 0, 0)
        for count, _ in enumerate(loader, 1):
            state = loader.state_dict()
            assert (state["epoch"], state["batches"], state["samples"]) == (0, count, min(8 * count, 100))
        next(iter(loader))
        state = loader.state_dict()
        assert (state["epoch"], state["batches"], state["samples"]) == (1, 14, 108)


def state_of(url: str, **settings: Any) -> dict[str, Any]:
    """Return the state of a loader after one batch."""
    with loader_of(url, **settings) as loader:
        next(iter(loader))
        return loader.state_dict()


class TestRefusals:
    """A state that is applied to other data would resume a training that never was."""

    @pytest.mark.parametrize(
        ("what", "settings"),
        [("group", {"group": "other"}), ("batch_size", {"batch_size": 9}), ("kind", {"order": "canonical"})],
    )
    def test_a_loader_that_reads_otherwise_refuses_it(self, what: str, settings: dict[str, Any], any_url: str) -> None:
        """A position has its meaning only with the same batch size, order and group."""
        produce(any_url, "t", 100)
        state = state_of(any_url)
        if what == "kind":
            state["group"] = settings["group"] = "ranked"  # a group has one kind for ever
        with loader_of(any_url, **settings) as loader, pytest.raises(StateMismatch, match=what) as caught:
            loader.load_state_dict(state)
        assert caught.value.what == what

    def test_a_stream_made_again_under_its_name_refuses_it(self, any_url: str, any_client: Client) -> None:
        """The name and the spec are the same, but the samples differ, and only the id shows it."""
        produce(any_url, "t", 100)
        state = state_of(any_url)
        any_client.flushall()
        produce(any_url, "t", 100)
        with loader_of(any_url) as loader, pytest.raises(StateMismatch, match=r"stream_id .*made again since"):
            loader.load_state_dict(state)

    def test_another_stream_refuses_it(self, any_url: str) -> None:
        """The path of a checkpoint is easily confused."""
        produce(any_url, "t", 100)
        state = state_of(any_url)
        produce(any_url, "valid", 100)
        with (
            Loader("valid", group="g", batch_size=8, url=any_url) as loader,
            pytest.raises(StateMismatch, match="stream 't', the loader 'valid'"),
        ):
            loader.load_state_dict(state)

    def test_another_spec_refuses_it(self, any_url: str) -> None:
        """A user who edits a state, or restores a server from an old copy, learns which part differs."""
        produce(any_url, "t", 100)
        state = state_of(any_url)
        with Writer("u", url=any_url, spec={"x": ("float32", (4,))}, tuning=Tuning(notify=lambda _: None)) as writer:
            writer.write({"x": [0, 0, 0, 0]})
        with Loader("u", group="g", batch_size=8, url=any_url) as other:
            state["spec"] = other.state_dict()["spec"]
        with loader_of(any_url) as loader, pytest.raises(StateMismatch, match="spec"):
            loader.load_state_dict(state)

    @pytest.mark.parametrize("steps", [3 * 13, 3 * 13 + 2])
    @pytest.mark.parametrize(("written_again", "what"), [(0, "epoch"), (4, "manifest")])
    def test_a_server_that_came_back_older_refuses_it(
        self, any_url: str, any_client: Client, steps: int, written_again: int, what: str
    ) -> None:
        """Its new epochs have the old numbers. A rank took what nobody had trained on for acknowledged."""
        produce(any_url, "t", 100)
        with loader_of(any_url, order="canonical") as loader:
            next(iter(loader))
        backup = {key: any_client.dump(key) for key in any_client.scan_iter()}
        produce(any_url, "t", 100, epochs=3)
        with loader_of(any_url, order="canonical") as loader:
            batches = (batch for _ in range(4) for batch in loader)
            for _ in range(steps):
                next(batches)
            state = json.loads(json.dumps(loader.state_dict()))
            loader.load_state_dict(state)
        any_client.flushall()
        for key, value in backup.items():
            any_client.restore(key, 0, value)
        if written_again:
            produce(any_url, "t", 100, epochs=written_again)
        with loader_of(any_url, order="canonical") as loader:
            with pytest.raises(StateMismatch, match=f"has {what} .* came back from before") as caught:
                loader.load_state_dict(state)
            assert caught.value.what == what
            assert next(iter(loader)).epoch == 0

    def test_a_refused_state_leaves_the_pass_as_it_is(self, any_url: str) -> None:
        """What was trained on was forgotten, and the next pass began before it."""
        produce(any_url, "t", 100)
        with loader_of(any_url, order="canonical", acknowledge="on_checkpoint") as loader:
            batches = iter(loader)
            seen = numbers(next(batches) for _ in range(3))
            with pytest.raises(StateMismatch, match="manifest"):
                loader.load_state_dict({**loader.state_dict(), "manifest": "made again"})
            assert seen + numbers(batches) == list(range(100))
            loader.checkpointed()
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)

    def test_a_start_beyond_the_newest_epoch_is_no_state(self, any_url: str) -> None:
        """A group that has read some epochs may be told to begin with a later one, which is not there yet."""
        produce(any_url, "t", 100, epochs=2)
        with loader_of(any_url, order="canonical") as loader:
            numbers(loader)
        produce(any_url, "t", 100)
        settings: dict[str, Any] = {"order": "canonical", "timeout_s": 0.2}
        with loader_of(any_url, start=4, **settings) as loader, pytest.raises(WaitTimeout, match="has read epoch"):
            next(iter(loader))

    @pytest.mark.parametrize("state", [{}, {"version": 2}, None, [], "state"])
    def test_what_is_no_state_is_refused(self, state: Any, any_url: str) -> None:
        """The state may come from a newer Penstock, or from another library."""
        produce(any_url, "t", 10)
        with loader_of(any_url) as loader, pytest.raises(StateMismatch, match="version"):
            loader.load_state_dict(state)

    def test_a_checkpoint_counts_the_batches_of_its_own_loader(self, any_url: str) -> None:
        """After a restart the same count means other batches, and acknowledging by it would lose some."""
        produce(any_url, "t", 100)
        state = state_of(any_url, acknowledge="on_checkpoint")
        with loader_of(any_url, acknowledge="on_checkpoint") as loader:
            next(iter(loader))
            with pytest.raises(StateMismatch, match="loader"):
                loader.checkpointed(state)


class TestGoingOn:
    """A plain loop may rely on these rules when it resumes."""

    def test_a_state_loaded_in_the_middle_of_a_loop_ends_it(self, any_url: str) -> None:
        """The state does not contain the loop's next batch, so the next loop begins at the state."""
        produce(any_url, "t", 100)
        with loader_of(any_url, group="o", order="canonical") as loader:
            seen: list[list[int]] = []
            for batch in loader:
                seen.append(batch["y"].tolist())
                if len(seen) == 2:
                    state = loader.state_dict()
                if len(seen) == 6:
                    loader.load_state_dict(state)
            assert len(seen) == 6
            again = [batch["y"].tolist() for batch in loader]
        assert again[:4] == seen[2:]
        assert [number for row in seen[:2] + again for number in row] == list(range(100))

    def test_a_state_that_was_tampered_with_moves_nothing(self, any_url: str) -> None:
        """A partial state, or one that counts too much, would acknowledge or skip untrained samples."""
        produce(any_url, "t", 100)
        with loader_of(any_url, group="o", order="canonical", acknowledge="on_checkpoint") as loader:
            batches = iter(loader)
            first = [next(batches)["y"].tolist() for _ in range(3)]
            state = loader.state_dict()
            for changes in ({"position": 5}, {"position": -8}, {"position": None}, {"epoch": "0"}):
                with pytest.raises(StateMismatch, match=next(iter(changes))):
                    loader.load_state_dict({**state, **changes})
            for count in (4, -1):
                with pytest.raises(StateMismatch, match="batches"):
                    loader.checkpointed({**state, "batches": count})
            first += [batch["y"].tolist() for batch in batches]
            assert [number for row in first for number in row] == list(range(100))
            loader.checkpointed(state)
        with loader_of(any_url, group="o", order="canonical") as loader:
            assert next(iter(loader))["y"].tolist() == list(range(24, 32))
