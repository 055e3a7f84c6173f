"""Files: an exported epoch read from disk, without any server, with the batches that a `Replay` of it gives.

Nothing in a file is believed. Each record is bounded and compared with the export's contents, and its checksum
verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock_common.errors import BadExport
from penstock_common.hints import explained
from penstock_common.segments.exports import ExportFolder, advice_on, complete_epoch
from penstock_common.segments.reader import SegmentReader
from penstock_common.tuning import Tuning, takes_old_names, tuning_of
from penstock_common.wire.header import SegmentRef
from penstock_common.wire.spec import META_FIELD, Spec
from penstock_consumer.read.receive import ReceivedEntry, Receiver
from penstock_consumer.replay.passes import Passes, WholeScope, looked_ahead, permuted
from penstock_consumer.stages.queue import PrefetchQueue
from penstock_consumer.stages.shuffle import QueueFeeder, ShuffleOptions


class Files(Passes):
    """The batches of one exported epoch, in canonical order, or shuffled as a `Replay` is.

    Example:
        >>> for batch in penstock.Files("digits-export", batch_size=64):
        ...     evaluate(batch["x"], batch["y"])
    """

    @takes_old_names
    @explained
    def __init__(
        self,
        path: str | Path,
        *,
        batch_size: int,
        epoch: int | None = None,
        shuffle: int | None = None,
        window: int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """Open an export.

        Args:
            path: the folder that `penstock export` made.
            batch_size: the samples of a batch.
            epoch: the number of the epoch. None means the only one.
            shuffle: a seed, as in `Replay`.
            window: the samples of the window, as in `Replay`.
            tuning: rarely changed options: prefetch_bytes, views, notify. See `Tuning`.

        Raises:
            BadExport: the folder is not an export, is incomplete, or is damaged.
        """
        tuning = tuning_of("Files", tuning)
        super().__init__(batch_size, shuffle, window, tuning)
        self._folder, self._views = ExportFolder(path), bool(tuning.views)
        self._note = self._folder.contents.require(epoch)
        self.epoch, self.samples = self._note.epoch, self._note.samples
        self._blocks = [
            (found.meta, found.header.ref) for found in complete_epoch(self._folder, self._note) if found.header.ref
        ]
        self.info = self._folder.contents.info
        """The facts about the stream, such as the names of classes."""

    @property
    def spec(self) -> Spec:
        """Return the tensors of a sample."""
        return self._folder.contents.spec

    def _name(self) -> str:
        return f"{self._folder.path.name} epoch {self.epoch}"

    def _read(self, queue: PrefetchQueue, feeder: QueueFeeder, shuffle: ShuffleOptions | None) -> None:
        received: list[ReceivedEntry] = []
        segments = SegmentReader(self._folder, gives_views=self._views)
        # identities were checked when the files were opened
        receiver = Receiver(self.spec, feeder.assembler, WholeScope(lambda _: None), 0, received.append, segments)
        try:
            for meta, ref in _in_time(permuted(iter(self._blocks), shuffle), segments):
                while not queue.wait_for_space(0, 0.2):
                    pass
                queue.reader_times.to("reader")  # no server gives anything: this process reads the folder
                receiver.begin(b"")
                receiver.target(META_FIELD, len(meta))
                receiver.value(META_FIELD, meta)
                receiver.end()
                error = received.pop().error
                if error is not None:
                    file = self._folder.path / ref.file
                    raise BadExport(f"{file} at {ref.at}: {error}; {advice_on(file)}") from error
                feeder.drain()
            feeder.end()
        finally:
            segments.close()

    def close(self) -> None:
        """Do nothing, because nothing is held between iterations. The ``with`` statement needs it, as in a `Replay`."""

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_time(blocks: Iterator[tuple[bytes, SegmentRef]], segments: SegmentReader) -> Iterator[tuple[bytes, SegmentRef]]:
    """Yield the blocks, once the disk has been asked for what comes after them."""
    for (meta, ref), is_due in looked_ahead(blocks, lambda block: sum(block[1].sizes)):
        if is_due:
            yield meta, ref
        else:
            segments.expect(ref)
