"""Metrics: what Prometheus reads from a real run. Rules and dashboards ask only for existing metrics."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rq import Queue

import penstock
from penstock.views.exporter import NODE_TABLE, QUEUE_TABLE, TABLE
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream
from tests.contracts.processes import child
from tests.journeys.trouble import stopped

ROOT = Path(penstock.__file__).parents[2]
MONITORING = ROOT / "docker" / "monitoring"
_PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
PATIENCE_S = 60.0
Key = tuple[str, frozenset[tuple[str, str]]]


@contextmanager
def exporting(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``penstock exporter`` on a free port, and yield it with the address of its metrics."""
    command = [sys.executable, "-m", "penstock", "exporter", "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONPATH": _PATHS}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as ran:
        try:
            assert ran.stdout is not None
            told = re.search(r"http://\S+/metrics", ran.stdout.readline())
            assert told is not None
            yield ran, told[0]
        finally:
            ran.kill()


def scraped(where: str) -> dict[Key, float]:
    """Return all samples, as the library's own parser reads them."""
    with urllib.request.urlopen(where, timeout=30) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def of(name: str, **labels: str) -> Key:
    """Return one time series."""
    return name, frozenset(labels.items())


def until(where: str, holds: Callable[[dict[Key, float]], bool]) -> dict[Key, float]:
    """Scrape until the condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not holds(found := scraped(where)):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def write(writer: penstock.Writer, count: int) -> None:
    """Write an epoch with one sample an entry."""
    with writer.epoch(sizes=[count]) as epoch, epoch.shard(0) as part:
        for number in range(count):
            part.write({"x": np.full(1000, number % 251, dtype=np.uint8)})


def test_metrics_say_what_the_stream_is_and_outlive_its_server(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """A dashboard that shows the last good numbers of a dead server is worse than none."""
    server = fresh_server(maxmemory_bytes=256 << 20)
    url = server.url
    spec = {"x": ("uint8", (1000,))}
    with penstock.Writer(
        "train", url=url, spec=spec, tuning=penstock.Tuning(block_bytes=1), budget_bytes=1 << 20
    ) as writer:
        write(writer, 20)
    with exporting("--url", url) as (ran, where):
        with penstock.Loader(
            "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0")
        ) as loader:
            assert sum(batch.size for batch in loader) == 20
            members = of("penstock_group_members", stream="train", group="resnet")
            found = until(where, lambda now: now.get(members) == 1)
        assert found[of("penstock_up")] == 1
        assert found[of("penstock_server_limit_bytes")] == 256 << 20
        assert found[of("penstock_stream_held_bytes", stream="train")] == 20_000
        assert found[of("penstock_stream_budget_bytes", stream="train")] == 1 << 20
        assert found[of("penstock_stream_epochs", stream="train", state="produced")] == 1
        assert found[of("penstock_group_lag_samples", stream="train", group="resnet")] == 0
        assert found[of("penstock_stream_written_samples_total", stream="train")] == 0
        with penstock.Writer("train", url=url) as writer:
            write(writer, 7)
        written = of("penstock_stream_written_samples_total", stream="train")
        found = until(where, lambda now: now[written] == 7)
        assert found[of("penstock_stream_written_bytes_total", stream="train")] == 7000
        server.kill()
        found = until(where, lambda now: now[of("penstock_up")] == now[of("penstock_queue_up")] == 0)
        assert {name for name, _ in found} == {"penstock_up", "penstock_queue_up"}
        ran.send_signal(signal.SIGTERM)
        assert (ran.wait(timeout=30), ran.stderr.read() if ran.stderr else "") == (0, "")


def test_a_silent_server_is_down_within_seconds(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """Dashboards showed its last numbers for half a minute, as if they were new."""
    server = fresh_server()
    with penstock.Writer("train", url=server.url, spec={"x": ("uint8", (1000,))}) as writer:
        write(writer, 3)
    with exporting("--url", server.url) as (_, where):
        assert scraped(where)[of("penstock_up")] == 1
        with stopped(server):
            began_s = time.monotonic()
            found = until(where, lambda now: now[of("penstock_up")] == 0)
            assert time.monotonic() - began_s < 15
            assert of("penstock_stream_held_bytes", stream="train") not in found
        until(where, lambda now: now[of("penstock_up")] == 1)


def test_the_queues_server_is_counted_and_may_go_away_alone(
    any_url: str, any_client: Any, fresh_server: Callable[..., EmbeddedServer]
) -> None:
    """Jobs that no worker takes, or that fail, stop epochs, and the streams' server does not know them."""
    for name in ("train", "digits.val"):
        with penstock.Writer(name, url=any_url, spec={"x": ("uint8", (1000,))}):
            pass
    queue_server = fresh_server()
    with redis.Redis.from_url(queue_server.url) as connection:
        queues = {name: Queue(name, connection=connection) for name in ("penstock", "penstock.val")}
        _, failed = (queues["penstock"].enqueue("builtins.str", number) for number in range(2))
        queues["penstock.val"].enqueue("builtins.str", 3)
        queues["penstock"].remove(failed)
        queues["penstock"].failed_job_registry.add(failed)
        connection.zadd(queues["penstock"].started_job_registry.key, {"job:execution": time.time() + 60})
        connection.set(queues["penstock.val"].failed_job_registry.key, "not a registry")
    with exporting("--url", any_url, "--queue-url", queue_server.url) as (_, where):
        found = until(where, lambda now: now.get(of("penstock_queue_up")) == 1)
        counts = {(dict(labels)["queue"], name): value for (name, labels), value in found.items() if "_jobs" in name}
        assert counts == {
            ("penstock", "penstock_queue_waiting_jobs"): 1, ("penstock", "penstock_queue_running_jobs"): 1,
            ("penstock", "penstock_queue_failed_jobs"): 1,
            ("penstock.val", "penstock_queue_waiting_jobs"): 1, ("penstock.val", "penstock_queue_running_jobs"): 0,
        }  # fmt: skip
        assert found[of("penstock_queue_used_bytes")] > 0
        queue_server.kill()
        found = until(where, lambda now: now[of("penstock_queue_up")] == 0)
        assert found[of("penstock_up")] == 1
        assert not [name for name, _ in found if name.startswith("penstock_queue_") and name != "penstock_queue_up"]


