"""Users may write these values, and none of them changes silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock_common.errors import BadSpec, SpecMismatch, TooLarge
from penstock_common.wire.limits import MAX_FIELD_BYTES
from penstock_common.wire.spec import Spec, TensorSpec, array_of


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("int64", 3, 3),
        ("int64", True, 1),
        ("uint8", 255, 255),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("int64", -(2**63), -(2**63)),
        ("float32", 1, 1.0),
        ("float32", 0.1, float(np.float32(0.1))),
        ("float16", 65504, 65504.0),
        ("float64", float("inf"), float("inf")),
        ("bfloat16", 1.5, 1.5),
        ("bfloat16", 3, 3.0),
        ("complex64", 2, 2 + 0j),
        ("complex128", 1 + 2j, 1 + 2j),
        ("bool", True, True),
        ("int16", np.int16(-7), -7),
        ("bfloat16", ml_dtypes.bfloat16(2.5), 2.5),
    ],
)
def test_a_number_that_fits_is_stored_as_that_number(dtype: str, value: Any, stored: Any) -> None:
    """Labels are usually Python numbers."""
    found = TensorSpec("y", dtype, ()).canonical(value)
    assert found.shape == ()
    assert found.item() == stored


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 256),
        ("uint8", -1),
        ("uint64", -1),
        ("int64", 2**63),
        ("int64", 2**80),
        ("int8", 1.0),
        ("bool", 1),
        ("float32", 2**24 + 1),
        ("float64", 2**53 + 1),
        ("float64", 2**64 - 1),
        ("float16", 70000),
        ("float16", 1e6),
        ("float32", 1e300),
        ("bfloat16", 257),
        ("complex64", 1e300j),
        ("float64", 1j),
        ("int64", "3"),
        ("int64", None),
        ("int64", {}),
        ("int64", object()),
        ("int64", np.int32(3)),
        ("float32", np.float64(0.5)),
        ("int64", [1, 2]),
    ],
)
def test_a_number_that_does_not_fit_is_refused(dtype: str, value: Any) -> None:
    """Wrapping around, rounding an integer or dropping a part would be found weeks later, in a model."""
    with pytest.raises(SpecMismatch, match=r"tensor 'y': found .*, expected"):
        TensorSpec("y", dtype, ()).canonical(value)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("int64", 2**70, f"found {2**70}, expected a value int64 can hold$"),
        ("int32", [1, -(2**70)], "expected a value int32 can hold$"),
        ("float64", 2**70, "expected a float, because integers have 64 bits$"),
    ],
)
def test_an_integer_beyond_64_bits_is_said_not_to_fit(dtype: str, value: Any, expected: str) -> None:
    """Numpy makes an object of it, which was taken for the name of a class."""
    with pytest.raises(SpecMismatch, match=expected):
        TensorSpec("y", dtype, (None,) if isinstance(value, list) else ()).canonical(value)


@pytest.mark.parametrize("value", [[1, [2, 3]], [[1], [2, 3]], [[1, 2], [3, "x"]], [b"a", b"b"]])
def test_a_list_that_is_no_array_is_refused_by_name(value: Any) -> None:
    """Numpy's message about inhomogeneous shapes does not name the tensor."""
    with pytest.raises(SpecMismatch, match="tensor 'x'"):
        TensorSpec("x", "int64", (None, None)).canonical(value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([np.int64(2**60 + 1), np.float32(0.5)], "a list of values of float32 and int64, expected one dtype: name the"),
        ((np.zeros(2, np.uint8), np.ones(2)), "a tuple of values of float64 and uint8, expected one dtype: name the"),
        ([np.int64(3), 0.5], "a list of values of int64 and Python float, expected one dtype"),
        ([[0.5, 1], [2**60 + 1, 2]], f"of which float64 cannot hold {2**60 + 1}, expected numbers of one kind"),
        ([2**64 - 1, -1], f"of which float64 cannot hold {2**64 - 1}, expected"),
    ],
)
def test_a_list_of_unlike_values_is_refused_and_not_converted(value: Any, found: str) -> None:
    """Numpy makes float64 of them, which rounds large integers, such as ids."""
    with pytest.raises(SpecMismatch, match=f"tensor 'y': found {found}" if found.startswith("a ") else found):
        TensorSpec("y", "float64", (2,)).canonical(value)
    with pytest.raises(BadSpec, match=found):
        Spec.infer({"y": value})


def test_a_list_of_python_numbers_is_what_numpy_makes_of_it() -> None:
    """An integer that float64 holds does not change."""
    values: list[list[Any]] = [[1, 2.5], [2**53, 0.5], [True, 2], [np.float32(1), 2]]
    for value in values:
        assert Spec.infer({"y": value})["y"].dtype == np.asarray(value).dtype
        assert TensorSpec("y", "float64", (2,)).canonical(value).tolist() == [float(number) for number in value]


def test_an_empty_list_is_no_boxes_whatever_a_box_is() -> None:
    """An image without objects has [] in every label file."""
    found = TensorSpec("boxes", "float32", (None, 4)).canonical([])
    assert found.shape == (0, 4)
    assert found.dtype == np.float32
    assert TensorSpec("classes", "int64", (None,)).canonical([]).dtype == np.int64


