"""What the environment says: the only reader of ``os.environ``.

Only the command and the workers read settings; library classes take explicit arguments.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock_common.errors import PenstockError
from penstock_common.local_servers import find_servers_of_user, private_folder
from penstock_common.waiting import to_stderr

DEFAULT_URL = "redis://localhost:6379"
FILE = "_FILE"
"""Behind the name of a variable: the file that holds its value."""
_BY_FILE = ("PENSTOCK_URL", "PENSTOCK_QUEUE_URL")
_SCHEMES = ("redis", "rediss", "unix")


class BadSettings(PenstockError, ValueError):
    """An environment variable has a value that means nothing here; ``variable`` names it."""

    def __init__(self, variable: str, found: str, expected: str) -> None:
        self.variable, self.found, self.expected = variable, found, expected
        super().__init__(f"{variable}={found!r}: expected {expected}; correct or unset it")


def _check_url(url: str) -> str:
    if len(url.split()) != 1:
        raise ValueError
    parts = urlsplit(url)  # raises ValueError itself for a bad host
    if parts.scheme not in _SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ValueError
    _ = parts.port  # raises ValueError when it is no number
    return url


_Url = Annotated[str, AfterValidator(_check_url)]


class Settings(BaseModel):
    """All that Penstock reads from its environment. A variable that is empty counts as unset."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    named_url: Annotated[_Url | None, Field(description="PENSTOCK_URL", repr=False)] = None
    """The server that holds the streams, as PENSTOCK_URL or the file in PENSTOCK_URL_FILE names it."""
    named_queue_url: Annotated[_Url | None, Field(description="PENSTOCK_QUEUE_URL", repr=False)] = None
    """The server that holds the jobs, as PENSTOCK_QUEUE_URL or the file in PENSTOCK_QUEUE_URL_FILE names it."""
    url_file: Annotated[Path | None, Field(description="PENSTOCK_URL_FILE")] = None
    """The file that ``named_url`` was read from, if it was."""
    session: Annotated[Path | None, Field(description="XDG_RUNTIME_DIR")] = None
    """Folder of this user alone, of which each login has one on most Linux systems."""
    plain_redis: Annotated[bool, Field(description="PENSTOCK_PLAIN_REDIS")] = False
    """Move payloads through redis-py's own data path, not ours."""
    no_color: Annotated[bool, Field(description="NO_COLOR")] = False
    """Any value of NO_COLOR asks for output without colours (no-color.org)."""
    colorterm: Annotated[str, Field(description="COLORTERM")] = ""
    """``truecolor`` or ``24bit`` where the terminal has more than 256 colours; set by the terminal."""

    segments: Annotated[Path | None, Field(description="PENSTOCK_SEGMENTS")] = None
    """Where this process sees the folder of segments, if it is mounted elsewhere than the stream says."""
    cache: Annotated[Path, Field(description="PENSTOCK_CACHE")] = Path(os.path.expanduser("~/.cache/penstock"))  # noqa: PTH111
    """Folder of what can be found out again at any time, like the indexes of tars.

    Path.expanduser would raise where a container's user has no home.
    """

    @functools.cached_property
    def url(self) -> str:
        """The server that holds the streams: the one named, else this user's own one here, else Redis' own port."""
        return self.named_url or self._own_server() or DEFAULT_URL

    @property
    def queue_url(self) -> str:
        """The server that holds the jobs; the same one unless said otherwise."""
        return self.named_queue_url or self.url

    @property
    def own_servers(self) -> Path:
        """Folder where each ``penstock server`` of this user says that it runs."""
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
        variables = {name: field.description or "" for name, field in cls.model_fields.items()}
        values: dict[str, object] = {name: present[key] for name, key in variables.items() if present.get(key)}
        if "no_color" in values:
            values["no_color"] = True
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            name = next(str(e["loc"][0]) for e in error.errors() if variables[str(e["loc"][0])] in present)
            variable = variables[name]
            if given.get(variable + FILE):
                wanted = f"a file that holds one URL like {DEFAULT_URL}"
                raise BadSettings(variable + FILE, given[variable + FILE], wanted) from None
            found = present[variable].rpartition("@")[2]  # a password is nobody's business
            raise BadSettings(variable, found, _expected(name)) from None


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process we start: ours, with ``extra`` on top; a file no longer names what it names."""
    return {key: value for key, value in os.environ.items() if key.removesuffix(FILE) not in extra} | dict(extra)


def _urls_by_file(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the URLs that are secrets in files, as containers have them."""
    urls = {}
    for variable in _BY_FILE:
        if not (file := environ.get(variable + FILE)):
            continue
        if environ.get(variable):
            raise BadSettings(variable + FILE, file, f"nothing, because {variable} is set too")
        try:
            urls[variable] = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise BadSettings(variable + FILE, file, f"a file that can be read ({why})") from None
        if not urls[variable]:
            raise BadSettings(variable + FILE, file, "a file that holds a URL (it is empty)")
    return urls


@functools.cache
def _tell_once(text: str) -> None:
    to_stderr(text)


def _expected(name: str) -> str:
    return f"a URL like {DEFAULT_URL}" if name.endswith("url") else "yes or no (1, 0, true, false)"
