"""docs/acl.md: each of its users, on real servers, does what the page says, and no more."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream
from tests.front.gateway.clients import gateway_for
from tests.front.views.test_metrics import exporting, of, until
from tests.house.lua import LUA_FILES, parse_lua

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "acl.md").read_text()
BLOCKS: dict[str, str] = dict(re.findall(r"^```text (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
QUIET = penstock.Tuning(notify=lambda _: None)
DATA = """\
import numpy as np


class Rows:
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return {"x": np.full(8, index, np.float32), "y": index}


train = Rows()
"""
IGNORED = ("client", "client|setinfo", "config", "config|get", "memory", "memory|malloc-stats")
Told = Callable[..., str]


def lines_for(client: redis.Redis) -> list[list[str]]:
    """Return user and rules of each line that the page has for a server."""
    is_old = str(client.info("server")["redis_version"]).startswith("6.")
    lines = [shlex.split(line) for line in BLOCKS["redis-6.2" if is_old else "redis-7"].splitlines()]
    assert all(words[:2] == ["ACL", "SETUSER"] for words in lines)
    return [words[2:] for words in lines]


@pytest.fixture
def users(server: EmbeddedServer, client: redis.Redis) -> Iterator[dict[str, str]]:
    """Make the page's users on an empty server. Return the address of each, by its name."""
    urls = {}
    client.execute_command("ACL", "LOG", "RESET")
    for user, *rules in lines_for(client):
        assert client.execute_command("ACL", "SETUSER", user, *rules)
        urls[user] = f"redis://{user}:{rules[1][1:]}@127.0.0.1:{server.port}"
    yield urls
    client.execute_command("ACL", "DELUSER", *urls)


@pytest.fixture
def refused(client: redis.Redis) -> Callable[[], list[str]]:
    """Return a function that lists what the server refused its users since the last call.

    redis-py names itself with CLIENT SETINFO, a writer asks for settings, and both ignore a refusal.
    """

    def of_log() -> list[str]:
        log = client.acl_log()
        client.execute_command("ACL", "LOG", "RESET")
        found = {(one["username"], one["object"]) for one in log}
        return sorted(f"{user}: {what}" for user, what in found if what not in IGNORED)

    return of_log


