"""compose.yaml without containers: each service's own command, environment and files, as processes of this machine.
Host names become ports of 127.0.0.1, volumes become folders, and an image's /app becomes a folder with the files that
its Dockerfile target copies. Images, networks and restart policies need a container engine and are not imitated.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from typing import Any

import yaml

from penstock_common.stream.servers.embedded import find_servers

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
HEALTH_S = 20.0
ASKED_EVERY_S = {"CMD-SHELL": 0.05, "CMD": 1.0}
"""The pause between two checks. Each check of ours is a Python process, which takes time from what it checks."""
SECRETS = "/run/secrets"
_VARIABLE = re.compile(r"\$(?:\$|\{(\w+):-([^}]*)\})")

Service = dict[str, Any]


def load_services(variables: Mapping[str, str] | None = None) -> dict[str, Service]:
    """Return the services, with ``${NAME:-default}`` filled in from ``variables`` and ``$$`` undone."""
    document = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services: dict[str, Service] = _interpolated(document["services"], variables or {})
    return services


def load_secrets() -> dict[str, Path]:
    """Return the file of each secret of both files, relative to the repository."""
    documents = [yaml.safe_load((ROOT / name).read_text()) for name in ("compose.yaml", "compose.monitoring.yaml")]
    return {name: Path(secret["file"]) for document in documents for name, secret in document["secrets"].items()}


def make_secrets(home: Path) -> dict[str, Path]:
    """Make the secrets by the script of the repository, in a copy of its folder."""
    (home / "docker").mkdir()
    copy(ROOT / "docker" / "make-secrets.sh", home / "docker")
    subprocess.run([home / "docker" / "make-secrets.sh"], check=True)
    return {name: home / file for name, file in load_secrets().items()}


def copied_files(target: str) -> list[Path]:
    """Return the files that docker/Dockerfile copies from the repository into this target's working folder."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    stage = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert stage is not None, f"docker/Dockerfile has no target {target}"
    return [ROOT / source for source in re.findall(r"^COPY (\S+) \./$", stage[1], re.MULTILINE)]


