"""What one job says: which shard of which epoch of which source. JSON only, and no address or password.

Enqueuing is ``dispatch``'s, doing it is ``workbench``'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock_common.errors import PenstockError
from penstock_producer.sources.transform import BLOCK_SAMPLES

OnError = Literal["quarantine", "skip", "fail"]
"""What becomes of a sample that its source cannot make: it is counted and named as bad, and too many fail the epoch;
the same, however many there are; or the first one ends the epoch."""


MaxBad = Annotated[str, Field(pattern=r"^(\d{1,9}|\d{1,2}%|100%)$")]
"""Bad samples that an epoch may have: a number, or a share like ``5%``; more fail it."""


class BadTask(PenstockError, ValueError):
    """A job in the queue is not one of ours, or not of this version."""


class ShardTask(BaseModel):
    """One shard to be produced."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str
    stream_id: str
    """Of the stream as it was planned; another life of the same name is refused."""
    epoch: Annotated[int, Field(ge=0)]
    manifest_id: str
    """Of the epoch as it was planned."""
    shard: Annotated[int, Field(ge=0)]
    source: dict[str, Any]
    """A source's config (sources/config.py)."""
    fingerprint: str
    """Of the source where it was planned: a worker that finds other files refuses the job."""
    seed: int
    shuffle: bool = True
    on_error: OnError = "quarantine"
    sample_limit_s: Annotated[float, Field(ge=0)] = 0.0
    """A sample that takes longer hangs: its worker is replaced. 0: no limit."""
    block_transform: str | None = None
    """``module:function`` (or a token) of many samples at once; see sources/transform.py."""
    block_samples: Annotated[int, Field(gt=0, le=1 << 16)] = BLOCK_SAMPLES
    max_bad: MaxBad = "50%"
    spec_is_declared: bool = False
    """Somebody wrote down what the tensors are; else they were taken from a first sample, or from the source."""

    @property
    def job_id(self) -> str:
        """Names the shard for ever, so that a shard is never queued twice by two dispatchers."""
        return job_id(self.manifest_id, self.shard)

    @classmethod
    def parse(cls, arguments: dict[str, Any]) -> ShardTask:
        """The task in a job's arguments; raises BadTask naming the first field that is wrong."""
        try:
            return cls.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise BadTask(f"a job's {field}: {first['msg']}; producer and worker must be of one version") from None


def job_id(manifest_id: str, shard: int) -> str:
    """The id of a shard's job."""
    return f"{manifest_id}-{shard}"