@pytest.fixture
def told(
    users: dict[str, str], refused: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Told:  # fmt: skip
    """Return a function that runs a command line as one of the users, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mydata.py").write_text(DATA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PENSTOCK_QUEUE_URL", users["queue"])

    def run(user: str, *commands: str, code: int = 0) -> str:
        monkeypatch.setenv("PENSTOCK_URL", users[user])
        for command in commands:
            capsys.readouterr()
            assert main(shlex.split(command)) == code, (command, capsys.readouterr(), refused())
            assert refused() == [], command
        return capsys.readouterr().out

    return run


def written(url: str, name: str = "train", epochs: int = 2, **options: Any) -> None:
    """Write epochs of 200 samples in two shards."""
    with penstock.Writer(name, url=url, partitions=2, tuning=QUIET, **options) as writer:
        for _ in range(epochs):
            with writer.epoch() as epoch:
                for number in range(200):
                    epoch.write({"x": np.full(8, number, np.float32), "y": number})


def test_the_producers_user_produces(users: dict[str, str], told: Told, refused: Callable[[], list[str]]) -> None:
    """A right that is missing is found in the middle of a run."""
    url = users["producer"]
    told("producer", "produce dataset mydata:train --epochs 2 --workers 1 --stream train")
    with penstock.Writer("feed", url=url, tuning=QUIET) as feed:
        for number in range(100):
            feed.write({"x": number})
    with penstock.Writer("kept", url=url, retention="epochs:1", tuning=QUIET) as writer:
        for number in range(3):
            with writer.epoch() as epoch:
                epoch.write({"x": number})
    impatient = penstock.Tuning(block_bytes=100, room_wait_s=0.7, notify=lambda _: None)
    with (
        pytest.raises(penstock.errors.BudgetFull),
        penstock.Writer("full", url=url, budget_bytes=4000, tuning=impatient) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(1000):
            epoch.write({"x": number})
    with pytest.raises(penstock.errors.ServerUnsuitable, match="has 0 that follow"):
        penstock.Writer("safe", url=url, tuning=penstock.Tuning(durability="replicas=1"))
    with connect(url) as client:
        assert client.wait(0, 1) == 0
    assert refused() == []


def test_the_producers_user_looks_after_streams(
    users: dict[str, str], told: Told, refused: Callable[[], list[str]]
) -> None:
    """Groups, epochs, dead letters, repairs, imports and deletions."""
    url = users["producer"]
    told("producer", "produce dataset mydata:train --epochs 3 --workers 1 --stream train", "groups declare train net",
         "groups reset train net 1", "epochs pin train 1", "epochs unpin train 1")  # fmt: skip
    with connect(url) as client:
        partition = load_stream(client, "train").partitions[0]
        client.xdel(partition.entries(2), client.xrange(partition.entries(2), count=1)[0][0])
        damaged = client.xadd(partition.entries(1), {"meta": "no header"})
    with penstock.Loader("train", group="net", batch_size=50, url=users["trainer"], tuning=QUIET) as loader:
        assert sum(len(batch["y"]) for batch in loader) == 300
    told("trainer", "export train out --epoch 0")
    told("producer", "audit train --repair dataset mydata:train", code=1)  # the forged entry is left
    told("producer", "bad list train", f"bad show train 1 {damaged.decode()}", "bad retry train",
         f"bad drop train 1 {damaged.decode()} --all-groups", "audit train", "trim train --keep 1", "import out copy",
         "groups drop train net", "inspect", "monitor train --once", "delete copy --yes",
         "delete train --yes")  # fmt: skip
    with penstock.Writer("train", url=url, tuning=QUIET) as writer:
        writer.epoch().write({"x": 1})
    told("producer", "epochs close train 0")
    with penstock.Writer("train", url=url, tuning=QUIET) as writer:
        writer.epoch().write({"x": 1})
    told("producer", "epochs abandon train 1")
    assert refused() == []


def test_the_trainers_user_trains(users: dict[str, str], told: Told, refused: Callable[[], list[str]]) -> None:
    """Shared and canonical order, mixtures, replays, exports, looks and checks of health."""
    url = users["trainer"]
    written(users["producer"])
    written(users["producer"], "other")
    seen: list[int] = []
    with penstock.Loader("train", group="net", batch_size=50, url=url, tuning=QUIET) as loader:
        for batch in loader:
            seen += batch["y"].tolist()
        told("trainer", "health trainer train --group net")
    assert sorted(seen) == [*range(200)]
    order = penstock.Canonical(0, 1)
    with penstock.Loader("train", group="ranks", batch_size=50, order=order, url=url, tuning=QUIET) as loader:
        assert sum(len(batch["y"]) for batch in loader) == 200
    loaders = {
        name: (penstock.Loader(name, group="mix", batch_size=50, url=url, tuning=QUIET), 0.5)
        for name in ("train", "other")
    }
    with penstock.mix(loaders) as mixture:
        assert sum(len(batch["y"]) for batch in mixture) == 400
    with penstock.Replay("train", epoch=0, batch_size=50, url=url) as replay:
        assert sum(len(batch["y"]) for batch in replay) == 200
    assert refused() == []
    told("trainer", "export train out", "audit train --deep", "show train --count 2", "stat train")
    with gateway_for(url) as gateway, contextlib.closing((reader := gateway.client()).socket):
        assert reader.batch() is not None
    assert refused() == []


LOOKS = (
    "inspect", "inspect train", "monitor train --once", "tail train -n 2 --once", "groups list train",
    "epochs list train", "bad list train", "audit train --deep", "show train --no-lease --count 2",
    "stat train --no-lease",
)  # fmt: skip


def test_the_monitors_user_looks(users: dict[str, str], told: Told, refused: Callable[[], list[str]]) -> None:
    """It looks at everything while trainers and producers are at work."""
    told("producer", "produce dataset mydata:train --epochs 2 --workers 1 --stream train")
    with penstock.Loader("train", group="net", batch_size=50, url=users["trainer"], tuning=QUIET) as loader:
        next(iter(loader))
        told("monitor", *LOOKS)
    with exporting("--url", users["monitor"], "--queue-url", users["monitor"]) as (_, where):
        found = until(where, lambda now: now.get(of("penstock_queue_up")) == 1)
    assert found[of("penstock_stream_epochs", stream="train", state="produced")] == 2
    assert refused() == []


def test_the_monitors_user_is_told_how_to_look_without_a_lease(
    users: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who may only read needs an option, and no right to write."""
    written(users["producer"], epochs=1)
    monkeypatch.setenv("PENSTOCK_URL", users["monitor"])
    for command in ("stat train", "show train", "show train --id 0/0/1"):
        assert main(command.split()) == 1
        assert "(--no-lease)" in capsys.readouterr().err.partition("ACL SETUSER")[0]


MAY_NOT = {
    "producer": [
        "CONFIG SET maxmemory 1",
        "SHUTDOWN",
        "FLUSHALL",
        "GET other",
        "KEYS *",
        "LRANGE rq:queue:penstock 0 -1",
    ],
    "trainer": ["CONFIG SET maxmemory 1", "FLUSHALL", "XADD penstock:{a}:events * a b", "RPUSH rq:queue:penstock x"],
    "monitor": ["SET penstock:x 1", "DEL penstock:x", "CONFIG GET *", "GET other", "RPUSH rq:queue:penstock x"],
    "queue": ["HGETALL penstock:{train}:meta", "FLUSHALL", "CONFIG GET *"],
}


def test_a_user_of_one_stream_uses_that_stream(users: dict[str, str], client: redis.Redis) -> None:
    """The patterns are those of the page. A server of version 6.2 cannot restrict what it lets read."""
    if str(client.info("server")["redis_version"]).startswith("6."):
        assert "one-stream" in BLOCKS
        return
    written(users["producer"], "other", epochs=1)
    patterns = BLOCKS["one-stream"].split()
    for user in ("producer", "trainer"):
        assert client.execute_command("ACL", "SETUSER", user, *patterns)
    written(users["producer"], epochs=1)
    for group in ("net", "again"):
        with penstock.Loader("train", group=group, batch_size=50, url=users["trainer"], tuning=QUIET) as loader:
            assert sum(len(batch["y"]) for batch in loader) == 200
    with connect(users["trainer"]) as stranger, pytest.raises(penstock.errors.Unauthorized):
        stranger.hgetall(load_stream(client, "other").partitions[0].roster)
    with pytest.raises(penstock.errors.Unauthorized):
        written(users["producer"], "other", epochs=1)


def test_the_producers_user_has_what_every_script_calls(client: redis.Redis) -> None:
    """A script that runs rarely fails in its middle, where it has written a part."""
    (words,) = (words for words in lines_for(client) if words[0] == "producer")
    granted = {word[1:].partition("|")[0].upper() for word in words if word.startswith("+")}
    assert {name for path in LUA_FILES for name in parse_lua(path).commands} <= granted


def test_no_user_may_do_more(users: dict[str, str]) -> None:
    """A stolen password of a trainer opens neither the queue nor the settings."""
    assert set(users) == set(MAY_NOT)
    for user, commands in MAY_NOT.items():
        with redis.Redis.from_url(users[user]) as client:
            assert client.ping()
            for command in commands:
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command.split())


