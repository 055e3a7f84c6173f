"""Send elements to a device ahead of the step that wants them: `prefetch_to_device`.

``torch`` decides what is acknowledged, and when. An element that was sent ahead is not trained on yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from penstock_common.hints import explained
from penstock_consumer.adapters.torch import AcknowledgingIterable, Token, acknowledging, is_replayed, mapped
from penstock_consumer.read.hooks import AlwaysTrue
from penstock_consumer.replay.passes import held_back

BATCHES_AHEAD = 2
"""The batches on the device: the step's, and one that is copied during the step."""
Sent = tuple[Any, Any]
"""An element on the device, and the event that follows its copy."""


@explained
def prefetch_to_device(batches: Any, device: Any) -> DeviceBatches | ReplayOnDevice:
    """Return the same batches on a device, acknowledged by this process as by `acknowledging`.

    For CUDA a batch is copied from pinned memory on a side stream while a step runs. To other devices it is moved
    without a stream, and on the CPU it stays as it is. Nothing waits for a batch only to have it early. In a replay,
    which nothing acknowledges, the next batch is always sent ahead.

    Args:
        batches: the result of `dataset`, or a DataLoader or StatefulDataLoader of it with ``batch_size=None``.
        device: a ``torch.device`` or its name, such as ``"cuda:1"``.

    Returns:
        An iterable of batches on the device, with ``state_dict`` and ``load_state_dict`` unless it is a replay.

    Raises:
        ValueError: the device does not exist.

    Example:
        >>> for batch in penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), "cuda"):
        ...     train(batch["x"], batch["y"])
    """
    to = _device(device)
    side: DeviceCopier = StreamCopier(to) if to.type == "cuda" else _PlainCopier(to)
    return ReplayOnDevice(batches, side) if is_replayed(batches) else DeviceBatches(acknowledging(batches), side)


def _device(device: Any) -> torch.device:
    """Return the device, or raise ValueError if it does not exist."""
    try:
        to = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r:.40}, expected one such as 'cuda', 'cuda:1' or 'cpu'") from error
    if to.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {device!r:.40}, and torch finds no CUDA here (torch.cuda.is_available() is False): write "
            "'cpu', or install a torch that was built for this GPU"
        )
    return to


class _PlainCopier:
    """A copier that moves elements to a device without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, element: Any) -> Any:
        return mapped(element, lambda tensor: tensor.to(self._device))

    def hand(self, sent: Any) -> Any:
        return sent


class DeviceBatches(AlwaysTrue):
    """Batches that are sent ahead of the step. They are acknowledged once the step is done with them, not when sent."""

    def __init__(self, source: AcknowledgingIterable, side: DeviceCopier) -> None:
        self.source, self._side = source, side

    def __len__(self) -> int:
        return len(self.source)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state. A StatefulDataLoader's own would count batches that were only sent ahead."""
        return self.source.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the rest of the pass that the state was taken in. Raises StateMismatch, ReplayTruncated."""
        self.source.dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        dataset, elements = self.source.dataset, self.source.elements()
        sent: deque[tuple[Any, Token]] = deque()
        while True:
            while len(sent) < BATCHES_AHEAD and (not sent or self.source.is_ready):
                pair = next(elements, None)
                if pair is None:
                    break
                sent.append((self._side.send(pair[0]), pair[1]))
                del pair
            if not sent:
                break
            element, token = sent.popleft()
            dataset.arrive(token)
            mine = dataset.tracker.running
            yield self._side.hand(element)
            del element
            if dataset.tracker.running is not mine:
                return  # another pass took over
            dataset.tracker.report()
        dataset.finish()


class ReplayOnDevice(AlwaysTrue):
    """Batches of a replay that are sent ahead of the step."""

    def __init__(self, batches: Any, side: DeviceCopier) -> None:
        self._batches, self._side = batches, side

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        sent = held_back(map(self._side.send, self._batches), BATCHES_AHEAD - 1)
        yield from map(self._side.hand, sent)


class DeviceCopier(Protocol):
    """A copier that moves elements during the step."""

    def send(self, element: Any) -> Any:
        """Begin to move an element."""

    def hand(self, sent: Any) -> Any:
        """Return a sent element for the step."""


class StreamCopier:
    """A copier from pinned memory to a CUDA device, on a stream of its own, during the step.

    It follows PyTorch's documentation. ``non_blocking`` copies are asynchronous from pinned memory only. The step's
    stream waits for the copy, and ``record_stream`` keeps the memory until that stream is done with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def send(self, element: Any) -> Sent:
        """Start the copy. The batch's own memory is free when this returns."""
        with torch.cuda.stream(self._stream):
            sent = mapped(element, self._copied)
        return sent, self._stream.record_event()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def hand(self, sent: Sent) -> Any:
        """Give a sent element to the current stream."""
        element, copied = sent
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)

        def recorded(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        return mapped(element, recorded)
