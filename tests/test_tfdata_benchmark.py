"""The benchmark of ways into tf.data: one tiny real round of each."""

from __future__ import annotations

import pytest

from benchmarks import tfdata_variants


def test_each_way_into_tf_data_gives_every_batch() -> None:
    """A way that loses batches would look cheap."""
    pytest.importorskip("tensorflow")
    found = tfdata_variants.measure(1, 4)
    assert set(found) == set(tfdata_variants.VARIANTS)
    assert tfdata_variants.ratios(found)[tfdata_variants.FROM_GENERATOR].median == 1
    shown = tfdata_variants.shown(found)
    assert all(f"| {name} " in shown for name in tfdata_variants.VARIANTS)
