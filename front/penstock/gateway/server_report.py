"""A report on the server of the streams at the start of a gateway, which needs the server only for its members."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.gateway.tokens import Grant
from penstock_common.errors import PenstockError
from penstock_common.stream.client import connect
from penstock_common.stream.streams import absence, find_stream

EVERY_S = 1.0
"""The pause between two tries."""


def report_server(url: str, grants: Sequence[Grant], notify: Callable[[str], None]) -> None:
    """Report, from a thread, a server that is away until it answers, and then each stream that is not there."""
    threading.Thread(target=_report, args=(url, grants, notify), name="penstock-server-report", daemon=True).start()


def _report(url: str, grants: Sequence[Grant], notify: Callable[[str], None]) -> None:
    told = ""
    while True:
        try:
            with connect(url, notify=notify) as client:
                absences = [
                    absence(client, name)
                    for name in sorted({grant.stream for grant in grants})
                    if find_stream(client, name) is None
                ]
            break
        except PenstockError as error:
            if type(error).__name__ != told:
                told = type(error).__name__
                notify(f"{error}; the gateway goes on and tries again")
        time.sleep(EVERY_S)
    if told:
        notify("the server answers now")
    for line in absences:
        notify(line)
