"""Run a command and print how often it opened each file of a folder, as JSON: `python opened.py FOLDER COMMAND...`."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

IN_OPEN, IN_Q_OVERFLOW, IN_ISDIR = 0x20, 0x4000, 0x40000000
EVENT = struct.Struct("iIII")
MOST_BYTES = 1 << 16


def main() -> int:
    """Watch the folders with inotify while the command runs. Return its exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_CLOEXEC)
    assert watch >= 0, os.strerror(ctypes.get_errno())
    root = Path(sys.argv[1])
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        assert libc.inotify_add_watch(watch, bytes(folder), IN_OPEN) >= 0, os.strerror(ctypes.get_errno())
    opened: Counter[str] = Counter()
    end = root / "the-end-of-watching"

    def count() -> None:
        while True:
            data, at = os.read(watch, MOST_BYTES), 0
            while at < len(data):
                _, mask, _, length = EVENT.unpack_from(data, at)
                name = data[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0").decode()
                at += EVENT.size + length
                assert not mask & IN_Q_OVERFLOW, "the kernel dropped events"
                if name == end.name:
                    return
                if not mask & IN_ISDIR:
                    opened[name] += 1

    counting = threading.Thread(target=count)
    counting.start()
    done = subprocess.run(sys.argv[2:], stdout=sys.stderr, check=False)
    end.touch()  # events come in order
    counting.join()
    end.unlink()
    sys.stdout.write(json.dumps(opened))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
