"""The password of an embedded server: a random one, kept beside an append-only file that outlives the server."""

from __future__ import annotations

import secrets
from pathlib import Path

from penstock_common.errors import ServerUnsuitable
from penstock_common.private_files import read_private, write_private

PASSWORD_FILE = "penstock-password"  # noqa: S105 - the name of a file
"""The name of its file in the folder of the append-only file, mode 0600."""
_BYTES = 32


def choose_password(folder: Path | None) -> str:
    """Return a random password, or the one that ``folder`` keeps; a folder without one gets a file with it.

    Args:
        folder: The folder of an append-only file, or None for a password that ends with its server.

    Raises:
        ServerUnsuitable: The file cannot be read or written, is empty, or is not this user's alone.
    """
    if folder is None:
        return secrets.token_hex(_BYTES)
    file = folder / PASSWORD_FILE
    try:
        password = read_private(file)
    except FileNotFoundError:
        return _keep(file, secrets.token_hex(_BYTES))
    except OSError as error:
        raise ServerUnsuitable(f"the server's password in {file} cannot be used: {error.strerror}") from None
    if not password:
        raise ServerUnsuitable(f"{file} is empty, it should hold the server's password: remove it for a new one")
    return password


def _keep(file: Path, password: str) -> str:
    try:
        write_private(file, password + "\n")
    except OSError as error:
        why = f"cannot keep the server's password in {file}: {error.strerror}"
        raise ServerUnsuitable(f"{why}; name a folder of your own") from None
    return password
