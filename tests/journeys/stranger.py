"""A program of another user of the host, which tries all that it can. It runs as a script, and reads its tasks from
stdin as JSON. It becomes that user once it has imported all modules, so that it needs no right to Python's own files.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

ASKED = ("PING", "INFO", "KEYS *", "CONFIG GET dir", "AUTH default default", "HELLO 3", "EVAL return(1) 0")


def main() -> None:
    """Become another user, try everything, and print the results as JSON."""
    tasks = json.load(sys.stdin)
    encoded = "".encode("idna")  # loads the codec that a connection needs
    assert encoded == b""
    if (user := tasks["user"]) is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    found = {
        "user": os.getuid(),
        "processes": _processes(tasks["pids"]),
        "answers": {port: _answers(port) for port in tasks["ports"]},
        "files": [entry for root in tasks["folders"] for entry in _files(Path(root))],
    }
    json.dump(found, sys.stdout)


def _processes(pids: list[int]) -> dict[str, list[str]]:
    """Return what each process shows of itself, by the name of the file in /proc, and whether it takes a signal."""
    found: dict[str, list[str]] = {}
    for name in ("cmdline", "environ", "maps", "cwd", "fd"):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                path = process / name
                if name in ("cwd", "fd"):
                    told = str(list(path.iterdir()))
                else:
                    told = path.read_bytes().decode(errors="replace")
            except OSError:
                continue
            if name in ("cmdline", "environ") or int(process.name) in pids:
                found.setdefault(name, []).append(told)
    for pid in pids:
        try:
            os.kill(pid, 0)
            found.setdefault("signal", []).append(str(pid))
        except OSError:
            pass
    return found


def _answers(port: int) -> list[str]:
    told = []
    for words in ASKED:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"{words}\r\n".encode())
            told.append(connection.recv(4096).decode(errors="replace"))
    return told


def _files(folder: Path) -> list[str]:
    """Return what can be listed, read or written below a folder, one line for each."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        if Path(place) != folder:
            found.append(f"list {place}")
            found += _tried_to_write(Path(place))
        for name in files:
            path = Path(place, name)
            for way, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
                try:
                    os.close(os.open(path, flags | os.O_NONBLOCK))
                    found.append(f"{way} {path}")
                except OSError:
                    pass
        for name in folders:  # os.walk skips folders that it cannot list
            path = Path(place, name)
            found += _tried_to_write(path)
    return sorted(set(found))


def _tried_to_write(folder: Path) -> list[str]:
    mine = folder / "stranger"
    try:
        mine.touch()
        mine.unlink()
    except OSError:
        return []
    return [f"make a file in {folder}"]


if __name__ == "__main__":
    main()
