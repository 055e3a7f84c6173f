"""The compose stack: its file against the specification, its servers' settings on real servers, its commands run here.

Images, networks and restarts need an engine and are not tested. docs/internals/compose-runs.md lists manual runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import redis
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock import Writer
from penstock.cli import parser_of
from penstock_common.stream.servers.embedded import ALLOCATOR_ENVIRONMENT, find_servers, server_label
from tests.journeys.compose_services import (
    ROOT,
    Stack,
    copied_files,
    load_secrets,
    load_services,
    make_secrets,
    running,
)

SAMPLES = 5 * 1438
"""Five epochs of the digits that are not held out."""
SERVERS = ("redis", "queue")


@pytest.fixture(scope="module")
def dockerfile() -> str:
    """Return docker/Dockerfile."""
    return (ROOT / "docker" / "Dockerfile").read_text()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_follows_the_compose_specification() -> None:
    """A misspelt key is ignored by some engines and refused by others."""
    pytest.importorskip("check_jsonschema", reason="the package that carries the specification's schema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_can_be_scaled_and_run_twice_on_a_host() -> None:
    """A fixed name or port makes `--scale worker=4` fail at the second container."""
    for name, service in load_services().items():
        assert not {"container_name", "ports", "hostname"} & set(service), name


def test_what_services_depend_on_can_tell_its_state() -> None:
    """A dependency without a healthcheck, or on a step that restarts for ever, never ends its wait."""
    services = load_services()
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed], f"{name} waits for the health of {needed}"
            if how["condition"] == "service_completed_successfully":
                assert services[needed].get("restart", "no").partition(":")[0] in ("no", "on-failure"), needed


def test_no_service_has_more_rights_or_resources_than_it_needs() -> None:
    """A stolen or runaway process stays in its container, with its memory and cores."""
    services = load_services()
    monitoring = yaml.safe_load((ROOT / "compose.monitoring.yaml").read_text())["services"]
    for name, service in {**services, **monitoring}.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["cpus"], name
        assert service.get("read_only") is True or name == "grafana", name
    for name in SERVERS:  # the image's script would begin as root, and needs capabilities to change that
        assert services[name]["user"] == "999:999"
    assert services["redis"]["mem_limit"] == "3g"  # maxmemory, and half of it in addition


def test_workers_and_trainers_have_a_health_check_that_can_be_typed() -> None:
    """A container engine reports a check that it cannot run as unhealthy, and the journey below runs each check."""
    checks = {name: service["healthcheck"]["test"] for name, service in load_services().items() if name not in SERVERS
              if "healthcheck" in service}  # fmt: skip
    assert set(checks) == {"worker", "trainer-a", "trainer-b"}
    for name, (kind, program, command, *arguments) in checks.items():
        assert (kind, program, command) == ("CMD", "penstock", "health")
        args = parsed(command, arguments)
        if name != "worker":
            assert f"--group={args.group}" in load_services()[name]["command"]
            assert args.stream == "digits"


def test_segments_lie_in_one_shared_memory_of_all_who_write_and_read_them() -> None:
    """A container has 64 MB of its own at /dev/shm, in which no other container finds a file."""
    services = load_services({"PENSTOCK_PAYLOAD": "segments:/dev/shm/penstock", "PENSTOCK_SHM_SIZE": "8gb"})
    assert (services["redis"]["ipc"], services["redis"]["shm_size"]) == ("shareable", "8gb")
    for name in ("producer", "worker", "trainer-a", "trainer-b", "audit"):
        assert services[name]["ipc"] == "service:redis", name
    program, command, *arguments = services["producer"]["command"]
    assert program == "penstock"
    assert parsed(command, arguments).payload == "segments:/dev/shm/penstock"
    assert parsed(command, load_services()["producer"]["command"][2:]).payload == "inline"


def test_a_worker_runs_the_transform_of_the_producer_and_reads_its_folder_and_no_other() -> None:
    """Every client that can write to the queue can write jobs."""
    services = load_services()
    produced = parsed("produce", services["producer"]["command"][2:])
    worker = parsed("worker", services["worker"]["command"][2:])
    assert worker.allow == [produced.transform.partition(":")[0]]
    assert all(Path(produced.path).is_relative_to(root) for root in worker.root)
    assert not worker.allow_any


def parsed(command: str, arguments: list[str]) -> argparse.Namespace:
    """Return the parsed arguments of one of our commands."""
    return parser_of(command).parse_args(arguments)


def test_volumes_that_are_used_are_declared() -> None:
    """An undeclared volume is an error only when the stack is started."""
    declared = set(yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"])
    used = {volume.split(":")[0] for service in load_services().values() for volume in service.get("volumes", [])}
    assert {name for name in used if not name.startswith("./")} == declared
    assert all((ROOT / name).is_file() for name in used if name.startswith("./"))


def test_trainers_read_one_stream_in_groups_of_their_own() -> None:
    """Two trainers of one group would get half the samples each."""
    commands = [service["command"] for name, service in load_services().items() if name.startswith("trainer")]
    groups = {part for command in commands for part in command if part.startswith("--group=")}
    assert len(commands) == len(groups) == 2


# --- the images -------------------------------------------------------------------------------------------------------


def test_every_image_is_a_target_that_runs_as_nobody_special(dockerfile: str) -> None:
    """A process that decodes foreign images does not need root."""
    for name, service in load_services().items():
        if "build" in service:
            target = re.search(
                rf"^FROM role AS {service['build']['target']}\n(.*?)(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL
            )
            assert target is not None, name
            assert re.findall(r"^USER (\S+)$", target[1], re.MULTILINE)[-1:] == ["penstock"], name


def test_an_image_installs_its_role_only(dockerfile: str) -> None:
    """A worker's host does not need TensorFlow, and a trainer's needs no queue and no image library."""
    targets = dict(re.findall(r"^FROM role AS (\w+)\n(.*?)(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL))
    extras = {name: re.findall(r"\.whl\)\[([\w,]+)\]", text) for name, text in targets.items()}
    assert extras == {"producer": ["producer"], "trainer": ["tensorflow"], "exporter": ["metrics"], "data": []}


def test_the_packages_of_every_image_are_pinned_to_versions_that_penstock_takes(dockerfile: str) -> None:
    """Without pins, the same source would make other images in a year."""
    _, *lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    needed += [line for role in ("producer", "tensorflow", "metrics") for line in extras[role]]
    needed += re.findall(r'"([a-z-]+>=[\d.]+)"', dockerfile)
    assert len(needed) > 8
    for one in map(Requirement, needed):
        assert one.specifier.contains(pinned[canonicalize_name(one.name)]), one
    installs = re.findall(r"^.*python -m pip .*$", dockerfile, re.MULTILINE)
    assert len(installs) == 5
    for line in installs:
        assert "--constraint /constraints.txt" in line or "PIP_CONSTRAINT=/constraints.txt" in line, line


def test_the_builder_is_sent_all_that_is_copied_and_nothing_else(dockerfile: str) -> None:
    """A file missing from the context fails the build, and a virtual environment in it takes minutes."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    lines_copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE)
    copied = {word for line in lines_copied for word in line.split()}
    assert "*" in lines
    assert all(any(fnmatch(word, pattern) or word.startswith(f"{pattern}/") for pattern in allowed) for word in copied)
    assert all((ROOT / word).exists() for word in copied)


