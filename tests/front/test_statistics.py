"""Statistics of a stream of samples: for any pieces, dtypes and ragged shapes, they equal numpy's."""

from __future__ import annotations

import ast
import json
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.views.stat import MOST_DISTINCT, QUANTILES, TensorSummary, as_json, paste_lines
from penstock.views.statistics import RATIO_BLOCKS, RATIO_BYTES, CompressionEstimate, Moments, UniformSample
from penstock_common.wire import compression
from penstock_common.wire.block import BlockBuilder, Column
from penstock_common.wire.spec import Spec

NUMBERS = st.floats(width=32) | st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e8])


def summary_of(dtype: str, shape: tuple[int | None, ...], samples: list[Any], piece: int = 7) -> TensorSummary:
    """Summarise one tensor, with samples fed in blocks of ``piece``, in each block the odd rows first."""
    spec = Spec.of({"x": (dtype, shape)})
    summary = TensorSummary(spec["x"], np.random.default_rng(0))
    for start in range(0, len(samples), piece):
        builder = BlockBuilder(spec, 1 << 30, 1000)
        for sample in samples[start : start + piece]:
            builder.add({"x": sample})
        block = builder.finish(start)
        for rows in (np.arange(1, block.count, 2), np.arange(0, block.count, 2)):
            summary.add(block.columns[0], rows, lambda row, start=start: f"0/0/{start + row}")  # type: ignore[misc]
    return summary


@given(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), max_size=60), st.integers(1, 20))
@settings(deadline=None, max_examples=200)
def test_moments_of_pieces_are_those_of_the_whole(rows: list[list[float]], piece: int) -> None:
    """A mean that depends on how entries were cut would differ from run to run, and cancellation would spoil it."""
    whole = np.array(rows, dtype=np.float64).reshape(-1, 2)
    merged = Moments.none(2)
    for start in range(0, len(whole), piece):
        merged = merged.merge(Moments.of(whole[start : start + piece]))
    for column in range(2):
        values = whole[:, column]
        finite = values[np.isfinite(values)]
        assert (merged.count[column], merged.nan[column]) == (len(finite), np.isnan(values).sum())
        assert merged.infinite[column] == np.isinf(values).sum()
        if len(finite):
            scale = np.abs(finite).max()
            assert merged.mean[column] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * scale)
            assert merged.std[column] == pytest.approx(finite.std(), rel=1e-6, abs=1e-9 * scale)
            assert (merged.low[column], merged.high[column]) == (finite.min(), finite.max())
    pooled, every = merged.pooled(), whole[np.isfinite(whole)]
    assert pooled.count[0] == len(every)
    if len(every):
        assert pooled.std[0] == pytest.approx(every.std(), rel=1e-6, abs=1e-9 * np.abs(every).max())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100), st.integers(1, 30))
@settings(deadline=None, max_examples=100)
def test_a_draw_of_few_numbers_is_all_of_them(values: list[float], piece: int) -> None:
    """Small streams get exactly numpy's quantiles."""
    draw = UniformSample(np.random.default_rng(1), kept=100)
    for start in range(0, len(values), piece):
        draw.add(np.array(values[start : start + piece]))
    assert draw.is_whole
    assert sorted(draw.values.tolist()) == sorted(values)
    assert draw.quantiles(QUANTILES) == pytest.approx(np.quantile(values, QUANTILES).tolist())


def test_a_draw_is_bounded_uniform_and_repeatable() -> None:
    """The documented error holds for numbers anywhere in the stream, and a seed gives the same result."""

    def drawn(seed: int) -> UniformSample:
        draw = UniformSample(np.random.default_rng(seed), kept=2000)
        for start in range(0, 200_000, 3000):  # rising, so that a draw in favour of the beginning or the end would show
            draw.add(np.arange(start, min(start + 3000, 200_000), dtype=np.float64))
        return draw

    bad = 0
    for seed in range(12):
        draw = drawn(seed)
        assert (draw.seen, len(draw.values), len(set(draw.values.tolist()))) == (200_000, 2000, 2000)
        for q, found in zip(QUANTILES, draw.quantiles(QUANTILES), strict=True):
            bad += abs(found / 200_000 - q) > 3 * np.sqrt(q * (1 - q) / 2000)
    assert bad <= 3  # of 84, each with a chance of 0.3 %
    assert drawn(3).values.tolist() == drawn(3).values.tolist()
    assert drawn(3).values.tolist() != drawn(4).values.tolist()


