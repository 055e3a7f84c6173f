"""The recommendation of `penstock bench`: from rates to a method, the least gain for it, and one sentence. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORTH = 1.1
"""The least gain for a recommendation. Penstock is one more thing to run, and segments tie it to one host."""


@dataclass(frozen=True)
class RateRatio:
    """The ratio of the rates of two methods in neighbouring turns, over all rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:.2f}x"
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Recommendation:
    """The way of feeding that the rates recommend for a number of trainers, and the reason."""

    trainers: int
    base: str
    """The name of the method without Penstock."""
    use: str
    """The name of the method to use."""
    ratios: Mapping[str, RateRatio]
    """Method -> its rate relative to ``base``, for all other methods."""
    rounds: int
    is_close: bool
    """Whether the rounds disagree, so that another run might have another result."""

    @property
    def sentence(self) -> str:
        """Return what to do, and then why."""
        one = self.trainers == 1
        whom, base = ("1 trainer", f"a {self.base}") if one else (f"{self.trainers} trainers", f"one {self.base} each")
        found = ", ".join(f"{method} {ratio}" for method, ratio in self.ratios.items())
        doubt = ". The rounds disagree: repeat it on an idle machine, or with more --seconds" if self.is_close else ""
        doubt = ". That was one short round: give it --seconds 120" if self.rounds == 1 else doubt
        use = base if self.use == self.base else self.use
        return f"{whom}: use {use}. Samples per second, relative to {base}: {found}{doubt}"


def judge(rates: Mapping[str, Sequence[float]], trainers: int) -> Recommendation:
    """Return the recommendation for the rates of each method, round by round. The first is the one without Penstock."""
    base, *others = rates
    ratios = {method: _ratio(rates[method], rates[base]) for method in others}
    use, least = base, RateRatio(1.0, 1.0, 1.0)
    is_close = False
    for method, ratio in ratios.items():
        is_close = is_close or ratio.low < least.median * WORTH <= ratio.high
        if ratio.median >= least.median * WORTH:
            use, least = method, ratio
    return Recommendation(trainers, base, use, ratios, len(rates[base]), is_close)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> RateRatio:
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return RateRatio(statistics.median(found), min(found), max(found))
