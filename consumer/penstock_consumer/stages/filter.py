"""Leave samples out on the reader's side. The loop never gets them, and they count as trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.rows import chosen_spans, dropped, taken
from penstock_consumer.stages.stage import Stage, StageContext

Keep = Callable[[Batch], Any]
"""A function that takes a batch of n samples and returns n booleans, True for each wanted sample."""


class Filter(Stage):
    """A stage that makes batches smaller. In shared order the samples left out are acknowledged at once.

    They leave in a batch of their own, before the samples that stay.
    """

    def __init__(self, setting: StageContext, keep: Keep) -> None:
        super().__init__(setting)
        self._keep = keep

    def put(self, batch: Batch) -> None:
        """Take a batch in, and ask the predicate which of its samples are wanted."""
        if batch.is_dropped:
            self._ready.append(batch)
            return
        try:
            wanted = np.asarray(self._keep(batch))
        except ValueError as error:
            if "truth value" not in str(error):
                raise
            raise ValueError(
                "filter's function takes one bool of an array, but it is given a batch: write & for and, | for or, "
                "~ for not, as in lambda batch: (batch['y'] > 1) & (batch['y'] < 5)"
            ) from error
        if wanted.dtype != np.bool_ or wanted.shape != (batch.size,):
            raise ValueError(
                f"filter's function gave {wanted.dtype} of shape {wanted.shape} for a batch of {batch.size} samples, "
                f"expected one bool for each: such as lambda batch: batch['y'] != 3"
            )
        if wanted.all():
            self._ready.append(batch)
            return
        rows, others = np.flatnonzero(wanted), np.flatnonzero(~wanted)
        if not self._setting.is_ordered or not len(rows):  # in order, a position acknowledges all before it
            self._ready.append(dropped(batch, chosen_spans(batch.spans, others)))
        if len(rows):
            values = {name: taken(value, rows, self._setting.pool) for name, value in batch.items()}
            spans = chosen_spans(batch.spans, rows)
            self._ready.append(Batch(values, batch.epoch, spans, batch.position, is_alone=batch.is_alone))
