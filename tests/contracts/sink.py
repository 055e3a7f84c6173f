"""An EntrySink that records its calls, for tests of anything that receives entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_common.server.channel import Skip

Targets = Callable[[bytes, int], "Sequence[memoryview] | Skip | None"]


class RecordingSink:
    """A sink that records its calls. `targets` decides about fields, and by default every value comes as bytes."""

    def __init__(self, targets: Targets = lambda name, nbytes: None) -> None:
        self.targets = targets
        self.events: list[tuple[object, ...]] = []

    def begin(self, entry_id: bytes) -> None:
        """Record the call."""
        self.events.append(("begin", entry_id))

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Record the call, and ask `targets`."""
        self.events.append(("target", name, nbytes))
        return self.targets(name, nbytes)

    def value(self, name: bytes, data: bytes) -> None:
        """Record the call."""
        assert type(data) is bytes
        self.events.append(("value", name, data))

    def end(self) -> None:
        """Record the call."""
        self.events.append(("end",))

    @property
    def values(self) -> dict[object, object]:
        """Return the values that came as bytes, by field name."""
        return {event[1]: event[2] for event in self.events if event[0] == "value"}

    @property
    def ids(self) -> list[object]:
        """Return the entries that began, in order."""
        return [event[1] for event in self.events if event[0] == "begin"]