@pytest.mark.parametrize("refusing", ["streams", "queue"])
def test_an_exporter_whose_login_is_refused_takes_the_new_one(
    refusing: str, any_url: str, fresh_server: Callable[..., EmbeddedServer], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A password that is replaced must not end what tells of the servers. The file is read again."""
    server, file = fresh_server(password=""), tmp_path / "monitor.url"
    variable, other = "PENSTOCK_URL", "PENSTOCK_QUEUE_URL"
    if refusing == "queue":
        variable, other = other, variable
    monkeypatch.setenv(f"{variable}_FILE", str(file))
    monkeypatch.setenv(other, any_url)
    up, other_up = of("penstock_up"), of("penstock_queue_up")
    if refusing == "queue":
        up, other_up = other_up, up
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "monitor", "on", ">old", "~*", "&*", "+@all")
        file.write_text(server.url.replace("//", "//monitor:old@"))
        with exporting() as (ran, where):
            until(where, lambda now: now[up] == now[other_up] == 1)
            admin.execute_command("ACL", "SETUSER", "monitor", "resetpass", ">new")
            admin.execute_command("CLIENT", "KILL", "USER", "monitor")
            assert until(where, lambda now: now[up] == 0)[other_up] == 1
            file.write_text(server.url.replace("//", "//monitor:new@"))
            until(where, lambda now: now[up] == now[other_up] == 1)
            ran.send_signal(signal.SIGTERM)
            assert ran.wait(timeout=30) == 0
            assert ran.stderr is not None
            (line,) = ran.stderr.read().splitlines()
            assert "refused the login (invalid username-password pair or user is disabled): put user" in line
            assert f"into {file}, which {variable}_FILE names" in line
            assert line.endswith(". The exporter itself reads the address anew and tries again every 2 seconds")


def test_an_exporter_without_its_server_at_the_start_ends(any_url: str) -> None:
    """A wrong address is a mistake of whoever typed it. Only a server that was there is waited for."""
    arguments = ["--port", "0", "--url", "redis://127.0.0.1:1", "--queue-url", any_url]
    command = [sys.executable, "-m", "penstock", "exporter", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "no Redis answers at redis://127.0.0.1:1" in ran.stderr) == (1, True), ran.stderr


def test_a_damaged_stream_leaves_the_metrics_of_the_others(any_url: str, any_client: Any) -> None:
    """It is reported once, and its metrics return when it is repaired."""
    for name in ("one", "two"):
        with penstock.Writer(name, url=any_url, spec={"x": ("uint8", (1000,))}) as writer:
            write(writer, 5)
    key = load_stream(any_client, "two").keys.meta
    kept = any_client.dump(key)
    any_client.set(key, "x")
    held = {name: of("penstock_stream_held_bytes", stream=name) for name in ("one", "two")}
    with exporting("--url", any_url) as (ran, where):
        found = until(where, lambda now: held["one"] in now)
        assert held["two"] not in found
        any_client.restore(key, 0, kept, replace=True)
        until(where, lambda now: now.get(held["two"]) == 5000)
        ran.send_signal(signal.SIGTERM)
        assert ran.wait(timeout=30) == 0
        assert ran.stderr is not None
        (line,) = ran.stderr.read().splitlines()
        assert line.startswith(
            f"penstock: stream 'two' cannot be read, and its metrics are left out: {key} is a string"
        )


def queries() -> Iterator[str]:
    """Return every expression of a rule or a panel."""
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((MONITORING / "grafana" / "penstock.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_rules_and_panels_ask_for_metrics_that_there_are() -> None:
    """A misspelt metric makes an alert that never fires, and a panel that is empty for ever."""
    there = {line.name + ("_total" if line.is_counter else "") for line in TABLE}
    there |= {"penstock_up", "penstock_server_used_bytes", "penstock_server_limit_bytes", "penstock_queue_up"}
    there |= {"penstock_queue_used_bytes", "penstock_queue_limit_bytes", *(name for name, _ in QUEUE_TABLE.values())}
    there |= {name for name, *_ in NODE_TABLE}
    asked = [(query, set(re.findall(r"penstock_\w+", query))) for query in queries()]
    assert [query for query, names in asked if not names or names - there] == []
    labels = {"stream", "queue", "node", *(label for line in TABLE for label in line.labels)}
    used = {label for query, _ in asked for label in re.findall(r"[{,]\s*(\w+)\s*=", query)}
    assert used <= labels
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert [name for name in sorted(there) if f"`{name}`" not in page] == []


def test_the_monitoring_services_follow_the_compose_specification() -> None:
    """A file that is mounted and does not exist becomes an empty folder in the container."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, "compose.monitoring.yaml"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    document = yaml.safe_load((ROOT / "compose.monitoring.yaml").read_text())
    for service in document["services"].values():
        assert not {"container_name", "ports", "hostname"} & set(service)
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in document["volumes"]


def tool(name: str) -> str:
    """Return Prometheus' own program. Without it, the library's parser above tests the same."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_prometheus_takes_the_rules_and_they_fire_when_they_should() -> None:
    """docker/monitoring/alerts_test.yml plays a dead member, a starving trainer, an absent group and a full server."""
    promtool = tool("promtool")
    for arguments in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False, cwd=MONITORING)
        assert done.returncode == 0, done.stdout + done.stderr


SOURCE = """
import time
import numpy as np

data = [(np.full(1000, i % 251, np.uint8), i) for i in range(100_000)]

def slow(sample, rng):
    time.sleep(0.01)
    return sample
"""


def train(url: str) -> None:
    """Train without an end, faster than a worker makes samples."""
    with penstock.Loader(
        "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0")
    ) as loader:
        while True:
            for _ in loader:
                time.sleep(0.005)


@contextmanager
def fleet(url: str, folder: Path) -> Iterator[str]:
    """Start a production with a worker, a trainer and an exporter in separate processes, and return the metrics'
    address.
    """
    (folder / "photos.py").write_text(SOURCE)
    making = [sys.executable, "-m", "penstock", "produce", "dataset", "photos:data", "--transform", "photos:slow"]
    making += ["--workers", "1", "--budget", "64mb", "--url", url, "--queue-url", url]
    environment = {**os.environ, "PYTHONPATH": _PATHS}
    with subprocess.Popen(making, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as producing:
        try:
            with child(train, url), exporting("--url", url) as (_, where):
                yield where
        finally:
            producing.terminate()
            producing.wait(timeout=60)


def test_what_workers_and_trainers_say_of_themselves_comes_through_one_exporter(any_url: str, tmp_path: Path) -> None:
    """None of them serves metrics itself, because a changing fleet would need a list of hosts and ports."""
    with fleet(any_url, tmp_path) as where:
        ratio = of("penstock_group_wait_ratio", stream="train", group="resnet")
        wished = of("penstock_workers_wished", stream="train")
        found = until(where, lambda now: now.get(ratio, 0.0) > 0.2 and now.get(wished, 0.0) > 1)
        (host,) = [dict(labels)["host"] for name, labels in found if name == "penstock_workers"]
        assert found[of("penstock_workers", stream="train", host=host)] == 1
        kinds = ("busy", "room_wait", "idle")
        shares = [found[of(f"penstock_worker_{kind}_ratio", stream="train", host=host)] for kind in kinds]
        assert shares[0] > 0.3
        assert sum(shares) == pytest.approx(1.0, abs=0.05)
        assert found[of("penstock_group_given_samples_total", stream="train", group="resnet")] > 0


def test_a_real_prometheus_fills_every_panel_of_a_real_run(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path
) -> None:
    """Prometheus must accept what our parser accepts, and a panel with a wrong query is empty for ever."""
    program = tool("prometheus")
    server = fresh_server(maxmemory_bytes=256 << 20)
    with fleet(server.url, tmp_path) as where, prometheus(program, where, tmp_path) as port:
        panels = json.loads((MONITORING / "grafana" / "penstock.json").read_text())["panels"]
        for query in (target["expr"] for panel in panels for target in panel["targets"]):
            # a panel that is shown only for a problem is asked without that condition
            assert asked(port, re.sub(r" > 0$", "", query.replace("$stream", ".*"))) is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules") as got:
            (group,) = json.load(got)["data"]["groups"]
        assert {rule.get("lastError", "") for rule in group["rules"]} == {""}
        assert len(group["rules"]) == len(yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"])


@contextmanager
def prometheus(program: str, where: str, folder: Path) -> Iterator[int]:
    """Start a Prometheus that scrapes the exporter by our configuration and rules every second, and return its port."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(MONITORING / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [re.sub(r"^http://|/metrics$", "", where)]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as ran:
        try:
            yield port
        finally:
            ran.kill()


def asked(port: int, query: str) -> Any:
    """Return the value of one series, as soon as Prometheus has it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}") as got:
                result = json.load(got)["data"]["result"]
        except OSError:  # it reports that it listens before it does
            result = []
        if result:
            return result[0]["value"][1]
        time.sleep(0.2)
    raise AssertionError(f"Prometheus has nothing for {query}")