def test_an_array_keeps_its_dtype_or_is_refused() -> None:
    """An array has a dtype on purpose, and a stream that converts it hides a mistake."""
    with pytest.raises(SpecMismatch, match="found dtype float64, expected dtype float32"):
        TensorSpec("x", "float32", (2,)).canonical(np.zeros(2))
    with pytest.raises(SpecMismatch, match=r"found shape \(3,\), expected shape \(2,\)"):
        TensorSpec("x", "float32", (2,)).canonical(np.zeros(3, "f4"))


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.astype(">i4"),
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a[::-1][::-1],
        lambda a: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(np.int32).reshape(a.shape),
    ],
)
def test_any_layout_is_stored_little_endian_in_c_order(make: Callable[[Any], Any]) -> None:
    """Transposed images and arrays read from old files are as good as others."""
    plain = np.arange(6, dtype="<i4").reshape(2, 3)
    found = TensorSpec("x", "int32", (2, 3)).canonical(make(plain))
    assert found.dtype == np.dtype("<i4")
    assert found.tobytes() == plain.tobytes()


def test_big_endian_bfloat16_is_understood() -> None:
    """It has no numpy name, so it is easily forgotten."""
    plain = np.array([1.5, -2]).astype(ml_dtypes.bfloat16)
    swapped = plain.astype(plain.dtype.newbyteorder(">"))
    assert TensorSpec("x", "bfloat16", (2,)).canonical(swapped).tobytes() == plain.tobytes()


def test_bytes_are_taken_from_every_buffer_but_text() -> None:
    """Text has an encoding, and only its writer knows which."""
    tensor = TensorSpec("s", "bytes", ())
    for value in (b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"a-b-c")[::2]):
        assert tensor.canonical(value).tobytes() == b"abc"
    assert tensor.canonical(b"").shape == (0,)
    with pytest.raises(SpecMismatch, match=r"value\.encode\(\)"):
        tensor.canonical("abc")


def test_masked_arrays_are_refused() -> None:
    """Their mask would be lost, and the hidden values trained on."""
    with pytest.raises(SpecMismatch, match="filled"):
        array_of("x", np.ma.masked_array([1, 2], [True, False]), "int64", (2,))


def test_a_sample_over_the_field_limit_is_refused_at_once() -> None:
    """It is refused before a block around it has been filled."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, "u1"), (MAX_FIELD_BYTES + 1,), (0,))
    with pytest.raises(TooLarge, match="over the limit"):
        TensorSpec("x", "uint8", (None,))._bounded(huge)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"x": ("object", ())},
        {"x": ("float128", ())},
        {"x": "uint8"},
        {"x": ("uint8", 3)},
        {"x": ("uint8", (-1,))},
        {"x": ("uint8", (2.0,))},
        {"x": ("uint8", (True,))},
        {"x": ("uint8", (1,) * 32)},
        {"x": ("uint8", (0, 10**9))},
        {"x": ("float32", (200_000_000,))},
        {"x": ("bytes", (3,))},
        {"meta": ("uint8", ())},
        {"x.shapes": ("uint8", ())},
        {"": ("uint8", ())},
        {"ä": ("uint8", ())},
        {"x\n": ("uint8", ())},
        {".x": ("uint8", ())},
        {"x" * 129: ("uint8", ())},
        {5: ("uint8", ())},
        {f"x{i}": ("uint8", ()) for i in range(257)},
        None,
        [],
        "uint8",
    ],
)
def test_a_malformed_spec_is_refused_when_it_is_made(spec: Any) -> None:
    """A stream's spec is fixed for its life, so it must be right before the first sample."""
    with pytest.raises(BadSpec):
        Spec.of(spec)


@pytest.mark.parametrize("form", ["int64", ("uint9", ()), ("uint8", 3), ("uint8",)])
def test_the_tensor_is_named_that_makes_a_large_spec_a_bad_one(form: Any) -> None:
    """The beginning of a large spec does not show which of its tensors is wrong."""
    large: dict[str, Any] = {f"x{number}": ["float32", [number]] for number in range(100)}
    for make in (Spec.of, Spec.from_json):
        with pytest.raises(BadSpec, match="tensor 'odd': "):
            make(large | {"odd": list(form) if make == Spec.from_json and type(form) is tuple else form})


def test_a_dtype_may_be_given_as_numpy_gives_it() -> None:
    """np.float32 and bytes are what users type first."""
    spec = Spec.of({"x": (np.float32, (2,)), "y": (np.dtype(">i8"), ()), "s": (bytes, ())})  # type: ignore[dict-item]
    assert str(spec) == "x: float32[2], y: int64, s: bytes"


def test_a_spec_is_inferred_with_the_very_dtypes_of_the_sample() -> None:
    """The first sample fixes the stream, so nothing may be guessed."""
    sample = {"x": np.zeros((2, 3), ">u2"), "y": 3, "f": 0.5, "t": True, "s": b"", "l": [[1, 2]], "h": np.float16(1)}
    expected = "x: uint16[2, 3], y: int64, f: float64, t: bool, s: bytes, l: int64[1, 2], h: float16"
    assert str(Spec.infer(sample)) == expected


@pytest.mark.parametrize("value", ["text", None, [[1], [2, 3]], object(), np.array(["a"]), np.datetime64("2020-01-01")])
def test_what_cannot_travel_is_named_when_the_spec_is_inferred(value: Any) -> None:
    """No object arrays, no pickles: the error says which tensor and what to do."""
    with pytest.raises(BadSpec, match="tensor 'x'"):
        Spec.infer({"x": value})


def test_a_sample_with_other_names_is_refused_by_name() -> None:
    """A misspelt key is the most frequent mistake."""
    spec = Spec.of({"x": ("uint8", ()), "y": ("uint8", ())})
    with pytest.raises(SpecMismatch, match="tensor 'y': found nothing"):
        spec.check_names({"x": 1, "z": 2})
    with pytest.raises(SpecMismatch, match="tensor 'z': found a tensor, expected none"):
        spec.check_names({"x": 1, "y": 1, "z": 2})