def image_environment(workdir: Path) -> dict[str, str]:
    """Return the environment of every role's image, with ``workdir`` for its working folder."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    pairs = [pair.split("=") for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE) for pair in line.split()]
    return {name: value.replace("/app", str(workdir)).replace("/tmp", str(workdir)) for name, value in pairs}


@dataclass
class Running:
    """The process of a service."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """Return its whole output."""
        return self.log.read_text()


@dataclass
class Stack:
    """The running services; use `running`."""

    home: Path
    scale: Mapping[str, int] = field(default_factory=dict)
    executable: Path = field(default_factory=lambda: find_servers()[0])
    """The executable of redis-server."""
    services: dict[str, Service] = field(default_factory=load_services)
    started: dict[str, list[Running]] = field(default_factory=dict)
    found: str = ""
    """The result of the last healthcheck."""

    def __post_init__(self) -> None:
        servers = [name for name, service in self.services.items() if service["command"][0] == "redis-server"]
        self.ports = dict(zip(servers, _free_ports(len(servers)), strict=True))
        self._secrets = make_secrets(self.home)

    def up(self) -> None:
        """Start every service when its dependencies reach the state that it needs."""
        for name in self._in_order():
            needs = self.services[name].get("depends_on", {})
            if any(self._checks(needed) == "CMD" for needed in needs):  # all services with a check run now
                for each in self.started:
                    if self._checks(each) == "CMD":
                        self.await_health(each)
            for needed, how in needs.items():
                self._await(needed, how["condition"])
            count = self.scale.get(name, 1)
            self.started[name] = [self._start(name, number) for number in range(count)]

    def wait(self, name: str) -> int:
        """Return the service's exit code."""
        return max(running.process.wait(PATIENCE_S) for running in self.started[name])

    def output(self, name: str) -> str:
        """Return all output of its processes."""
        return "\n".join(running.output for running in self.started[name])

    def stop(self, name: str) -> list[int]:
        """Return the exit codes after SIGTERM, which a container engine sends."""
        for running in self.started[name]:
            running.process.send_signal(signal.SIGTERM)
        return [running.process.wait(30) for running in self.started[name]]

    def url(self, server: str) -> str:
        """Return the URL with the password, as clients read it."""
        return self._local(self._secrets[f"{server}-url"].read_text().strip())

    def _in_order(self) -> list[str]:
        ordered: list[str] = []
        while len(ordered) < len(self.services):
            ready = [
                name
                for name, service in self.services.items()
                if name not in ordered and set(service.get("depends_on", {})) <= set(ordered)
            ]
            assert ready, "services depend on each other in a circle, or on one that does not exist"
            ordered += ready
        return ordered

    def _checks(self, name: str) -> str | None:
        """Return ``CMD-SHELL`` for the healthcheck of a server, ``CMD`` for one of ours, None without one."""
        kind: str | None = self.services[name].get("healthcheck", {}).get("test", [None])[0]
        return kind

    def _await(self, name: str, condition: str) -> None:
        if condition == "service_completed_successfully":
            code = self.wait(name)
            assert code == 0, f"{name} ended with {code}: {self.output(name)}"
        elif condition == "service_healthy":
            self.await_health(name)
        else:
            assert condition == "service_started", condition

    def await_health(self, name: str) -> None:
        """Return when the service's own healthcheck succeeds."""
        kind, *command = self.services[name]["healthcheck"]["test"]
        patience_s = HEALTH_S if kind == "CMD-SHELL" else PATIENCE_S
        deadline = time.monotonic() + patience_s
        while (self._ask_server if kind == "CMD-SHELL" else self._ask_inside)(name, command):
            is_up = all(running.process.poll() in (None, 0) for running in self.started[name])
            if kind == "CMD" and all(running.process.poll() == 0 for running in self.started[name]):
                return  # it ended before the check
            is_late = time.monotonic() > deadline
            assert is_up, f"{name} ended: {self.output(name)}"
            assert not is_late, f"{name} is not healthy after {patience_s:.0f} s: {self.found}\n{self.output(name)}"
            time.sleep(ASKED_EVERY_S[kind])

    def _ask_server(self, name: str, test: list[str]) -> int:
        command = test[0].replace(SECRETS, str(self._given_secrets(name, self.home / f"{name}-0")))
        beside = self.executable.with_name("redis-cli")
        command = command.replace("redis-cli", f"{beside if beside.exists() else 'redis-cli'} -p {self.ports[name]}")
        return self._check(command, shell=True)

    def _check(self, command: str | list[str], **options: Any) -> int:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        self.found = f"the check gave {done.returncode}, {done.stdout!r}, {done.stderr!r}"
        return done.returncode

    def _ask_inside(self, name: str, test: list[str]) -> int:
        program, *arguments = test
        workdir = self.home / f"{name}-0"
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        environment = self._environment(self.services[name], workdir)
        return self._check(command, cwd=workdir, env=environment)

    def _start(self, name: str, number: int) -> Running:
        service = self.services[name]
        workdir = self.home / f"{name}-{number}"
        workdir.mkdir()
        log = workdir.with_suffix(".log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._command(name, workdir), cwd=self._app(service, workdir), env=self._environment(service, workdir),
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return Running(process, log)

    def _app(self, service: Service, workdir: Path) -> Path:
        for source in copied_files(service["build"]["target"]) if "build" in service else []:
            copy(source, workdir)
        return workdir

    def _given_secrets(self, name: str, workdir: Path) -> Path:
        """Write the service's /run/secrets: those that it names, and no other."""
        folder = workdir / "secrets"
        folder.mkdir(exist_ok=True)
        for secret in self.services[name].get("secrets", []):
            named = secret if isinstance(secret, dict) else {"source": secret, "target": secret}
            (folder / named["target"]).write_text(self._local(self._secrets[named["source"]].read_text()))
        return folder

    def _command(self, name: str, workdir: Path) -> list[str]:
        service = self.services[name]
        program, *arguments = service["command"]
        folders = dict(self._mount(volume) for volume in service.get("volumes", []))
        folders[SECRETS] = self._given_secrets(name, workdir)
        for inside, outside in folders.items():
            arguments = [re.sub(rf"(?<![^=]){inside}(?=/|$)", str(outside), argument) for argument in arguments]
        if program == "redis-server":
            own = ["--port", str(self.ports[name]), "--bind", "127.0.0.1"]
            return [str(self.executable), *arguments, *own]
        return [str(Path(sys.executable).with_name(program)), *arguments]

    def _mount(self, volume: str) -> tuple[str, Path]:
        source, inside, *_ = volume.split(":")
        outside = ROOT / source if source.startswith("./") else self.home / "volumes" / source
        if not source.startswith("./"):
            outside.mkdir(parents=True, exist_ok=True)
        return inside, outside

    def _environment(self, service: Service, workdir: Path) -> dict[str, str]:
        """Return the service's own environment and only PATH of ours. What it lacks here it lacks in its container."""
        given = {
            name: value.replace(SECRETS, str(workdir / "secrets"))
            for name, value in service.get("environment", {}).items()
        }
        return {"PATH": os.environ["PATH"], "HOME": str(workdir), **image_environment(workdir), **given}

    def _local(self, value: str) -> str:
        for host, port in self.ports.items():
            value = value.replace(f"@{host}:6379", f"@127.0.0.1:{port}")
        return value


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    """Start all its services, and end them afterwards."""
    try:
        stack.up()
        yield stack
    finally:
        for each in (running for group in reversed(stack.started.values()) for running in group):
            each.process.kill()
            each.process.wait()


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, variables) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: variables.get(found[1], found[2]) if found[1] else "$", value)
    return value


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
