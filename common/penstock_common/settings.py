"""The settings in the environment. No other module reads ``os.environ``.

Only the command and the workers read settings; library classes take explicit arguments.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from penstock_common.errors import PenstockError
from penstock_common.local_servers import find_servers_of_user, private_folder
from penstock_common.waiting import to_stderr

DEFAULT_URL = "redis://localhost:6379"
FILE = "_FILE"
"""The end of the name of a variable that names a file with the value."""
_BY_FILE = ("PENSTOCK_URL", "PENSTOCK_QUEUE_URL")
_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
_OF_SENTINELS = ("redis+sentinel", "rediss+sentinel")
_PREFIX = "PENSTOCK_"
_OF_COMPOSE = (
    *("APPENDONLY", "MAXMEMORY", "PAYLOAD", "REDIS_CPUS", "REDIS_MEMORY", "SHM_SIZE"),
    *("TRAINER_CPUS", "TRAINER_MEMORY", "WORKER_CPUS", "WORKER_MEMORY"),
)
"""The variables that compose.yaml reads, without the prefix."""
_PARTS_OF_URL = ("HOST", "PASSWORD", "PORT", "REDIS", "SERVER")
"""The parts of an address that other programs keep in variables of their own."""
_OF_DEVELOPERS = ("BENCH_", "CHAOS", "PLAIN_REDIS", "SOAK_", "TEST_")
"""The beginnings, after the prefix, of the variables that tests and benchmarks read."""


class BadSettings(PenstockError, ValueError):
    """An environment variable has an invalid value; ``variable`` names the variable."""

    def __init__(self, variable: str, found: str, expected: str) -> None:
        self.variable, self.found, self.expected = variable, found, expected
        super().__init__(f"{variable}={found!r}: expected {expected}; correct or unset it")


def _check_url(text: str) -> str:
    url = text.strip()  # secrets often end with a newline or a blank
    if len(url.split()) != 1:
        raise ValueError
    scheme, _, rest = url.partition("://")
    if scheme in _OF_SENTINELS or (scheme in _SCHEMES and "," in rest.rpartition("@")[2]):
        return url  # several hosts, which connect() checks
    parts = urlsplit(url)  # raises ValueError itself for a bad host
    if parts.scheme not in _SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ValueError
    _ = parts.port  # raises ValueError when it is not a number
    return url


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


_CACHE = Path(os.path.expanduser("~/.cache/penstock"))  # noqa: PTH111 - Path's own raises for a user without a home


def _set_by(variable: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the metadata of a field that an environment variable sets, by ``read`` of its text, or ValueError."""
    return {"variable": variable, "read": read}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings that Penstock reads from its environment. A variable that is empty counts as unset.

    It is a plain dataclass, because every trainer imports it before the first batch.
    """

    named_url: str | None = field(default=None, metadata=_set_by("PENSTOCK_URL", _check_url), repr=False)
    """The server that holds the streams, as PENSTOCK_URL or the file in PENSTOCK_URL_FILE names it."""
    named_queue_url: str | None = field(default=None, metadata=_set_by("PENSTOCK_QUEUE_URL", _check_url), repr=False)
    """The server that holds the jobs, as PENSTOCK_QUEUE_URL or the file in PENSTOCK_QUEUE_URL_FILE names it."""
    url_file: Path | None = field(default=None, metadata=_set_by("PENSTOCK_URL_FILE", Path))
    """The file that ``named_url`` was read from, if it was."""
    session: Path | None = field(default=None, metadata=_set_by("XDG_RUNTIME_DIR", Path))
    """The private folder of this user, which each login has on most Linux systems."""
    no_color: bool = field(default=False, metadata=_set_by("NO_COLOR", bool))
    """Any value of NO_COLOR asks for output without colours (no-color.org)."""

    segments: Path | None = field(default=None, metadata=_set_by("PENSTOCK_SEGMENTS", Path))
    """The folder of segments on this host, if it is mounted elsewhere than the stream says."""
    cache: Path = field(default=_CACHE, metadata=_set_by("PENSTOCK_CACHE", Path))
    """The folder of data that can be computed again at any time, such as the indexes of tars."""
    gateway_tokens: str = field(default="", metadata=_set_by("PENSTOCK_GATEWAY_TOKENS", str), repr=False)
    """The tokens of `penstock gateway`: lines of STREAM/GROUP and a token."""
    awaited: frozenset[str] = field(default=frozenset(), metadata=_set_by("PENSTOCK_AWAITED", _names))
    """The streams that the parent `penstock run` prepares. It ends this process if one of them will not come."""

    @functools.cached_property
    def url(self) -> str:
        """The server that holds the streams: the named one, else this user's own one here, else Redis' own port."""
        return self.named_url or self._own_server() or DEFAULT_URL

    @property
    def queue_url(self) -> str:
        """The server that holds the jobs, by default the one that holds the streams."""
        return self.named_queue_url or self.url

    @property
    def own_servers(self) -> Path:
        """The folder where each ``penstock server`` of this user announces itself."""
        return private_folder(self.session)

    def _own_server(self) -> str | None:
        found = find_servers_of_user(self.own_servers)
        if not found.running:
            for file in found.left:
                _tell_once(
                    f"the server of {file} was killed, so clients without PENSTOCK_URL look for one at {DEFAULT_URL}: "
                    "start `penstock server` again, or remove the file"
                )
            return None
        last, *others = found.running
        if others:
            count = f"{1 + len(others)} servers of yours run here"
            _tell_once(f"{count}: taking the one started last, of {last.file}; PENSTOCK_URL names another")
        return last.url

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the variables named in each field's description.

        Raises:
            BadSettings: A variable is malformed, or its file cannot be read, or both a URL and its file are given.
        """
        given = os.environ if environ is None else environ
        present = {**given, **_urls_by_file(given)}
        values: dict[str, Any] = {}
        for name, each in cls.__dataclass_fields__.items():
            variable = each.metadata["variable"]
            if not (text := present.get(variable)):
                continue
            try:
                values[name] = each.metadata["read"](text)
            except ValueError:
                lines = len(text.strip().splitlines())
                wanted = f"one URL like {DEFAULT_URL}"
                wanted += f", not {lines} lines" if lines > 1 else ", without blanks" if len(text.split()) > 1 else ""
                if given.get(variable + FILE):
                    wanted = f"a file that holds {wanted}"
                    raise BadSettings(variable + FILE, given[variable + FILE], wanted) from None
                # a password must not appear in a message
                found = re.sub(r"(?s)\A\s*([a-z+]+://)?.*@", lambda start: f"{start[1] or ''}...@", text)
                raise BadSettings(variable, found, wanted) from None
        for text in cls._unread(given):
            _tell_once(text)
        return cls(**values)

    @classmethod
    def _unread(cls, given: Mapping[str, str]) -> Iterator[str]:
        """Yield a notice for each variable that has our prefix and that no program reads."""
        known = [each.metadata["variable"] for each in cls.__dataclass_fields__.values()]
        known = sorted({name for name in (*known, *(name + FILE for name in _BY_FILE)) if name.startswith(_PREFIX)})
        for name in sorted(given):
            end = name.removeprefix(_PREFIX)
            if end == name or name in known or end in _OF_COMPOSE or end.startswith(_OF_DEVELOPERS):
                continue
            from penstock_common.hints import near  # imported only after a mistake

            meant = (
                "URL"
                if "URL" in end or end in _PARTS_OF_URL
                else near(end, [one.removeprefix(_PREFIX) for one in known])
            )
            hint = f"did you mean {_PREFIX}{meant}?" if meant else f"Penstock reads {', '.join(known)}"
            yield f"{name} is set, and nothing reads it; {hint}"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process: ours, with ``extra`` added.

    A variable in ``extra`` replaces the variable that names a file with the same value.
    """
    return {key: value for key, value in os.environ.items() if key.removesuffix(FILE) not in extra} | dict(extra)


def _urls_by_file(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the URLs that are kept in secret files, as in containers."""
    urls = {}
    for variable in _BY_FILE:
        if not (file := environ.get(variable + FILE)):
            continue
        if environ.get(variable):
            raise BadSettings(variable + FILE, file, f"nothing, because {variable} is set too")
        try:
            urls[variable] = _url_in(file)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise BadSettings(variable + FILE, file, f"a file that can be read ({why})") from None
        if not urls[variable]:
            raise BadSettings(variable + FILE, file, "a file that holds a URL (it is empty)")
    return urls


def file_with_login(server: str) -> tuple[str, str] | None:
    """Return the variable and the file that hold the login for a server, or None if no file does.

    Args:
        server: The address of the server, without the password.
    """
    for variable in _BY_FILE:
        if not (file := os.environ.get(variable + FILE)):
            continue
        try:
            user, hosts = _login(_url_in(file))
            wanted, host = _login(server)
        except (OSError, ValueError):
            continue
        if user == wanted and (hosts == host or "," in hosts):  # a cluster names nodes that the URL does not
            return variable + FILE, file
    return None


def _url_in(file: str) -> str:
    """Return the text of a secret file, which an editor of Windows begins with a mark of its own."""
    return Path(file).read_text(encoding="utf-8-sig").strip()


def _login(url: str) -> tuple[str, str]:
    """Return the user and the hosts of a URL."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    return parts.username or "default", hosts if re.search(r":\d+$", hosts) else f"{hosts}:6379"


@functools.cache
def _tell_once(text: str) -> None:
    to_stderr(text)
