"""Prepare each process of a run: it dies with the conductor, and prints its stacks on SIGUSR1.

Run as a module it is the `penstock` command with both: ``python -m chaos.process produce ...``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Print the stacks of all threads to stderr on SIGUSR1. On Linux, end with the conductor."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


faulthandler.register(signal.SIGUSR1, all_threads=True)  # also in workers that are spawned with this as main module

if __name__ == "__main__":
    prepare()
    sys.argv[0] = "penstock"
    runpy.run_module("penstock", run_name="__main__")
