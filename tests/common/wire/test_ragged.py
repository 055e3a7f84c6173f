"""`Ragged`, what a batch holds for boxes, token lists and byte strings."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_common.errors import TooLarge
from penstock_common.wire.ragged import Ragged

BOXES = Ragged(np.arange(12, dtype="f4"), np.array([[2, 4], [0, 4], [1, 4]]))
NAMES = Ragged(np.frombuffer(b"hiyou", "u1"), np.array([[2], [0], [3]]), is_bytes=True)


def test_a_sample_comes_in_its_own_shape_without_a_copy() -> None:
    """A training loop uses one image's boxes at a time."""
    assert [sample.shape for sample in BOXES] == [(2, 4), (0, 4), (1, 4)]
    assert BOXES[2].tolist() == BOXES[-1].tolist() == [[8.0, 9.0, 10.0, 11.0]]
    assert np.shares_memory(BOXES[0], BOXES.values)
    assert len(BOXES) == 3
    with pytest.raises(IndexError):
        BOXES[3]


def test_byte_strings_come_as_bytes() -> None:
    """File names and encoded images, empty ones included."""
    assert list(NAMES) == NAMES.tolist() == [b"hi", b"", b"you"]
    assert b"you" in NAMES


def test_a_slice_is_a_ragged_of_fewer_samples() -> None:
    """Gradient accumulation cuts a batch in parts."""
    assert BOXES[1:].tolist() == [[], [[8.0, 9.0, 10.0, 11.0]]]
    assert NAMES[::-1].tolist() == [b"you", b"", b"hi"]
    assert NAMES[::2].tolist() == [b"hi", b"you"]
    assert len(BOXES[5:]) == len(BOXES[2:1]) == len(NAMES[2:1:2]) == 0


def test_samples_can_be_taken_in_any_order() -> None:
    """Shuffling and filtering pick samples by position."""
    assert NAMES.take([2, 0, 2]).tolist() == [b"you", b"hi", b"you"]
    assert BOXES.take(np.array([-1])).tolist() == BOXES[2:].tolist()
    assert len(NAMES.take([])) == 0
    assert not np.shares_memory(NAMES.take([0]).values, NAMES.values)


def test_padding_fills_up_to_the_largest_sample() -> None:
    """Frameworks need rectangles."""
    padded = BOXES.padded(-1)
    assert padded.shape == (3, 2, 4)
    assert padded.dtype == np.float32
    assert padded[1].tolist() == [[-1.0] * 4] * 2
    assert padded[2].tolist() == [[8.0, 9.0, 10.0, 11.0], [-1.0] * 4]
    images = Ragged(np.arange(7, dtype="u1"), np.array([[1, 3], [2, 2]])).padded()
    assert images.tolist() == [[[0, 1, 2], [0, 0, 0]], [[3, 4, 0], [5, 6, 0]]]


def test_padding_refuses_more_memory_than_it_may() -> None:
    """One long and one wide sample make a large rectangle, so any writer of a stream could fill a trainer's memory."""
    shapes = np.array([[500_000, 0], [0, 500_000]])
    with pytest.raises(TooLarge, match="padding 2 samples"):
        Ragged(np.empty(0, "u1"), shapes).padded()
    with pytest.raises(TooLarge):
        BOXES.padded(limit_bytes=95)
    assert BOXES.padded(limit_bytes=96).nbytes == 96


def test_batches_are_joined_without_mixing_samples() -> None:
    """A batch is made of several entries."""
    joined = Ragged.concatenate([BOXES, BOXES[1:]])
    assert joined.tolist() == BOXES.tolist() + BOXES[1:].tolist()
    assert Ragged.concatenate([NAMES, NAMES]).is_bytes
    assert Ragged.concatenate([BOXES]) is BOXES


def test_equality_asks_for_every_sample_and_shape() -> None:
    """Tests of users compare batches."""
    same = Ragged(BOXES.values.copy(), BOXES.shapes.copy())
    assert same == BOXES
    assert same != Ragged(BOXES.values, np.array([[1, 4], [1, 4], [1, 4]]))
    assert BOXES != NAMES
    assert repr(NAMES) == "Ragged(3 samples of bytes, 29 bytes)"


def test_values_that_do_not_fill_the_shapes_are_refused() -> None:
    """A Ragged that exists is consistent."""
    with pytest.raises(ValueError, match="shapes that ask 8"):
        Ragged(np.zeros(7), np.array([[2, 4]]))