# --- the servers' settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_the_servers_keep_what_the_guarantees_need(executable: Path, tmp_path: Path) -> None:
    """Every supported server version takes these files, and Penstock then accepts it."""
    services = {name: service for name, service in load_services().items() if name in SERVERS}
    with running(Stack(tmp_path, executable=executable, services=services)) as stack:
        for name in SERVERS:
            stack.await_health(name)
            with redis.Redis.from_url(stack.url(name), decode_responses=True) as client:
                settings = client.config_get("*")
            wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "save": ""}
            assert {key: settings[key] for key in wanted} == wanted
            assert int(settings["maxmemory"]) > 0
        with redis.Redis.from_url(stack.url("redis"), decode_responses=True) as client:
            settings = client.config_get("*")
            assert settings["client-query-buffer-limit"] == str(1 << 30)
            assert settings["rdbcompression"] == "no"
            if client.info("memory")["mem_allocator"].startswith("jemalloc"):
                assert "opt.dirty_decay_ms: -1" in str(client.execute_command("MEMORY", "MALLOC-STATS"))
        Writer("fits", url=stack.url("redis"), spec={"x": ("uint8", (8,))}).close()


def test_the_servers_ask_for_a_password_that_no_process_shows(tmp_path: Path) -> None:
    """A container of the same network, or a user who lists processes or inspects a container, must not get in."""
    services = {name: service for name, service in load_services().items() if name in SERVERS}
    with running(Stack(tmp_path, services=services)) as stack:
        passwords = [stack.url(name).split(":")[2].split("@")[0] for name in SERVERS]
        assert len(set(passwords)) == 2
        for name in SERVERS:
            stack.await_health(name)
            with redis.Redis(port=stack.ports[name]) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            (server,) = stack.started[name]
            shown = [Path(f"/proc/{server.process.pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
            assert not [text for text in shown if any(password.encode() in text for password in passwords)]


def test_whoever_needs_a_secret_names_it_and_nobody_else() -> None:
    """A trainer that does not need jobs cannot forge one."""
    needed = {
        name: set(re.findall(r"/run/secrets/([a-z-]+)", str(service))) for name, service in load_services().items()
    }
    given = {
        name: {secret if isinstance(secret, str) else secret["target"] for secret in service.get("secrets", [])}
        for name, service in load_services().items()
    }
    assert given == needed
    assert given["trainer-a"] == {"redis-url"}
    monitoring = yaml.safe_load((ROOT / "compose.monitoring.yaml").read_text())["services"]
    sources = {
        secret if isinstance(secret, str) else secret["source"]
        for service in [*load_services().values(), *monitoring.values()]
        for secret in service.get("secrets", [])
    }
    assert sources == set(load_secrets())


def test_secrets_are_made_once_and_in_a_folder_that_nobody_else_can_enter(tmp_path: Path) -> None:
    """The users of the containers have other numbers than the host's, so only the folder can exclude other users."""
    secrets = make_secrets(tmp_path)
    assert set((tmp_path / "docker" / "secrets").iterdir()) == set(secrets.values())
    assert (tmp_path / "docker" / "secrets").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in secrets.values()} == {0o644}
    before = {name: path.read_text() for name, path in secrets.items()}
    again = subprocess.run([tmp_path / "docker" / "make-secrets.sh"], capture_output=True, text=True, check=True)
    assert again.stderr == "docker/secrets is there already and stays as it is\n"
    assert {name: path.read_text() for name, path in secrets.items()} == before
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_grafana_has_a_password_of_its_own_also_beside_earlier_secrets(tmp_path: Path) -> None:
    """Users of the Docker host reach its address, and everyone knows its default password."""
    secrets = make_secrets(tmp_path)
    made = secrets["grafana-password"].read_text()
    assert len(made) == 64
    secrets["grafana-password"].unlink()
    before = {name: path.read_text() for name, path in secrets.items() if path.exists()}
    subprocess.run([tmp_path / "docker" / "make-secrets.sh"], check=True)
    assert secrets["grafana-password"].read_text() != made
    assert secrets["grafana-password"].stat().st_mode & 0o777 == 0o644
    assert {name: secrets[name].read_text() for name in before} == before
    grafana = yaml.safe_load((ROOT / "compose.monitoring.yaml").read_text())["services"]["grafana"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana-password"
    assert grafana["secrets"] == ["grafana-password"]


def test_the_streams_server_keeps_freed_pages() -> None:
    """Without it, blocks above 2 MB move at 0.5 to 0.8 of the speed, and each build reads the name it knows."""
    given = load_services()["redis"]["environment"]
    assert given == {name: value for name, value in ALLOCATOR_ENVIRONMENT.items() if name.endswith("MALLOC_CONF")}


# --- the journey ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_services_commands_train_two_models_and_lose_nothing(tmp_path: Path) -> None:
    """The stack is a promise: with two workers both trainers get every sample, and the audit is clean."""
    with running(Stack(tmp_path, scale={"worker": 2})) as stack:
        assert stack.wait("audit") == 0, stack.output("audit")
        assert f"{SAMPLES:,} samples, 0 bad" in stack.output("producer")
        for trainer, group in (("trainer-a", "small"), ("trainer-b", "large")):
            last = stack.output(trainer).strip().splitlines()[-1]
            told = re.fullmatch(rf"{group}: (\d+) samples, accuracy on the held-out digits ([\d.]+)", last)
            assert told is not None, last
            assert int(told[1]) == SAMPLES
            assert float(told[2]) >= 0.95
        with redis.Redis.from_url(stack.url("queue")) as queue:
            assert len(queue.smembers("rq:workers")) == 2
        assert stack.stop("worker") == [0, 0]
        assert [stack.stop(name) for name in SERVERS] == [[0], [0]]


def test_an_image_holds_the_files_its_commands_name() -> None:
    """A script or a transform that was not copied is missing only when the container starts."""
    for name, service in load_services().items():
        if "build" in service:
            there = {path.stem for path in copied_files(service["build"]["target"])}
            named = {
                found
                for argument in service["command"]
                for found in re.findall(r"^(\w+)\.py$|^--transform=(\w+):", argument)
            }
            assert {a or b for a, b in named} <= there, name
