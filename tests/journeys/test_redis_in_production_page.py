"""docs/redis-in-production.md: its formula against the memory of real servers, each of its commands and users."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock.cli import typed
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from tests.common.server.test_tls import TlsFront
from tests.journeys.test_acl_page import BLOCKS as LINES
from tests.journeys.test_acl_page import DATA

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "redis-in-production.md").read_text()
BLOCKS: list[tuple[str, str, str]] = re.findall(
    r"^```(sh|python|text) ?(\S*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)
QUIET = penstock.Tuning(notify=lambda _: None)
SMALL = penstock.Tuning(notify=lambda _: None, block_bytes=1_000_000)
IMPATIENT = penstock.Tuning(notify=lambda _: None, room_wait_s=0.2)
HEADER_BYTES = 150
"""At most what a sample of 150 kB in segments takes of the server's memory, in blocks of 1 MB."""
TRAINING = """\
import penstock

with penstock.Loader("train", group="net", batch_size=50) as loader:
    assert sum(len(batch["y"]) for batch in loader) == 300
"""


def shell(having: str) -> str:
    """Return the block of shell commands with this text."""
    (text,) = (text for language, _, text in BLOCKS if language == "sh" and having in text)
    return text


def search_path() -> str:
    """Return a PATH on which redis-server, redis-cli and penstock are found."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in bash, with this folder as its own and a clean environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment = kept | {"PATH": search_path()} | variables
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def free_port() -> int:
    """Return a port that is not in use now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# --- memory -----------------------------------------------------------------------------------------------------------


def sizing() -> dict[str, Any]:
    """Run the page's script and return its names."""
    (script,) = (text for _, name, text in BLOCKS if name == "sizing.py")
    names: dict[str, Any] = {"print": lambda text: names.update(printed=text)}
    exec(script, names)
    return names


def test_the_worked_example_is_what_the_script_prints() -> None:
    """A reader compares his own numbers with it."""
    (shown,) = (text for language, name, text in BLOCKS if language == "text" and not name)
    assert sizing()["printed"] == shown.strip()


def test_the_example_of_a_data_set_is_what_the_formula_gives() -> None:
    """A reader with a data set of his own looks for the row that is like it."""
    names, groups = sizing(), 3
    leads = {"lead": names["lead"], "Redis": 900_000, "segments": 900_000}
    head = "| the stream keeps | budget | `maxmemory` |\n|---|---|---|\n"
    rows = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()
    for row, (kept, lead) in zip(rows, leads.items(), strict=True):
        budget = names["budget_bytes"](names["sample"], lead)
        inline, headers = ([], HEADER_BYTES * lead) if kept == "segments" else ([budget], 0)
        maxmemory = names["maxmemory_bytes"](inline, samples=lead, groups=groups) + headers / 0.9
        assert kept in row
        assert re.findall(r"([\d.]+) GB", row) == [f"{budget / 1e9:.1f}", f"{maxmemory / 1e9:.1f}"]
    assert f"{900_000 * names['sample'] / 1e9:.0f} GB as `uint8`" in PAGE


def test_a_sample_in_segments_takes_little_of_the_server(any_url: str, any_client: redis.Redis, tmp_path: Path) -> None:
    """The example has the memory that a whole epoch in segments needs."""
    samples, sample = 1000, {"x": np.zeros((224, 224, 3), np.uint8), "y": 0}
    with (
        penstock.Writer("train", url=any_url, payload=f"segments:{tmp_path}", tuning=SMALL) as writer,
        writer.epoch() as epoch,
    ):
        for _ in range(samples):
            epoch.write(sample)
    used = sum(any_client.memory_usage(key, samples=0) or 0 for key in any_client.scan_iter())
    assert HEADER_BYTES / 3 < used / samples < HEADER_BYTES


@pytest.mark.parametrize(("sample_bytes", "groups"), [(1_000, 1), (150_000, 3), (40, 3)])
def test_the_formula_is_enough_and_not_much_too_much(
    fresh_server: Callable[..., EmbeddedServer], sample_bytes: int, groups: int
) -> None:
    """On a server that is too small writers wait before the lead is reached. One that is too large costs money."""
    names, lead = sizing(), 40_000_000 // (sample_bytes + 20)
    budget = names["budget_bytes"](sample_bytes, lead)
    limit = names["maxmemory_bytes"]([budget], samples=lead, groups=groups)
    server, written = fresh_server(maxmemory_bytes=limit), 0
    spec = {"x": ("uint8", (sample_bytes,))}
    sample = {"x": np.zeros(sample_bytes, np.uint8)}
    with (
        pytest.raises(penstock.errors.BudgetFull),
        penstock.Writer("train", url=server.url, budget_bytes=budget, spec=spec, tuning=IMPATIENT) as writer,
        writer.epoch(sizes=[1, 1 << 20]) as epoch,  # the first shard stays open, so the second is an ordinary one
        epoch.shard(1) as shard,
    ):
        for written in range(2 * lead):  # noqa: B007
            shard.write(sample)
    assert lead <= written <= 1.1 * lead
    with redis.Redis.from_url(server.url) as client:
        assert 0.4 * limit < client.info("memory")["used_memory"] < 0.9 * limit


