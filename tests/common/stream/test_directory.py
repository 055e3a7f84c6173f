"""The directory of streams: it saves the scan for names that are in it, and loses no stream of an older version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.errors import StreamNotFound
from penstock_common.server.client import ControlClient
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.directory import SCAN_EVERY_S, StreamLister, list_streams
from penstock_common.stream.keys import STREAM_NAMES
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.stream.streams import create_stream, load_stream


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The scans of this process so far."""
    seen: list[object] = []
    scan = ControlClient.scan_iter

    def counted(client: ControlClient, *args: Any, **options: Any) -> Iterator[Any]:
        seen.append(options)
        return scan(client, *args, **options)

    monkeypatch.setattr(ControlClient, "scan_iter", counted)
    return seen


def as_an_older_version(client: Client, name: str) -> None:
    """Make a stream without a word in the directory."""
    create_stream(client, name)
    client.hdel(STREAM_NAMES, name)


def test_an_error_names_the_streams_of_older_versions(any_client: Client) -> None:
    """A misspelt name is most often near one that is there, whichever version wrote it."""
    create_stream(any_client, "new")
    as_an_older_version(any_client, "train")
    with pytest.raises(StreamNotFound, match="no stream 'trian'; streams there: new, train; did you mean 'train'"):
        load_stream(any_client, "trian")


def test_an_error_says_how_many_streams_it_leaves_out(any_client: Client) -> None:
    """A list that ends without a word looks whole."""
    for number in range(19):
        create_stream(any_client, f"s{number:02}")
    with pytest.raises(StreamNotFound, match=r"streams there: s00, .*, s09 and 9 more; start a producer"):
        load_stream(any_client, "elsewhere")


def test_an_error_names_another_database_with_keys(any_url: str, any_client: Client) -> None:
    """The number at the end of an address is easily overlooked."""
    create_stream(any_client, "train")
    with connect(f"{any_url}/1") as elsewhere:
        with pytest.raises(StreamNotFound, match="database 0 has keys: is the number at the end of the address right"):
            load_stream(elsewhere, "train")
        any_client.flushall()
        with pytest.raises(StreamNotFound, match="the server has no streams yet; start a producer"):
            load_stream(elsewhere, "train")


def test_a_writer_starts_without_a_scan(url: str, client: Client, scans: list[object]) -> None:
    """With many keys on many servers, a scan for the other streams' budgets takes longer than all else of a start."""
    client.config_set("maxmemory", "1gb")
    try:
        for name in ("a", "b"):
            with penstock.Writer(name, url=url, budget_bytes=50 << 20):
                pass
        scans.clear()
        with penstock.Writer("c", url=url, budget_bytes=50 << 20), penstock.Writer("a", url=url):
            pass
        with pytest.raises(penstock.errors.BudgetRefused, match="the other streams 150 MiB"):
            penstock.Writer("d", url=url, budget_bytes=900 << 20)
    finally:
        client.config_set("maxmemory", "0")
    assert list_streams(client) == ["a", "b", "c"]
    assert scans == []


def test_the_first_stream_that_is_entered_brings_those_of_older_versions(any_client: Client) -> None:
    """Otherwise their budgets would not count any more after an update of one writer."""
    for name in ("old", "older"):
        as_an_older_version(any_client, name)
    any_client.delete(STREAM_NAMES)
    assert list_streams(any_client) == ["old", "older"]
    new = create_stream(any_client, "new")
    found = {name.decode(): value.decode() for name, value in any_client.hgetall(STREAM_NAMES).items()}
    assert found == {name: load_stream(any_client, name).id for name in ("new", "old", "older")}
    assert found["new"] == new.id


def test_a_stream_of_an_older_version_is_shown_and_then_entered(
    any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older and newer writers run together during an update, and an operator must see the streams of both."""
    create_stream(any_client, "new")
    as_an_older_version(any_client, "old")
    assert list_streams(any_client) == ["new"]
    assert main(["inspect", "--url", any_url]) == 0
    shown = capsys.readouterr().out
    assert "old" in shown
    assert "new" in shown
    with penstock.Writer("old", url=any_url):
        pass
    assert list_streams(any_client) == ["new", "old"]


def test_a_program_that_lists_again_and_again_scans_once_a_minute(any_client: Client, scans: list[object]) -> None:
    """The exporter asks every 2 s, and a stream of an older version belongs into its metrics, too."""
    create_stream(any_client, "new")
    as_an_older_version(any_client, "old")
    scans.clear()
    now = [0.0]
    lister = StreamLister(any_client, clock=lambda: now[0])
    for now[0] in (0.0, 2.0, SCAN_EVERY_S - 1):
        assert lister.names() == ["new", "old"]
    assert len(scans) == 1
    as_an_older_version(any_client, "late")
    delete_stream(any_client, "old")
    scans.clear()
    assert lister.names() == ["new"]
    now[0] = SCAN_EVERY_S
    assert lister.names() == ["late", "new"]
    assert len(scans) == 1


def test_a_deleted_stream_is_in_no_list(any_client: Client) -> None:
    """Neither its own deletion leaves the name, nor does that of a version that knows no directory."""
    for name in ("a", "b", "c"):
        create_stream(any_client, name)
    delete_stream(any_client, "a")
    any_client.delete("penstock:{b}:meta", "penstock:{b}:events")
    assert list_streams(any_client) == ["c"]
    assert any_client.hkeys(STREAM_NAMES) == [b"b", b"c"]
    delete_stream(any_client, "c")
    assert list_streams(any_client) == []


@pytest.mark.parametrize("damage", ["wrong type", "foreign names"])
def test_a_damaged_directory_costs_a_scan(any_client: Client, damage: str) -> None:
    """The directory holds hints only, so no operator should have to repair it."""
    create_stream(any_client, "a")
    any_client.delete(STREAM_NAMES)
    if damage == "wrong type":
        any_client.set(STREAM_NAMES, "x")
    else:
        any_client.hset(STREAM_NAMES, b"\xff{*}", "x")
    create_stream(any_client, "b")
    assert StreamLister(any_client).names() == ["a", "b"]
    assert list_streams(any_client) == (["a", "b"] if damage == "wrong type" else ["b"])
    delete_stream(any_client, "a")
    assert list_streams(any_client) == ["b"]


def test_a_user_without_the_directory_writes_and_lists(any_url: str, any_client: Client) -> None:
    """A user may have the keys of one stream only."""
    raw = redis.Redis.from_url(any_url)
    raw.acl_setuser(
        "one", enabled=True, reset=True, passwords=["+p"], categories=["+@all"],
        keys=["penstock:{mine}:*", "penstock:{mine.*}:*"],
    )  # fmt: skip
    try:
        address = any_url.rpartition("@")[2].removeprefix("redis://")
        with penstock.Writer("mine", url=f"redis://one:p@{address}") as writer:
            assert writer.stream.name == "mine"
        assert not any_client.exists(STREAM_NAMES)
        assert list_streams(any_client) == ["mine"]
    finally:
        raw.acl_deluser("one")
        raw.close()
