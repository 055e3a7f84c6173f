"""Commands that show all streams, with one of them damaged: the others are shown, and that one is named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from penstock.__main__ import main
from penstock.cli.console import Console
from penstock.cli.monitor_screen import print_streams
from tests.contracts.feed import open_stream, produce

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["meta", "roster"])
def key(any_url: str, any_client: redis.Redis, request: pytest.FixtureRequest) -> str:
    """Return a key of the second of three streams, or of its partition, that another program wrote to."""
    for name in ("one", "two", "three"):
        produce(any_url, name, 20)
    stream = open_stream(any_client, "two")
    key = stream.keys.meta if request.param == "meta" else stream.partitions[0].roster
    any_client.set(key, "x")
    return key


@pytest.fixture
def told(any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that runs a command line against the server: exit code, stdout, stderr."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)

    def run(line: str) -> tuple[int, str, str]:
        code = main(line.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_inspect_shows_the_healthy_streams_and_names_the_damaged_one(told: Told, key: str) -> None:
    """An operator asks for all streams to find which one is broken."""
    code, out, err = told("inspect")
    assert [line.split()[0] for line in out.splitlines()] == ["stream", "one", "three"]
    assert code == 1
    assert f"stream 'two' cannot be read: {key} is a string, expected a hash" in err
    code, out, _ = told("inspect --json")
    one, three, two = json.loads(out)
    assert (code, one["name"], three["name"], two["name"]) == (1, "one", "three", "two")
    assert key in two["error"]


def test_monitor_shows_the_healthy_streams_and_names_the_damaged_one(told: Told, key: str) -> None:
    """A view that ends at another team's damage would help no user."""
    code, out, err = told("monitor --once --every 0.1")
    assert code == 1
    assert ("stream one" in out, "stream three" in out, "stream two" in out) == (True, True, False)
    assert f"stream 'two' cannot be read: {key} is a string, expected a hash" in err
    code, out, _ = told("monitor --once --every 0.1 --json")
    records: list[dict[str, Any]] = json.loads(out)
    found = {record["stream"]: record.get("error", "") for record in records}
    assert (code, found["one"], found["three"]) == (1, "", "")
    assert key in found["two"]
    screen = io.StringIO()
    print_streams(records, Console(screen))  # as the live view draws it
    assert "expected a hash" in screen.getvalue()
    assert all(f"stream {name}" in screen.getvalue() for name in found)


def test_doctor_examines_the_healthy_streams_and_reports_the_damaged_one(told: Told, key: str) -> None:
    """Damage is a finding like any other, with the exit code that CI stops on."""
    for line in ("doctor --no-probe --all", "doctor two --no-probe"):
        code, out, _ = told(line)
        assert code == 3
        assert f"stream two, keys: {key} is a string, expected a hash" in out
        assert ("stream one, " in out and "stream three, " in out) == (line == "doctor --no-probe --all")
