"""One server whose partitions seem to be on several, so that a test moves them without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_common.stream.streams import Stream


class Placement:
    """The place of each partition. All are at 'a' until they move."""

    def __init__(self, client: Any, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client, self._tags = client, [partition.tag for partition in stream.partitions]
        self._places = ["a"] * len(self._tags)
        self.looks = 0
        """The number of times that the servers were asked which of them holds which keys."""
        self._moves = 0
        kind = type(client)
        monkeypatch.setattr(kind, "by_server", lambda _, keys: self._by_server(keys))
        monkeypatch.setattr(kind, "node_of", lambda _, key: self._node_of(key))
        monkeypatch.setattr(kind, "look_around", lambda _: self._look_around())
        monkeypatch.setattr(kind, "moves", property(lambda _: self._moves))

    def move(self, place: str, *numbers: int) -> None:
        """Move these partitions."""
        self._moves += 1
        for number in numbers:
            self._places[number] = place

    def _look_around(self) -> None:
        self.looks += 1
        self._moves += 1  # it may learn of others

    def _place_of(self, key: bytes | str) -> str:
        text = key.decode() if isinstance(key, bytes) else key
        return next((place for tag, place in zip(self._tags, self._places, strict=True) if f".{tag}}}" in text), "a")

    def _by_server(self, keys: list[bytes | str]) -> list[list[int]]:
        places = [self._place_of(key) for key in keys]
        return [[at for at, one in enumerate(places) if one == place] for place in dict.fromkeys(places)]

    def _node_of(self, key: bytes | str | None) -> Any:
        place = "a" if key is None else self._place_of(key)
        return self._client if place == "a" else _Placed(self._client, place)


class _Placed:
    """The client of another place."""

    def __init__(self, client: Any, where: str) -> None:
        self._client, self.where = client, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
