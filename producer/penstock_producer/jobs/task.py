"""The fields of one job, as JSON without address or password: the source, the epoch and the shard that it makes.

A program that can write to the queue can write anything there, so every field of a job is checked here before rq sees
it. This file is pure: `dispatch` queues jobs, `queue` reads them from the server, `task_runner` does them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock_common.errors import PenstockError
from penstock_common.printable import printable
from penstock_producer.sources.transform import BLOCK_SAMPLES

OnError = Literal["quarantine", "skip", "fail"]
"""The treatment of a sample that its source cannot make. `quarantine`: it is counted and named as bad, and too many
fail the epoch. `skip`: the same, for any number. `fail`: the first one ends the epoch."""


MaxBad = Annotated[str, Field(pattern=r"^(\d{1,9}|\d{1,2}%|100%)$")]
"""The bad samples that an epoch may have: a number, or a share such as ``5%``. More of them fail it."""


class MakingOptions(BaseModel):
    """The options of a production that each of its jobs carries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shuffle: bool = True
    on_error: OnError = "quarantine"
    max_bad: MaxBad = "50%"
    block_transform: str | None = None
    """``module:function`` (or a token) that transforms many samples at once; see sources/transform.py."""
    block_samples: Annotated[int, Field(gt=0, le=1 << 16)] = BLOCK_SAMPLES
    """The number of samples that the function gets."""


class ShardTask(MakingOptions):
    """The order to make one shard."""

    stream: str
    stream_id: str
    """The id of the stream as it was planned. A new stream of the same name is refused."""
    epoch: Annotated[int, Field(ge=0)]
    manifest_id: str
    """The id of the epoch's manifest as it was planned."""
    shard: Annotated[int, Field(ge=0)]
    source: dict[str, Any]
    """The config of a source (sources/config.py)."""
    fingerprint: str
    """The fingerprint of the source where it was planned. A worker that finds other files refuses the job."""
    seed: int
    sample_limit_s: Annotated[float, Field(ge=0)] = 0.0
    """A sample that takes longer hangs, and its worker is replaced. 0: no limit."""
    spec_is_declared: bool = False
    """Whether the user declared the tensors. Otherwise a first sample, or the source, gave the spec."""

    @property
    def job_id(self) -> str:
        """The name of the shard's job, always the same, so that two dispatchers never queue a shard twice."""
        return job_id(self.manifest_id, self.shard)

    @classmethod
    def parse(cls, arguments: dict[str, Any]) -> ShardTask:
        """Return the task in a job's arguments. Raises PenstockError, which names the first field that is wrong."""
        try:
            return cls.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise PenstockError(
                f"a job's {field}: {first['msg']}; producer and worker must be of one version"
            ) from None


def job_id(manifest_id: str, shard: int) -> str:
    """Return the id of a shard's job."""
    return f"{manifest_id}-{shard}"


DATA_BYTES: Final = 64 << 20
"""The most bytes of a job's arguments, inflated. A watched epoch of 10,000 files with long names has a tenth of this.
"""
MOST_VALUES: Final = 1 << 21
"""The most values in a job's arguments. Python takes some 100 bytes for each, and two characters may make one."""
META_BYTES: Final = 1 << 20
FIELD_BYTES: Final = 4096
SHOWN_CHARACTERS: Final = 80
LARGEST: Final = 1 << 62

_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
"""The format in which rq writes times."""
_STATES = (
    b"created", b"queued", b"finished", b"failed", b"started", b"deferred", b"scheduled", b"stopped", b"canceled",
)  # fmt: skip
_TIMES = ("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat")
_NUMBERS = ("timeout", "result_ttl", "failure_ttl", "number_of_retries", "retries_left")
_TEXTS = ("origin", "worker_name", "description")
LIMITS: Final[Mapping[str, int]] = {
    "data": DATA_BYTES, "meta": META_BYTES, "status": FIELD_BYTES,
    **dict.fromkeys((*_TIMES, *_NUMBERS, *_TEXTS), FIELD_BYTES),
}  # fmt: skip
"""Field -> the most bytes that are read of it. Nothing else that rq keeps in a job is read: results, tracebacks,
callbacks, web hooks, dependencies, groups."""


class UnreadableField(ValueError):
    """A field of a job holds what neither Penstock nor rq wrote there."""