def test_no_script_lets_the_monitors_user_write(users: dict[str, str]) -> None:
    """A script runs with the rights of its user."""
    with redis.Redis.from_url(users["monitor"]) as client:
        for command in ("EVAL", "EVAL_RO"):
            with pytest.raises(redis.exceptions.ResponseError):
                client.execute_command(command, "return redis.call('SET', KEYS[1], 'x')", 1, "penstock:{a}:meta")
        assert client.get("penstock:{a}:meta") is None


def test_the_doctor_leaves_each_user_the_rights_of_its_role(
    client: redis.Redis, users: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It called a right of another role an error, and its fix gave a producer the rights of a trainer."""
    written(users["producer"])
    for role in ("producer", "trainer", "monitor"):
        capsys.readouterr()
        assert main(["doctor", "--no-probe", "--json", "--url", users[role]]) == 0, role
        found = {f"{one['of']}/{one['check']}": one for one in json.loads(capsys.readouterr().out)["findings"]}
        assert found["server/rights"]["severity"] == "note"
        assert f"user {role} has the rights of a {role}, and may not use" in found["server/rights"]["found"]
        assert "SETUSER" not in found["server/rights"]["fix"]
        assert "stream train/durability" in found, "streams are examined, too"
    client.execute_command("ACL", "SETUSER", "producer", "-xinfo")
    assert main(["doctor", "--no-probe", "--json", "--url", users["producer"]]) == 3
    (rights,) = (one for one in json.loads(capsys.readouterr().out)["findings"] if one["check"] == "rights")
    assert rights["found"] == "user producer may not use xinfo groups, which a producer needs"
    assert rights["fix"] == "as an administrator run ACL SETUSER producer +xinfo|groups"
    assert main(["groups", "declare", "train", "late", "--url", users["monitor"]]) == 1
    assert ": log in as a user whose role has " in capsys.readouterr().err
