"""Options of one run: sizes, numbers of processes, time. Every process of the run gets the same options."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "PENSTOCK_CHAOS"
"""The environment variable with the options as JSON. A source that a command line names has no other way to get
them.
"""
MAIN, FEED = "main", "feed"
"""The stream that RQ workers fill with epochs, and the endless feed of a plain Writer."""
POLICIES = ("on_next", "manual", "on_checkpoint")
"""The acknowledgement policies of the groups, in turn."""
RANKS = "ranks"
"""The ordered group, whose members are numbers."""
LARGE_BYTES = 1 << 20
"""The size of a sample from which on an entry holds one sample."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one run. Sizes are in bytes, and times in seconds unless a name says otherwise."""

    seed: int
    minutes: float
    partitions: int = 2
    sample_bytes: int = 4096
    members: int = 3
    """The trainers in each group, the feed's included."""
    groups: int = 3
    """The groups that read the epochs. The feed has a separate one."""
    node: int = 0
    """The trainers in each group that run in Node. The others run in Python."""
    ranks: int = 2
    """The trainers of one more group, which reads the epochs in canonical order, or 0 for no such group."""
    workers: int = 3
    """The RQ workers: one on a separate host (`penstock worker`), and the others in `penstock produce`."""
    epoch_samples: int = 0
    """The samples of an epoch, or 0 for a number that depends on their size."""
    lease_s: float = 5.0
    pause_s: float = 1.5
    """The mean time between two faults."""
    server_kills: bool = True
    own_queue: bool = False
    """Whether jobs are on a second server, which no fault hits."""
    networks: bool = False
    """Whether processes are on hosts of their own, in network namespaces, and links are faulty."""
    cluster: bool = False
    """Whether the streams are on a cluster, whose masters are killed, stopped and replaced."""
    payload: str = "inline"
    """With ``segments``, payloads are in files in the run's folder, or in memory, and a cleaner has hardly any grace
    period.
    """
    patience_s: float = 120.0
    """The time without any progress after which the run counts as hanging."""

    @property
    def seconds(self) -> float:
        """Return the seconds in which faults are inflicted."""
        return self.minutes * 60

    @property
    def is_large(self) -> bool:
        """Return whether one sample fills an entry."""
        return self.sample_bytes >= LARGE_BYTES

    @property
    def samples(self) -> int:
        """Return the samples of an epoch, which are some seconds of work."""
        return self.epoch_samples or max(48, min(3000, (512 << 20) // self.sample_bytes))

    @property
    def shard_samples(self) -> int:
        """Return the samples of a job; an epoch has about twenty jobs."""
        return max(1, self.samples // 20)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of an entry's block."""
        return self.sample_bytes + 8 if self.is_large else 16 * (self.sample_bytes + 8)

    @property
    def batch_size(self) -> int:
        """Return a batch size that does not divide a block, so that entries span batches."""
        return 2 if self.is_large else 13

    @property
    def rank_batch(self) -> int:
        """Return a rank's batch size: a step of all ranks and some steps behind it fit a quarter of the budget."""
        return 1 if self.is_large else self.batch_size

    @property
    def prefetch_bytes(self) -> int:
        """Return the bytes of a few batches, so that members share the samples."""
        return self._ahead * self.batch_size * self.sample_bytes

    @property
    def _ahead(self) -> int:
        return 1 if self.is_large else 4

    @property
    def together(self) -> int:
        """Return how many batches a 'manual' trainer acknowledges at once."""
        return 2 if self.is_large else 3

    @property
    def checkpoint_every(self) -> int:
        """Return after how many batches an 'on_checkpoint' trainer begins a checkpoint."""
        return 2 if self.is_large else 7

    @property
    def durable_after(self) -> int:
        """Return how many batches after its beginning a checkpoint is durable."""
        return 1 if self.is_large else 2

    @property
    def window_samples(self) -> int:
        """Return how many samples the members of one group may hold unacknowledged."""
        return self.members * self.batch_size * (self.checkpoint_every + self.durable_after + self._ahead + 1)

    @property
    def step_s(self) -> float:
        """Return the mean time of a training step.

        With some seeds trainers wait for samples, with others writers wait for quota.
        """
        return (0.01, 0.04, 0.08)[self.seed % 3]

    @property
    def budget_bytes(self) -> int:
        """Return two and a half epochs or, for every other seed, half an epoch, so that retention trims inside it."""
        epoch = self.samples * self.sample_bytes
        wanted = epoch // 2 if self.seed % 2 else epoch * 5 // 2
        block = max(self.block_bytes, self.sample_bytes + 8)
        steps = 3 * self.ranks * self.rank_batch * (self.sample_bytes + 8) + 3 * block if self.ranks else 0
        window = self.window_samples * (self.sample_bytes + 8)  # must fit the last quarter, and is not spread evenly
        return max(wanted, 12 * self.partitions * block, 4 * self.partitions * (steps + block), 5 * window)

    def members_of(self, group: str) -> int:
        """Return how many trainers a group should have."""
        return self.ranks if group == RANKS else self.members

    def groups_of_main(self) -> list[str]:
        """Return all groups that read the epochs."""
        return [*self.group_policies(), *([RANKS] if self.ranks else [])]

    def group_policies(self) -> dict[str, str]:
        """Return the acknowledgement policy of each shared group."""
        return {f"group{number}": POLICIES[number % len(POLICIES)] for number in range(self.groups)}

    def environment(self) -> dict[str, str]:
        """Return the environment that children are started with."""
        return {VARIABLE: json.dumps(asdict(self))}


def from_environment() -> Options:
    """Return the options of the run that this process is part of."""
    return Options(**json.loads(os.environ[VARIABLE]))
