"""The thread that shows that a member lives, and what its loop is doing: a beat every thirtieth of a lease, or sooner.

A member of a shared group has leases to renew with it (``shared.keeper``); a rank has nothing to renew but its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock_common.errors import ServerUnavailable
from penstock_common.pace import Pace
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Membership, beat
from penstock_common.stream.losses import Witness
from penstock_common.stream.watching.paces import Teller, trainer_field
from penstock_common.threads import join
from penstock_common.waiting import Outage
from penstock_consumer.membership.parts import Idleness, said_of
from penstock_consumer.ordered.peers import PeerWatch

BEATS_PER_LEASE = 30
"""Renewals are cheap, and their rhythm is how soon others see that a member lives."""
LONGEST_BEAT_S = 2.0
"""Of a long lease a thirtieth is long: who looks for the dead should not wait for it, nor see the living as silent."""


class Pulse:
    """Beats from `start` to `stop`."""

    def __init__(
        self,
        client: Client,
        who: Membership,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        witness: Witness | None = None,
        peers: PeerWatch | None = None,
    ) -> None:
        """``witness``: who compares with a server that came back as another run; ``peers``: with other ranks."""
        self._client = client.impatient()  # a failure is borne here, not below
        self._who, self._lease_s, self._clock = who, lease_s, clock
        self._witness, self._peers = witness, peers
        self.idle: Idleness | None = None
        self.pace: Pace | None = None
        """Of the training loop; told to whoever starts workers."""
        self.horizon = -1
        """The epoch being read here."""
        self.error: Exception | None = None
        """Why it ended by itself (another process took the name, or whatever else): the loader raises it."""
        self._teller = Teller(self._client, who.stream, trainer_field(who.group, who.member))
        self._outage = Outage(lambda _: None, doing="renewing", clock=clock)  # others say it
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-pulse-{who.group}", daemon=True)

    def start(self) -> None:
        """Begins to beat."""
        self._thread.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """Ends the thread. Without patience it is only told."""
        self._stop.set()
        if patience_s:
            join(self._thread, patience_s)
            if self.error is None:  # else another process may speak under this name by now
                self._teller.leave()

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is the thread that beats."""
        return self._thread is threading.current_thread()

    def recover(self) -> None:
        """Nothing is given to a rank that another process would have to be asked for."""

    def _run(self) -> None:
        while not self._stop.wait(min(self._lease_s / BEATS_PER_LEASE, LONGEST_BEAT_S)):
            try:
                try:
                    self._beat()
                finally:  # also where it fails because the server lost this member
                    if self._witness is not None:
                        self._witness.check()
                self._outage.over()
                if self.pace is not None:
                    self._teller.tell(self.pace)
                    if self._peers is not None:
                        self._peers.look(self.pace.look().samples)
                self._after_beat()
            except ServerUnavailable as error:
                self._missed()
                if not self._is_borne(error):
                    return
            except Exception as error:  # whatever it is: a loop that went on would train on what others take over
                self.error = error
                return

    def _beat(self) -> None:
        for partition in self._who.stream.partitions:
            beat(self._client, self._who, partition, {}, **said_of(self.idle))

    def _after_beat(self) -> None:
        """What else there is to do now and then."""

    def _missed(self) -> None:
        """A beat did not reach the server."""

    def _is_borne(self, error: ServerUnavailable) -> bool:
        try:
            self._outage.bear(error)
        except ServerUnavailable as final:
            self.error = final
        return self.error is None
