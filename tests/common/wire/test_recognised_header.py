"""A header that is recognised byte for byte means the same as if it were parsed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_common.errors import BadEntry
from penstock_common.wire import header as headers
from penstock_common.wire.header import Header, parse_header
from penstock_common.wire.spec import Spec

SPEC = Spec.of({"x": ("uint8", (2,)), "y/z": ("float32", ())})
NUMBERS = (0, 1, 6, 7, (1 << 20) - 7, (1 << 20) - 6, 1 << 20, (1 << 53) - 1, 1 << 53, 10**16)
DIGEST = ',"xxh3":"0123456789abcdef"'
REF = ',"ref":["3-0-0123456789ab.seg",4096,[12,24]]'


def said(epoch: int = 0, shard: int = 1, first: int = 2, count: int = 6, rest: str = DIGEST) -> bytes:
    """Return the header that a writer makes for a block of SPEC."""
    tensors = f'{{"x":{{"dtype":"uint8","shape":[{count},2]}},"y/z":{{"dtype":"float32","shape":[{count}]}}}}'
    numbers = f'"epoch":{epoch},"shard":{shard},"first":{first},"count":{count}'
    return f'{{"v":1,"stream":"a-b.c_d",{numbers},"tensors":{tensors}{rest}}}'.encode()


def meant(text: bytes, takes_refs: bool) -> Any:
    """Return the header, or the reason why it is refused."""
    try:
        found = parse_header(text, SPEC, takes_refs=takes_refs)
    except BadEntry as error:
        return type(error), str(error)
    return [getattr(found, one.name) for one in fields(Header) if one.compare], list(found.fields())


def parsed(text: bytes, takes_refs: bool) -> Any:
    """Parse the same text without the fast path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "_recognised", lambda *_: None)
        return meant(text, takes_refs)


@given(
    st.builds(
        said,
        *[st.sampled_from(NUMBERS)] * 3,
        st.sampled_from(NUMBERS),
        st.sampled_from(["", DIGEST, REF, DIGEST + REF]),
    ),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_what_is_recognised_means_what_it_says(text: bytes, takes_refs: bool) -> None:
    """A bound that only the slow way checks is not a bound."""
    assert meant(text, takes_refs) == parsed(text, takes_refs)


@given(
    st.sampled_from([said(), said(rest=DIGEST + REF), said(first=10, count=14)]),
    st.integers(0, 260), st.integers(0, 3),
    st.text('0123456789-+.eE{}[]":,\\_ ufx\n\u0661', max_size=3), st.booleans(),
)  # fmt: skip
@example(said(rest=DIGEST + REF), said(rest=DIGEST + REF).rindex(b",[12") + 1, 0, "0", True)
@example(said(rest=DIGEST + REF), said(rest=DIGEST + REF).rindex(b"24") - 1, 1, "", True)
@example(said(rest=DIGEST + REF), said(rest=DIGEST + REF).rindex(b"24"), 2, "", True)
@settings(max_examples=1000, deadline=None)
def test_a_damaged_header_means_the_same_either_way(
    text: bytes, at: int, removed: int, put: str, takes_refs: bool
) -> None:
    """A client that can write to a stream decides which way reads its header."""
    damaged = text[:at] + put.encode() + text[at + removed :]
    assert meant(damaged, takes_refs) == parsed(damaged, takes_refs)


@pytest.mark.parametrize("rest", ["", DIGEST, DIGEST + REF])
def test_what_writers_write_is_recognised(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every entry is parsed in full, and only the cost shows it."""
    expected = parsed(said(rest=rest), takes_refs=True)
    monkeypatch.setattr(headers, "_object", lambda _: pytest.fail("it was parsed"))
    assert meant(said(rest=rest), takes_refs=True) == expected