def test_a_group_costs_a_bit_or_two_for_each_sample(any_url: str, any_client: redis.Redis) -> None:
    """The page says that the number of groups hardly counts."""
    samples = 80_000
    with (
        penstock.Writer("train", url=any_url, spec={"x": ("uint8", ())}, tuning=QUIET) as writer,
        writer.epoch(sizes=[samples]) as epoch,
        epoch.shard(0) as shard,
    ):
        for _ in range(samples):
            shard.write({"x": 0})
    with penstock.Loader("train", group="net", batch_size=1000, url=any_url, tuning=QUIET) as loader:
        assert sum(1 for _ in loader) == samples // 1000
        ledgers = [key for key in any_client.scan_iter("*:net*") if b":ledger:" in key]
        assert samples / 8 <= sum(any_client.memory_usage(key) or 0 for key in ledgers) < samples / 4


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_settings_of_the_table_are_those_of_the_file() -> None:
    """The page and the file are copied from by different people."""
    conf = dict(line.split(None, 1) for line in (ROOT / "docker" / "redis.conf").read_text().splitlines()
                if line and not line.startswith(("#", "client-output")))  # fmt: skip
    table = PAGE.partition("| setting | value | why |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE)
    told: dict[str, str] = {}
    for names, values in rows:
        told.update(zip(re.findall("`(.*?)`", names), re.findall("`(.*?)`", values), strict=False))
    assert len(told) >= 7
    assert told == {name: conf[name] for name in told}


# --- TLS and users ----------------------------------------------------------------------------------------------------


@contextmanager
def tls_server(folder: Path) -> Iterator[int]:
    """Run the page's server and return its port. Where no server here has TLS, one gets a front that has it."""
    port = free_port()
    (conf,) = (text for _, name, text in BLOCKS if name == "redis-tls.conf")
    with ExitStack() as ending:
        for executable in find_servers():
            if ending.enter_context(started(executable, folder, conf.replace("tls-port 6379", f"tls-port {port}"))):
                yield port
                return
        plain = re.sub(r"^(port|tls-).*\n", "", conf, flags=re.MULTILINE) + f"port {port}\n"
        assert ending.enter_context(started(find_servers()[0], folder, plain)), (folder / "server.log").read_text()
        yield ending.enter_context(closing(TlsFront(port, folder / "server.crt", folder / "server.key"))).port


@contextmanager
def started(executable: Path, folder: Path, conf: str) -> Iterator[bool]:
    """Start a server with these settings, and yield whether it runs. It ends with the block."""
    log = folder / "server.log"
    (folder / "redis-tls.conf").write_text(conf)
    with log.open("wb") as out:
        server = subprocess.Popen([executable, "redis-tls.conf"], cwd=folder, stdout=out, stderr=out, umask=0o077)
    try:
        while server.poll() is None and "Ready to accept" not in log.read_text():
            time.sleep(0.02)
        yield server.poll() is None
    finally:
        server.kill()
        server.wait()


def without_tls(executable: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Make the page's files in a folder. Return the settings without TLS, and the address of each user and of nobody.

    Not every server here is built with TLS.
    """
    make_files(executable, folder)
    port = free_port()
    (conf,) = (text for _, name, text in BLOCKS if name == "redis-tls.conf")
    urls = {"nobody": f"redis://localhost:{port}"}
    for address in folder.glob("*.url"):
        login = address.read_text().partition("//")[2].partition("@")[0]
        urls[address.stem] = f"redis://{login}@localhost:{port}"
        address.write_text(urls[address.stem])
    return re.sub(r"^(port|tls-).*\n", "", conf, flags=re.MULTILINE) + f"port {port}\n", urls


def make_files(executable: Path, folder: Path) -> None:
    """Make the certificates and users of the page, for this version of the server."""
    is_old = server_label(executable).startswith("redis-6.")
    (folder / "lines.txt").write_text(LINES["redis-6.2" if is_old else "redis-7"])
    for having in ("openssl req", "default off", "lines.txt"):
        done = run(shell(having), folder)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder with the certificates and addresses of a running server that the page's commands made."""
    folder = tmp_path_factory.mktemp("secured")
    (folder / "mydata.py").write_text(DATA)
    (folder / "train.py").write_text(TRAINING)
    oldest = min(find_servers(), key=lambda one: not server_label(one).startswith("redis-6."))
    make_files(oldest, folder)  # its rules are understood by all
    with tls_server(folder) as port:
        for address in folder.glob("*.url"):
            address.write_text(address.read_text().replace(":6379", f":{port}"))
        done = run(shell("penstock produce"), folder)
        assert done.returncode == 0, done.stderr
        yield folder


def test_what_the_page_makes_is_private(secured: Path) -> None:
    """Other users of the host must not read keys and passwords."""
    made = [*secured.glob("*.key"), *secured.glob("*.password"), *secured.glob("*.url"), secured / "users.acl"]
    assert len(made) == 13
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}


@pytest.mark.slow
def test_the_administrator_runs_the_doctor(
    secured: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other users, by design, see neither settings nor every key."""
    monkeypatch.chdir(secured)
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.setenv("PENSTOCK_URL_FILE", "admin.url")
    assert main(["doctor"]) == 0, capfd.readouterr()


def test_nobody_comes_in_without_a_password_or_with_another_ca(secured: Path) -> None:
    """The default user is off, and a client trusts the named CA only."""
    url = (secured / "trainer.url").read_text().strip()
    with redis.Redis.from_url(re.sub("//.*@", "//", url)) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    with pytest.raises(penstock.errors.ServerUnavailable, match="ssl_ca_certs"):
        penstock.Loader("train", group="net", batch_size=1, url=url.partition("?")[0])


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_a_server_with_these_users_keeps_its_streams_over_a_restart(executable: Path, tmp_path: Path) -> None:
    """Redis 7.0 replays transactions with the rights of the default user, who is off. It lost them without a word."""
    conf, urls = without_tls(executable, tmp_path)
    with started(executable, tmp_path, conf) as is_running:
        assert is_running
        with penstock.Writer("train", url=urls["producer"], tuning=QUIET) as writer, writer.epoch() as epoch:
            for number in range(100):
                epoch.write({"x": np.int64(number)})
    with started(executable, tmp_path, conf) as is_running:
        assert is_running
        assert "NOPERM" not in (tmp_path / "server.log").read_text()
        replay = penstock.Replay("train", epoch=0, batch_size=100, url=urls["trainer"])
        assert sorted(x for batch in replay for x in batch["x"].tolist()) == [*range(100)]
        for login in ("nobody@", "default:@", "default:password@"):
            url = urls["nobody"].replace("//", "//" + login.removeprefix("nobody@"))
            with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
                client.ping()


def test_a_password_is_rotated_while_programs_run(tmp_path: Path) -> None:
    """Whoever replaces the only password ends every producer, worker and trainer."""
    executable = find_servers()[0]
    conf, urls = without_tls(executable, tmp_path)
    old, file = urls["producer"], tmp_path / "producer.url"
    here = urls["nobody"].partition("//")[2]

    def rotate(having: str) -> None:
        text = shell(having).replace(" --cacert ca.crt", "").replace("rediss:", "redis:")
        done = run(text.replace("localhost:6379?ssl_ca_certs=$PWD/ca.crt", here), tmp_path)
        assert (done.returncode, done.stdout.split()) == (0, ["OK", "OK"]), done

    with started(executable, tmp_path, conf) as is_running, redis.Redis.from_url(urls["admin"]) as admin:
        assert is_running
        with penstock.Writer("train", url=old, tuning=QUIET) as writer:
            with writer.epoch() as epoch:
                epoch.write({"x": np.int64(0)})
                rotate(">%s")
                assert admin.client_kill_filter(skipme=True, _type="normal") > 0
                epoch.write({"x": np.int64(1)})  # logs in again with the old one
            new = file.read_text().strip()
            assert new != old
            with penstock.Writer("train", url=new, tuning=QUIET) as newer, newer.epoch() as epoch:
                epoch.write({"x": np.int64(2)})
                rotate("<%s")
                admin.client_kill_filter(skipme=True, _type="normal")
                epoch.write({"x": np.int64(3)})
        assert (tmp_path / "producer.password").read_text().strip() in new
    with started(executable, tmp_path, conf) as is_running:  # ACL SAVE kept it
        assert is_running
        inspect = f"penstock inspect train --url {new}; PENSTOCK_URL_FILE=producer.url penstock inspect train"
        assert run(inspect, tmp_path).stdout.count("train") > 1
        file.write_text(old)
        done = run("PENSTOCK_URL_FILE=producer.url penstock inspect train", tmp_path)
    assert done.returncode == 1
    assert ": put user and password into producer.url, which PENSTOCK_URL_FILE names; a program reads" in done.stderr


# --- backup -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_a_restored_server_continues_where_the_backup_was_made(executable: Path, tmp_path: Path) -> None:
    """The samples and the ledger of the group are there, bit-exact, a group reads on, and no protection is missing."""
    conf, urls = without_tls(executable, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(executable)
    path = os.pathsep.join([str(tmp_path / "bin"), search_path()])
    with started(executable, tmp_path, conf) as is_running:
        assert is_running
        with penstock.Writer("train", url=urls["producer"], tuning=QUIET) as writer, writer.epoch() as epoch:
            for number in range(100):
                epoch.write({"x": np.full(1000, number, np.float32)})
        with penstock.Loader("train", group="net", batch_size=40, url=urls["trainer"], tuning=QUIET) as loader:
            batches = iter(loader)
            seen = {int(row[0]) for _ in range(2) for row in next(batches)["x"]}
            assert run(shell("--rdb").replace(" --cacert ca.crt", ""), tmp_path).returncode == 0
    # only the first of both batches was acknowledged
    restoring = shell("restored/dump.rdb").replace(" --cacert ca.crt", "")
    try:
        done = run(restoring, tmp_path, PATH=path)
        assert (done.returncode, "lost 0, duplicate 0" in done.stdout) == (0, True), done.stderr
    finally:
        with redis.Redis.from_url(urls["admin"]) as client, suppress(redis.ConnectionError):
            client.shutdown(nosave=True)
    restored = tmp_path / "restored"
    with started(executable, restored, (restored / "redis-tls.conf").read_text()) as is_running:
        assert is_running
        with penstock.Loader(
            "train",
            group="net",
            batch_size=40,
            url=urls["trainer"],
            tuning=penstock.Tuning(lease_s=1.0, notify=lambda _: None),
        ) as loader:
            rest = [int(row[0]) for batch in loader for row in batch["x"]]
        assert len(rest) == 60
        assert len(set(rest) - seen) == 20
        with redis.Redis.from_url(urls["admin"]) as client:
            info = client.info()
            assert (info["aof_enabled"], info["maxmemory"]) == (1, 2 << 30)
        with redis.Redis.from_url(urls["nobody"]) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_an_export_is_a_backup_of_epochs(secured: Path) -> None:
    """The commands as they stand, with the page's certificates and users."""
    done = run(shell("penstock export"), secured)
    assert done.returncode == 0, done.stderr
    url = (secured / "trainer.url").read_text().strip()
    for epoch in (0, 1):
        replay = penstock.Replay("copy", epoch=epoch, batch_size=100, url=url)
        assert sorted(y for batch in replay for y in batch["y"].tolist()) == [*range(300)]


def test_a_server_with_tls_is_copied_as_a_whole(secured: Path) -> None:
    """The command as it stands. redis-cli does not take the CA from the address."""
    clients = [folder for folder in search_path().split(os.pathsep) if has_tls(Path(folder) / "redis-cli")]
    if not clients:
        pytest.skip("no redis-cli here is built with TLS")
    done = run(f"PATH={clients[0]}:$PATH\n{shell('--rdb')}", secured)
    assert done.returncode == 0, done.stderr
    assert (secured / "backup.rdb").read_bytes().startswith(b"REDIS")


def has_tls(redis_cli: Path) -> bool:
    """Return whether this redis-cli exists and is built with TLS."""
    if not redis_cli.exists():
        return False
    found = subprocess.run([redis_cli, "--help"], capture_output=True, text=True, check=False)
    return "--cacert" in found.stdout + found.stderr


def test_a_fix_of_the_doctor_names_the_certificate(secured: Path) -> None:
    """redis-cli does not take it from the address."""
    args = argparse.Namespace(url=None)
    with connect((secured / "admin.url").read_text().strip()) as client, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_URL_FILE", str(secured / "admin.url"))
        found = typed("redis-cli CONFIG SET maxmemory 1gb", args, client)
    assert found == f'redis-cli -u "$(cat "$PENSTOCK_URL_FILE")" --cacert {secured / "ca.crt"} CONFIG SET maxmemory 1gb'


def test_every_block_is_run() -> None:
    """A block that is never run becomes wrong one day."""
    used = (
        "openssl req",
        "default off",
        "lines.txt",
        "penstock produce",
        ">%s",
        "<%s",
        "--rdb",
        "restored/dump.rdb",
        "penstock export",
    )
    assert {shell(having) for having in used} == {text for language, _, text in BLOCKS if language == "sh"}
