"""`prefetch_to_device` on CUDA, as far as a host without CUDA can test it: the calls to PyTorch, and their order.

The rules are those of PyTorch's notes on CUDA semantics; a device that does not keep them would compute on half a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.contracts.adapter import SAMPLES, STREAM, acknowledged, delivered, loader_of
from tests.contracts.feed import produce

torch = pytest.importorskip("torch")

from penstock.torch import dataset, prefetch_to_device  # noqa: E402 - only where PyTorch is


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recorded calls to CUDA. The tensors stay where they are."""
    made: list[Any] = []
    inside: list[str] = ["step"]

    class Stream:
        def __init__(self, device: Any) -> None:
            made.append(("stream", str(device)))

        def record_event(self) -> str:
            made.append("event")
            return f"event {made.count('event')}"

    class Current:
        def wait_event(self, event: str) -> None:
            made.append(("wait", event))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        inside.append("side")
        yield
        inside.pop()

    def to(self: Any, device: Any, *, non_blocking: bool) -> Any:
        made.append(("copy", str(device), non_blocking, self.data_ptr() in pinned, inside[-1]))
        return self

    pinned: set[int] = set()

    def pin(self: Any) -> Any:
        copy = self.clone()
        pinned.add(copy.data_ptr())
        return copy

    current = Current()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: made.append(("keeps", stream is current)))
    return made


def test_copies_run_beside_the_step_from_pinned_memory_and_are_waited_for(any_url: str, calls: list[Any]) -> None:
    """An element: both tensors are copied on the side stream, an event follows, and the step's stream waits for it."""
    produce(any_url, STREAM, SAMPLES)
    numbers: list[int] = []
    with loader_of(any_url) as loader:
        for steps, batch in enumerate(prefetch_to_device(dataset(loader), "cuda"), 1):
            numbers += batch["y"].tolist()
            assert calls.count("event") - steps in (0, 1)  # at most one is sent ahead of the step's
            assert calls[-3:] == [("wait", f"event {steps}"), ("keeps", True), ("keeps", True)]
            calls.append("step")
    assert sorted(numbers) == list(range(SAMPLES))
    assert calls[0] == ("stream", "cuda")
    copies = [at for at, call in enumerate(calls) if call == "event"]
    assert len(copies) == -(-SAMPLES // 8)
    assert all(calls[at - 2 : at] == [("copy", "cuda", True, True, "side")] * 2 for at in copies)
    assert delivered(any_url) == [SAMPLES]
    assert acknowledged(any_url)
