"""`penstock doctor` on every installed server, on one that loses data, and for users with fewer rights."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.errors import ServerUnsuitable
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import note_wait
from penstock_common.stream.servers.embedded import EmbeddedServer, server_label
from penstock_producer.jobs.dispatch import Dispatcher
from tests.producer.test_trust import TASK


def examined(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and check -> finding."""
    code = main(["doctor", "--json", *argv])
    return code, {f"{one['of']}/{one['check']}": one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_every_server_is_examined_without_leaving_a_trace(
    url: str, client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions report different facts, and the probe must not remain in a server with streams."""
    monkeypatch.setenv("PENSTOCK_URL", url)
    with penstock.Writer("train", url=url, spec={"x": ("uint8", (1000,))}) as writer:
        with writer.epoch(sizes=[3]) as epoch, epoch.shard(0) as part:
            for _ in range(3):
                part.write({"x": np.zeros(1000, np.uint8)})
        before = set(client.keys())
        code, found = examined(capsys)
        assert code == 0, found
        assert set(client.keys()) == before
    for check in ("allocator", "eviction", "rights", "role", "version", "output buffers"):
        assert found[f"server/{check}"]["severity"] == "ok", found[f"server/{check}"]
    assert "MB/s written" in found["server/throughput"]["found"]
    assert found["server/memory"]["fix"].startswith('redis-cli -u "$PENSTOCK_URL" CONFIG SET maxmemory ')
    assert found["stream train/durability"]["found"] == "auto: no replica follows, so writes count as with memory"
    assert main(["doctor", "train", "--no-probe"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("checks are well (--all shows them)")
    assert "\x1b" not in out


def test_a_server_that_will_lose_data_ends_with_a_code_for_ci(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """CI stops on an exit code, and missing rights are reported before a run fails in its middle."""
    started = fresh_server(maxmemory_bytes=64 << 20, password="")
    with redis.Redis.from_url(started.url) as raw:
        raw.config_set("maxmemory-policy", "allkeys-lru")
        raw.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "+@all", "-xclaim", "-xgroup")
        raw.execute_command("ACL", "SETUSER", "eve", "on", ">secret", "~other:*", "+@all")
    code, found = examined(capsys, "--url", started.url, "--no-probe")
    assert code == 3
    assert found["server/eviction"]["fix"] == f"redis-cli -u {started.url} CONFIG SET maxmemory-policy noeviction"
    code, found = examined(capsys, "--url", started.address.replace("//", "//bob:secret@"))
    assert code == 3
    assert "xclaim" in found["server/rights"]["found"]
    assert "+xclaim" in found["server/rights"]["fix"]
    assert found["server/throughput"]["found"].startswith("not measured")
    _, found = examined(capsys, "--url", started.address.replace("//", "//eve:secret@"), "--no-probe")
    assert "~penstock:*" in found["server/rights"]["fix"]


def test_missing_rights_are_those_of_the_user_in_the_address(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Most users may not ask for their name. The fix would otherwise extend the default user, who may be off."""
    started = fresh_server(password="")
    with redis.Redis.from_url(started.url) as raw:
        raw.execute_command("ACL", "SETUSER", "eve", "on", ">secret", "~*", "+@all", "-acl", "-xclaim")
    code, found = examined(capsys, "--url", started.url.replace("//", "//eve:secret@"), "--no-probe")
    assert code == 3
    assert found["server/rights"]["found"] == "user eve may not use xclaim"
    assert found["server/rights"]["fix"].endswith(" ACL SETUSER eve +xclaim")


def test_the_login_is_judged_by_a_connection_without_one(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """A password in an ACL file leaves requirepass empty, and the advice would have replaced it."""
    started = fresh_server(maxmemory_bytes=64 << 20, password="")
    _, found = examined(capsys, "--url", started.url, "--no-probe")
    assert found["server/login"]["found"].startswith("every user of its host may read")
    with redis.Redis.from_url(started.url) as raw:
        raw.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "+@all")
    bob = started.address.replace("//", "//bob:secret@")
    _, found = examined(capsys, "--url", bob, "--no-probe")
    assert found["server/login"]["found"].startswith("every user of its host may read")
    with redis.Redis.from_url(bob) as raw:
        raw.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        assert raw.config_get("requirepass") == {"requirepass": ""}
    for url in (bob, started.address.replace("//", "//:secret@")):
        _, found = examined(capsys, "--url", url, "--no-probe")
        assert (found["server/login"]["severity"], found["server/login"]["found"]) == ("ok", "needs a password")


def test_a_default_user_whose_rights_a_restart_needs_gets_them(
    server: EmbeddedServer, fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """A restart of such a server loses all streams, and only the log of the server says so."""
    started = fresh_server(server.executable, maxmemory_bytes=64 << 20, password="", appendonly=True)
    bob = started.address.replace("//", "//bob:secret@")
    with redis.Redis.from_url(started.url) as raw:
        raw.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "&*", "+@all")
        raw.execute_command("ACL", "SETUSER", "default", "off", "resetkeys", "resetchannels", "-@all")
    is_affected = server_label(server.executable).startswith("redis-7.")
    code, found = examined(capsys, "--url", bob, "--no-probe")
    assert (code, found["server/default user"]["severity"]) == ((3, "error") if is_affected else (0, "ok"))
    if is_affected:
        before, _, fix = found["server/default user"]["fix"].partition(" ACL SETUSER ")
        assert before == 'redis-cli -u "$PENSTOCK_URL"'
        with redis.Redis.from_url(bob) as raw:
            raw.execute_command("ACL", "SETUSER", *shlex.split(fix.partition(";")[0]))
        _, found = examined(capsys, "--url", bob, "--no-probe")
        assert found["server/default user"]["severity"] == "ok"
    with pytest.raises(redis.AuthenticationError), redis.Redis.from_url(started.url) as raw:
        raw.ping()


def test_no_advice_names_a_command_that_the_server_refuses(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Managed servers refuse CONFIG, so a user who pastes it there learns nothing."""
    refusing = {"rename-command CONFIG": '""', "maxmemory-policy": "allkeys-lru"}
    started = fresh_server(maxmemory_bytes=64 << 20, password="", extra=refusing)
    with pytest.raises(ServerUnsuitable, match=r"allkeys-lru.*to noeviction where the server is managed") as refused:
        penstock.Writer("train", url=started.url)
    assert "redis-cli" not in str(refused.value)
    code, found = examined(capsys, "--url", started.url, "--no-probe")
    assert code == 3
    assert found["server/eviction"]["fix"] == (
        "set maxmemory-policy to noeviction where the server is managed, because it refuses CONFIG"
    )
    assert not [one for one in found.values() if "CONFIG SET" in one["fix"]]


def test_a_user_without_the_right_to_config_is_told_to_ask_an_administrator(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """One's own server is not managed elsewhere, though it refuses CONFIG to this user."""
    started = fresh_server(maxmemory_bytes=64 << 20, password="", extra={"maxmemory-policy": "allkeys-lru"})
    with redis.Redis.from_url(started.url) as raw:
        raw.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "&*", "+@all", "-config")
    url = started.address.replace("//", "//bob:secret@")
    run = "as an administrator run `CONFIG SET maxmemory-policy noeviction`, or set it where the server is managed"
    with pytest.raises(ServerUnsuitable) as refused:
        penstock.Writer("train", url=url)
    assert str(refused.value).endswith(f"samples unread: this user may not use CONFIG, so {run}")
    _, found = examined(capsys, "--url", url, "--no-probe")
    assert found["server/eviction"]["fix"] == run.replace("`", "")


def test_a_group_without_a_trainer_is_dropped_only_if_none_comes_back(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed trainer that is started again goes on where it was. A drop would lose that."""
    url = fresh_server(password="").url
    with penstock.Writer("train", url=url) as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros(10, np.uint8)})
    assert main(["groups", "declare", "train", "night", "--url", url]) == 0
    capsys.readouterr()
    _, found = examined(capsys, "train", "--url", url, "--no-probe")
    assert found["stream train/absent groups"]["fix"] == (
        f"start the trainer of night again; only if it never comes back: penstock groups drop train night --url {url}"
    )


def test_streams_that_are_not_examined_are_no_foreign_keys(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """The payload of the other streams counted as what is not payload, and their budgets as free."""
    url = fresh_server(maxmemory_bytes=160 << 20).url
    for name, count in (("photos.train", 30), ("photos.val", 1)):
        with penstock.Writer(name, url=url, budget_bytes=48 << 20) as writer, writer.epoch() as epoch:
            for _ in range(count):
                epoch.write({"x": np.zeros(1 << 20, np.uint8)})
    _, found = examined(capsys, "photos.val", "--url", url, "--no-probe")
    assert found["server/memory"]["severity"] == "ok", found["server/memory"]
    with redis.Redis.from_url(url) as raw:
        raw.config_set("maxmemory", 48 << 20)
    _, found = examined(capsys, "photos.val", "--url", url, "--no-probe")
    number = r"([0-9.]+) MiB"
    told = re.match(f"{number} of 48 MiB are used, {number} by what is not payload", found["server/memory"]["found"])
    assert told, found["server/memory"]
    used, others = map(float, told.groups())
    assert used > others + 30
    advised = re.search(r"CONFIG SET maxmemory (\d+)mb", found["server/memory"]["fix"])
    assert advised
    with redis.Redis.from_url(url) as raw:
        raw.config_set("maxmemory", int(advised[1]) << 20)
    _, found = examined(capsys, "photos.val", "--url", url, "--no-probe")
    assert found["server/memory"]["severity"] == "ok", "what it advised is enough"


def test_the_findings_on_a_server_and_on_its_streams_advise_one_limit(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream's finding left out the budgets of the other streams, and its limit would have been too small."""
    url = fresh_server(maxmemory_bytes=160 << 20).url
    for name in ("train", "val"):
        with penstock.Writer(name, url=url, budget_bytes=48 << 20) as writer, writer.epoch() as epoch:
            epoch.write({"x": np.zeros(1 << 20, np.uint8)})
    with connect(url) as client:
        note_wait(
            client, writer.stream.partitions[0], 0, 0, waited_s=5, need_bytes=9, held_bytes=9, why="memory",
            is_next=True,
        )  # fmt: skip
    with redis.Redis.from_url(url) as raw:
        raw.config_set("maxmemory", 20 << 20)
    _, found = examined(capsys, "--url", url, "--no-probe")
    limits = {
        key: limit
        for key, one in found.items()
        for limit in re.findall(r"CONFIG SET maxmemory (\d+mb)", one["fix"])
    }  # fmt: skip
    assert {"server/memory", "stream val/waiting writers"} <= limits.keys()
    assert len(set(limits.values())) == 1, limits


def test_a_dead_server_of_jobs_is_an_error_that_names_its_own_setting(
    any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a note that advised to set PENSTOCK_URL, and the exit code was 0 though no job could be made."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    code, found = examined(capsys, "--no-probe", "--queue-url", "redis://127.0.0.1:1")
    assert code == 3
    away = found["queue/reachable"]
    assert away["severity"] == "error"
    assert "no Redis answers at redis://127.0.0.1:1 (" in away["found"]
    assert "PENSTOCK_URL" not in away["found"] + away["fix"]
    assert away["fix"] == "set PENSTOCK_QUEUE_URL (or --queue-url) to a server that runs"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["doctor", "trian"], "penstock: no stream 'trian'"),
        (["doctor", "--url", "redis://127.0.0.1:1"], "penstock: no Redis answers at redis://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_examined_is_one_line(
    argv: list[str], line: str, any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 tells CI that nothing was checked."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(line)


def test_queued_jobs_of_a_stream_that_is_gone_are_named(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No time removes them, and no other command showed them."""
    monkeypatch.setenv("PENSTOCK_QUEUE_URL", url)
    penstock.Writer("train", url=url, spec={"y": ("int64", ())}).close()
    dispatcher = Dispatcher(url, "penstock")
    dispatcher.enqueue([TASK, TASK.model_copy(update={"manifest_id": "n", "stream": "kl"})])
    dispatcher.close()
    _, found = examined(capsys, "--url", url, "--no-probe")
    assert found["queue/jobs"]["severity"] == "note"
    assert found["queue/jobs"]["found"].startswith("queue 'penstock' has jobs of kl, which this server does not have: ")
    program, *words = shlex.split(os.path.expandvars(found["queue/jobs"]["fix"].partition(": ")[2]))
    subprocess.run([Path(sys.executable).parent / program, *words], check=True)
    _, found = examined(capsys, "--url", url, "--no-probe")
    assert "queue/jobs" not in found
