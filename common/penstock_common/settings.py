"""What the environment says: the only reader of ``os.environ``.

Only the command and the workers read settings; library classes take explicit arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock_common.errors import PenstockError

DEFAULT_URL = "redis://localhost:6379"
_SCHEMES = ("redis", "rediss", "unix")


class BadSettings(PenstockError, ValueError):
    """An environment variable has a value that means nothing here; ``variable`` names it."""

    def __init__(self, variable: str, found: str, expected: str) -> None:
        self.variable, self.found, self.expected = variable, found, expected
        super().__init__(f"{variable}={found!r}: expected {expected}; correct or unset it")


def _check_url(url: str) -> str:
    parts = urlsplit(url)  # raises ValueError itself for a bad host
    if parts.scheme not in _SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ValueError
    _ = parts.port  # raises ValueError when it is no number
    return url


_Url = Annotated[str, AfterValidator(_check_url)]


class Settings(BaseModel):
    """All that Penstock reads from its environment. A variable that is empty counts as unset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[_Url, Field(description="PENSTOCK_URL")] = DEFAULT_URL
    """The server that holds the streams."""
    queue_url: Annotated[_Url, Field(description="PENSTOCK_QUEUE_URL")] = DEFAULT_URL
    """The server that holds the jobs; the same one unless said otherwise."""
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

    @model_validator(mode="before")
    @classmethod
    def _queue_follows_url(cls, values: dict[str, object]) -> dict[str, object]:
        return {"queue_url": values["url"], **values} if "url" in values else values

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the variables named in each field's description. Raises BadSettings for the first malformed one."""
        present = os.environ if environ is None else environ
        variables = {name: field.description or "" for name, field in cls.model_fields.items()}
        values: dict[str, object] = {name: present[key] for name, key in variables.items() if present.get(key)}
        if "no_color" in values:
            values["no_color"] = True
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            name = next(str(e["loc"][0]) for e in error.errors() if variables[str(e["loc"][0])] in present)
            found = present[variables[name]].rpartition("@")[2]  # a password is nobody's business
            raise BadSettings(variables[name], found, _expected(name)) from None


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process we start: ours, with ``extra`` on top."""
    return {**os.environ, **extra}


def _expected(name: str) -> str:
    return f"a URL like {DEFAULT_URL}" if name.endswith("url") else "yes or no (1, 0, true, false)"