def inflated(raw: bytes | None, limit: int = DATA_BYTES) -> bytes:
    """Return the bytes behind rq's compression; rq also takes them uncompressed.

    Raises:
        UnreadableField: More than ``limit`` bytes would come out. No more than that are ever made.
    """
    if raw is not None and len(raw) <= limit:
        try:
            found = zlib.decompressobj().decompress(raw, limit + 1)
        except zlib.error:
            found = raw
        if len(found) <= limit:
            return found
    raise UnreadableField(f"its data is larger than {limit >> 20} MiB")


def checked(raw: Mapping[str, bytes | None], function: str) -> dict[bytes, bytes]:
    """Return the fields of a job that may be restored: a call of ``function`` with JSON arguments by name.

    Args:
        raw: The job's hash, by field; None for a field that is too long to be read.
        function: The only function that a job may name.

    Raises:
        UnreadableField: A field is none that a job of ours has; the text says which and why.
    """
    if "data" not in raw:
        raise UnreadableField("it has no data")
    kept = {"data": json.dumps(_call(inflated(raw["data"]), function)).encode()}
    for names, read in ((_TIMES, _time), (_NUMBERS, _number), (_TEXTS, _text), (("status",), _status)):
        for name in names:
            if (value := raw.get(name, b"")) != b"":
                kept[name] = _field(name, value, read)
    kept["enqueue_at_front_on_retry"] = b"1"
    if notes := readable_meta(raw.get("meta")):
        kept["meta"] = json.dumps(notes).encode()
    return {name.encode(): value for name, value in kept.items()}


def readable_meta(raw: bytes | None) -> dict[str, Any]:
    """Return what Penstock noted in a job, without what it cannot have noted. Never raises.

    rq's own tools save a job's ``meta`` by pickle when they touch the job (``rq info`` does): such a note is lost.
    """
    if not raw or len(raw) > META_BYTES:
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: found[name] for name, fits in _NOTES.items() if name in found and fits(found[name])}


def shown(value: bytes | str) -> str:
    """Return a name or value of a job as it may stand in a message: one short line that controls no terminal."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    text = printable(text[: SHOWN_CHARACTERS + 1])
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _call(data: bytes, function: str) -> list[Any]:
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise UnreadableField(f"its data holds more than {MOST_VALUES} values")
    try:
        call = json.loads(data)
    except (ValueError, RecursionError):
        raise UnreadableField("its data is not JSON") from None
    if not isinstance(call, list) or len(call) != 4:
        raise UnreadableField("its data is no call")
    name, instance, positional, named = call
    if name != function:
        raise UnreadableField(f"it names the function {shown(str(name))!r}")
    if instance is not None or positional or not isinstance(named, dict):
        raise UnreadableField("it carries an object or positional arguments")
    return [name, None, [], named]


def _field(name: str, value: bytes | None, read: Callable[[bytes], object]) -> bytes:
    if value is None or len(value) > FIELD_BYTES:
        raise UnreadableField(f"its field {name!r} is longer than {FIELD_BYTES} bytes")
    try:
        read(value)
    except (ValueError, TypeError, OverflowError):
        raise UnreadableField(f"its field {name!r} holds {shown(value)!r}") from None
    return value


def _time(value: bytes) -> None:
    datetime.strptime(value.decode(), _TIME)


def _number(value: bytes) -> None:
    if not -1 <= int(value) <= LARGEST:
        raise ValueError


def _text(value: bytes) -> None:
    value.decode()


def _status(value: bytes) -> None:
    if value not in _STATES:
        raise ValueError


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_crashes(value: object) -> bool:
    return isinstance(value, dict) and all(
        _CRASHED_AT.fullmatch(name)
        and isinstance(noted, list)
        and len(noted) == 4
        and _is_count(noted[0])
        and _is_count(noted[1])
        and all(isinstance(text, str) and text == shown(text) for text in noted[2:])
        for name, noted in value.items()
    )


_CRASHED_AT: Final = re.compile(r"[0-9]{1,18}\.[0-9a-f]{8}")
"""An offset in the shard, and the supervisor whose note it is (``watchdog.note_crash``)."""
_NOTES: Final[Mapping[str, Callable[[object], bool]]] = {
    "workers": _is_texts, "bytes": _is_count, "waits": _is_text, "at": _is_count, "deaths": _is_count,
    "failures": _is_count, "error": _is_text, "told_by": _is_text, "signature": _is_text, "suspects": _are_crashes,
}  # fmt: skip
"""All notes of Penstock in a job's ``meta``."""