DTYPES = ["bool", "uint8", "int8", "int16", "int64", "uint64", "float16", "bfloat16", "float32", "float64", "complex64"]


def made(dtype: str, count: int, shape: tuple[int, ...]) -> list[NDArray[Any]]:
    """Return samples over much of the dtype's range."""
    from penstock_common.wire.dtypes import numpy_dtype

    rng = np.random.default_rng(5)
    low, high = {"bool": (0, 2), "int8": (-128, 128)}.get(dtype, (0, 200))
    wide = rng.integers(low, high, (count, *shape)).astype(np.float64)
    if dtype.startswith("complex"):
        return list((wide + 1j * rng.normal(size=wide.shape)).astype(numpy_dtype(dtype)))
    return list((wide if "float" not in dtype else rng.normal(size=wide.shape)).astype(numpy_dtype(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [(6, 5, 3), (3, 6, 5), (4,), ()], ids=str)
def test_every_dtype_and_layout_has_numpys_statistics(dtype: str, layout: tuple[int, ...]) -> None:
    """Lines pasted into a training script must be right for this stream, also for bfloat16."""
    samples = made(dtype, 40, layout)
    told = as_json(summary := summary_of(dtype, layout, samples))
    whole = np.stack(samples)
    real = (np.abs(whole) if dtype.startswith("complex") else whole).astype(np.float64)
    assert (told["samples"], told["numbers"], told["bytes"]) == (40, whole.size, whole.nbytes)
    assert (told["min"], told["max"]) == pytest.approx((real.min(), real.max()))
    assert (told["mean"], told["std"]) == pytest.approx((real.mean(), real.std()))
    exact = np.quantile(real, QUANTILES, method="inverted_cdf" if summary.distinct is not None else "linear")
    assert list(told["quantiles"].values()) == pytest.approx(exact.tolist())
    assert sum(told["histogram"]["counts"]) == whole.size
    if len(layout) == 3:
        others = (0, 1, 2) if layout[-1] == 3 else (0, 2, 3)
        assert told["channels"]["mean"] == pytest.approx(real.mean(axis=others).tolist())
        assert told["channels"]["std"] == pytest.approx(real.std(axis=others).tolist())
    json.dumps(told, allow_nan=False)


def test_ragged_samples_and_byte_strings_have_statistics() -> None:
    """Pictures of different sizes are the most common raw data set, and byte strings have statistics of their
    lengths.
    """
    rng = np.random.default_rng(2)
    pictures = [rng.integers(0, 256, (int(h), int(w), 3), np.uint8) for h, w in rng.integers(4, 20, (30, 2))]
    told = as_json(summary_of("uint8", (None, None, 3), pictures))
    flat = np.concatenate([picture.reshape(-1, 3) for picture in pictures]).astype(np.float64)
    assert told["channels"]["mean"] == pytest.approx(flat.mean(axis=0).tolist())
    assert told["shapes_seen"]["least"] == [min(p.shape[d] for p in pictures) for d in range(3)]
    assert told["shapes_seen"]["greatest"] == [max(p.shape[d] for p in pictures) for d in range(3)]
    assert (told["numbers"], told["bytes"]) == (flat.size, flat.size)
    texts = [b"x" * int(n) for n in rng.integers(0, 50, 60)]
    told = as_json(summary_of("bytes", (), texts))
    lengths = [len(text) for text in texts]
    assert (told["of"], told["min"], told["max"]) == ("length", min(lengths), max(lengths))
    assert (told["mean"], told["bytes"]) == (pytest.approx(np.mean(lengths)), sum(lengths))
    boxes = [np.zeros((0, 4), np.float32), np.ones((3, 4), np.float32)]
    assert as_json(summary_of("float32", (None, 4), boxes))["shapes_seen"] == {"least": [0, 4], "greatest": [3, 4]}
    empty = as_json(summary_of("float32", (None,), [np.zeros(0, np.float32)] * 3))
    assert (empty["mean"], empty["min"], empty["histogram"]["counts"]) == (None, None, [])
    json.dumps(empty, allow_nan=False)


@pytest.mark.parametrize("shape", [(2, 3), (None, 3)], ids=str)
def test_signalling_nans_warn_nobody(shape: tuple[int | None, ...]) -> None:
    """Random bits read as floats have some, and numpy warns as it compares them."""
    samples = list(np.full((50, 2, 6), 0x7FA00000, np.uint32).view(np.complex64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = summary_of("complex64", shape, samples)
    assert summary.constant.count == 0


def test_many_different_integers_do_not_take_memory() -> None:
    """Token ids are integers, and there are billions: counting each would be a leak."""
    summary = summary_of("int64", (1000,), [np.arange(n * 1000, (n + 1) * 1000) for n in range(20)])
    assert MOST_DISTINCT < 20_000
    assert summary.distinct is None
    assert summary.bounds() == (0, 19_999)
    assert summary.quantiles((0.5,)) == pytest.approx([9999.5])


@pytest.mark.parametrize("values", [[2**62, 2**62 + 1], [0, 2**64 - 1], [5], [2**63, 2**63]])
def test_the_largest_integers_are_told_exactly(values: list[int]) -> None:
    """Hashes and ids are integers that no float64 holds; rounding them would name another sample."""
    told = as_json(summary_of("uint64", (), values))
    assert (told["min"], told["max"]) == (min(values), max(values))
    assert sum(told["histogram"]["counts"]) == len(values)
    assert [one["class"] for one in told["classes"]] == sorted(set(values))


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e-320, 0.0], [1.0, 1.0 + 2**-52], [np.inf], [3.0]])
def test_the_ends_of_float64_do_not_end_the_statistics(values: list[float]) -> None:
    """One broken sample must not hide the statistics of the others."""
    told = as_json(summary_of("float64", (2,), [np.full(2, value) for value in values]))
    finite = [value for value in values if np.isfinite(value)]
    assert (told["min"], told["max"]) == ((min(finite), max(finite)) if finite else (None, None))
    json.dumps(told, allow_nan=False)


def test_what_to_paste_normalises_the_data() -> None:
    """Users trust a line that they copy into a script: it must parse, and do what it says to the actual numbers."""
    rng = np.random.default_rng(3)
    pictures = [rng.normal((30, 90, 200), (5, 10, 20), (16, 16, 3)).clip(0, 255).astype(np.uint8) for _ in range(20)]
    lines = paste_lines(summary_of("uint8", (16, 16, 3), pictures))
    whole = np.stack(pictures).astype(np.float64)
    keras, torch = (arguments(lines[name]) for name in ("keras", "torchvision"))
    for out in (
        (whole - keras["mean"]) / np.sqrt(keras["variance"]),
        (whole / 255 - torch["mean"]) / torch["std"],
    ):
        assert out.mean(axis=(0, 1, 2)) == pytest.approx([0, 0, 0], abs=1e-3)
        assert out.std(axis=(0, 1, 2)) == pytest.approx([1, 1, 1], rel=1e-3)
    assert keras["axis"] == -1
    planes = [picture.transpose(2, 0, 1) for picture in pictures]
    assert arguments(paste_lines(summary_of("uint8", (3, 16, 16), planes))["keras"])["axis"] == 1
    assert paste_lines(summary_of("int64", (), list(range(9)))) == {}


def arguments(line: str) -> dict[str, Any]:
    """Return the keyword arguments of a pasted call."""
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def warned(dtype: str, shape: tuple[int | None, ...], samples: list[Any], names: tuple[str, ...] = ()) -> str:
    """Return all findings."""
    return "\n".join(as_json(summary_of(dtype, shape, samples), names)["findings"])


def test_what_an_expert_would_point_at_is_pointed_at() -> None:
    """Each of these has cost a night of training, and a healthy data set must not have a warning."""
    rng = np.random.default_rng(4)
    healthy = list(rng.normal(size=(100, 8, 8, 3)).astype(np.float32))
    assert warned("float32", (8, 8, 3), healthy) == ""
    assert warned("int64", (), [n % 4 for n in range(100)], ("a", "b", "c", "d")) == ""
    broken = [one.copy() for one in healthy]
    broken[42][0, 0, 0], broken[60][:] = np.nan, np.inf
    told = warned("float32", (8, 8, 3), broken)
    assert "1 NaN and 192 infinite" in told
    assert "first in sample 0/0/42" in told or "first in sample 0/0/60" in told
    assert "not normalised (pixels from 0 to 255" in warned("float32", (8, 8, 3), [abs(one) * 60 for one in healthy])
    empty = [*healthy[:20], np.zeros((8, 8, 3), np.float32)]
    assert "1 of 21 samples (4.8%) have one value throughout (empty?), the first is 0/0/20" in warned(
        "float32", (8, 8, 3), empty
    )
    flat = [one.copy() for one in healthy]
    for one in flat:
        one[..., 1] = 0.5
    assert "channel 1 has the same value everywhere" in warned("float32", (8, 8, 3), flat)
    assert "every value is 0: there is nothing to learn" in warned("uint8", (4,), [np.zeros(4, np.uint8)] * 5)
    skewed = [0] * 95 + [1] * 5
    assert "class 'cat' has 95 samples, 'dog' 5" in warned("int64", (), skewed, ("cat", "dog"))
    assert "no sample of class 'emu' was seen" in warned("int64", (), skewed, ("cat", "dog", "emu"))
    assert "2 is no class: the stream has 2 class names" in warned("int64", (), [0, 1, 2] * 9, ("cat", "dog"))


def estimate_of(values: NDArray[Any], blocks: int = 1) -> CompressionEstimate:
    """Estimate the ratio of a tensor that has these values in each of some blocks."""
    spec = Spec.of({"x": (str(values.dtype), values.shape[1:])})["x"]
    estimate = CompressionEstimate(np.random.default_rng(3))
    for _ in range(blocks):
        estimate.add(Column(spec, values, None))
    return estimate


def test_the_ratio_is_that_of_a_writer() -> None:
    """A user chooses a codec by it."""
    values = np.repeat(np.arange(500, dtype=np.int32), 50).reshape(-1, 5)
    found = estimate_of(values).ratios()
    for codec, ratio in found.items():
        frame = compression.pack(codec, memoryview(values.tobytes()), 4)
        assert frame is not None
        assert ratio == values.nbytes / len(frame) > 3
    noise = np.random.default_rng(0).integers(0, 256, (1, 9000)).astype(np.uint8)
    assert set(estimate_of(noise).ratios().values()) == {1.0}  # a writer stores it as it is
    assert set(estimate_of(np.zeros((3, 0), np.uint8)).ratios().values()) == {None}


def test_the_estimate_takes_4_mib_of_any_stream() -> None:
    """A stream may have blocks of a gigabyte, and millions of them."""
    assert estimate_of(np.zeros((3, RATIO_BYTES), np.uint8), blocks=50).nbytes == RATIO_BLOCKS * RATIO_BYTES


def test_a_codec_that_is_not_installed_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock stat` needs no package of compression."""
    monkeypatch.setitem(sys.modules, "blosc2", None)
    ratios = estimate_of(np.zeros((9, 90), np.float32)).ratios()
    assert ratios.pop("blosc2") is None
    assert all(ratios.values())
