"""docs/kubernetes.md: the manifests against the API's schemas, their commands and probes as processes of this machine.

Images, volumes and restarts need a cluster. test_compose.py tests what the images contain.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml

import penstock
from penstock.cli import parser_of
from tests.journeys.compose_services import ROOT, SECRETS, Service, Stack, load_services, make_secrets, running

FOLDER = ROOT / "docker" / "kubernetes"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
INSIDE = "/etc/penstock/secrets"
VERSIONS = [*dict.fromkeys(kubernetes_validate.utils.all_versions())][-5:]
TARGETS = {f"penstock-{target}": target for target in ("producer", "trainer", "data", "exporter")}

Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    """Return every object of every file."""
    return [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def workloads() -> dict[str, Manifest]:
    """Return the objects that run pods, by name."""
    return {one["metadata"]["name"]: one for one in manifests() if "template" in one.get("spec", {})}


def pod(workload: Manifest) -> dict[str, Any]:
    """Return the specification of a workload's pods."""
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Manifest) -> dict[str, Any]:
    """Return the only container of a workload's pods."""
    (one,) = pod(workload)["containers"]
    found: dict[str, Any] = one
    return found


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_follows_the_schemas_of_kubernetes(version: str) -> None:
    """A cluster refuses a field of a wrong type, and ignores a misspelt one."""
    for one in manifests():
        kubernetes_validate.validate(one, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    """The check above is worth what it refuses."""
    worker = workloads()["worker"]
    pod(worker)["terminationGracePeriod"] = 20
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(worker, VERSIONS[-1], strict=True)


def test_files_can_be_joined() -> None:
    """The page sends all files through one pipe, so each begins a document of its own."""
    assert [path.name for path in FOLDER.iterdir() if not path.read_text().startswith("---\n")] == []
    assert len(manifests()) == len(
        re.findall(r"^---$", "".join(path.read_text() for path in FOLDER.iterdir()), re.MULTILINE)
    )


def test_what_a_manifest_names_exists(tmp_path: Path) -> None:
    """A pod that names a missing Secret, volume or label waits for ever, and says so in its events only."""
    claims = {one["metadata"]["name"] for one in manifests() if one["kind"] == "PersistentVolumeClaim"}
    secrets = set(make_secrets(tmp_path))
    config = set(re.findall(r"--from-file=docker/(\w+\.conf)", PAGE))
    assert "kubectl create secret generic penstock --from-file=docker/secrets" in PAGE
    assert all((ROOT / "docker" / name).is_file() for name in config)
    for name, workload in workloads().items():
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        own = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container(workload)["volumeMounts"]} == {*volumes, *own}, name
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
            assert {item["key"] for item in volume.get("secret", {}).get("items", [])} <= secrets
        assert {mount["subPath"] for mount in container(workload)["volumeMounts"] if "subPath" in mount} <= config
        if "selector" in workload["spec"]:
            assert workload["spec"]["selector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in manifests() if one["kind"] == "Service"}
    assert services == {name: workloads()[name]["spec"]["selector"]["matchLabels"] for name in ("redis", "queue")}


def test_no_pod_has_more_rights_or_resources_than_it_needs() -> None:
    """The namespace may demand the `restricted` security standard."""
    for name, workload in workloads().items():
        spec, rights = pod(workload), container(workload)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        # a Service's variables would have names that Penstock reports as unknown
        assert spec["enableServiceLinks"] is False, name
        assert rights == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }, name  # fmt: skip
        assert container(workload)["resources"]["limits"]["memory"], name


def test_pods_do_what_the_compose_stack_does() -> None:
    """One example in two forms: a change of one is a change of the other."""
    compose = load_services()
    same = {"data": "data", "producer": "producer", "worker": "worker", "trainer-small": "trainer-a", "queue": "queue"}
    for name, service in same.items():
        command = [*container(workloads()[name])["command"]]
        wanted = [word.replace(SECRETS, INSIDE) for word in compose[service]["command"]]
        assert command == [word for word in wanted if not word.startswith("--payload")], name
    environment = {each["name"]: each["value"] for each in container(workloads()["redis"])["env"]}
    assert environment == compose["redis"]["environment"]


def test_the_autoscaler_sets_the_workers_by_a_metric_that_the_adapter_finds() -> None:
    """An autoscaler whose metric is not served leaves the number as it is, and reports this in its events only."""
    (scaler,) = (one for one in manifests() if one["kind"] == "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] in workloads()
    assert "replicas" not in workloads()["worker"]["spec"]  # each apply would set it back
    assert "--processes=1" in container(workloads()["worker"])["command"]
    (metric,) = (each["external"]["metric"] for each in scaler["spec"]["metrics"])
    (rule,) = yaml.safe_load(re.findall(r"```yaml\n(rules:.*?)```", PAGE, re.DOTALL)[0])["rules"]["external"]
    assert metric["name"] in rule["seriesQuery"]
    stream = metric["selector"]["matchLabels"]["stream"]
    assert f"--stream={stream}" in container(workloads()["producer"])["command"]


def test_every_command_of_the_page_can_be_typed() -> None:
    """A misspelt option is found in a cluster only after images were built and pushed."""
    lines = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    ours = [found[1] for line in lines if (found := re.search(r"-- penstock (.*)$", line))]
    assert len(ours) > 2
    for line in ours:
        command, *arguments = line.split()
        parser_of(command).parse_args(arguments)
    for path in re.findall(r"docker/kubernetes/(\w+\.yaml)", PAGE):
        assert (FOLDER / path).is_file()
    named = {found for line in lines for found in re.findall(r"(?:deployment|job|statefulset)/([a-z-]+)", line)}
    assert named <= set(workloads())


# --- what runs in the pods --------------------------------------------------------------------------------------------


def as_service(workload: Manifest) -> Service:
    """Return a workload in the words of compose.yaml, which `Stack` starts here."""
    one, spec = container(workload), pod(workload)
    probe = one.get("livenessProbe", {}).get("exec") or one.get("readinessProbe", {}).get("exec")
    items = [item for volume in spec["volumes"] for item in volume.get("secret", {}).get("items", [])]
    volumes = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
    service: Service = {
        "command": [word.replace(INSIDE, SECRETS) for word in one["command"]],
        "environment": {each["name"]: each["value"].replace(INSIDE, SECRETS) for each in one.get("env", [])},
        "secrets": [{"source": item["key"], "target": item["path"]} for item in items],
        "volumes": [
            f"{name}:{path}" for name, path in volumes.items() if name in ("images", "models", "stream", "jobs")
        ],
    }
    if one["image"] in TARGETS:
        service["build"] = {"target": TARGETS[one["image"]]}
    for conf in (mount for mount in one["volumeMounts"] if "subPath" in mount):
        service["volumes"].append(f"./docker/{conf['subPath']}:{conf['mountPath']}")
    if probe:
        is_shell = probe["command"][:2] == ["sh", "-c"]
        words = [word.replace(INSIDE, SECRETS) for word in probe["command"][2 if is_shell else 0 :]]
        service["healthcheck"] = {"test": ["CMD-SHELL" if is_shell else "CMD", *words]}
    return service


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run every pod but the trainer's."""
    services = {name: as_service(one) for name, one in workloads().items() if name != "trainer-small"}
    services["exporter"]["command"][-1] = "--port=0"
    healthy, done = {"condition": "service_healthy"}, {"condition": "service_completed_successfully"}
    for name in ("worker", "exporter"):
        services[name]["depends_on"] = {"redis": healthy, "queue": healthy, "data": done}
    services["producer"]["depends_on"] = {"worker": {"condition": "service_started"}}
    with running(Stack(tmp_path_factory.mktemp("pods"), services=services)) as stack:
        yield stack


@pytest.mark.slow
def test_producer_and_worker_make_the_stream_and_probes_see_them(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that fails while all is well kills the pod again and again."""
    stack.await_health("worker")
    assert stack.wait("producer") == 0, stack.output("producer")
    assert "7,190 samples, 0 bad" in stack.output("producer")
    probe = container(workloads()["trainer-small"])["livenessProbe"]["exec"]["command"]
    command = [str(Path(sys.executable).with_name(probe[0])), *probe[1:]]
    monkeypatch.setenv("PENSTOCK_URL", stack.url("redis"))
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1  # it does not run yet
    with penstock.Loader("digits", group="small", batch_size=64) as loader:
        next(iter(loader))
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_exporter_has_the_metric_of_the_autoscaler(stack: Stack) -> None:
    """The metric appears once a trainer and a worker have worked, and has the stream's name as its label."""
    assert stack.wait("producer") == 0
    address = re.search(r"http://\S+:(\d+)/metrics", stack.output("exporter"))
    assert address is not None
    metric = re.compile(rb'^penstock_workers_wished\{stream="digits"\} (\S+)$', re.MULTILINE)
    deadline, found = time.monotonic() + 60, None
    with penstock.Loader("digits", group="metric", batch_size=16, url=stack.url("redis")) as loader:
        batches = chain.from_iterable(loader for _ in range(5))
        while found is None and time.monotonic() < deadline:
            next(batches)
            time.sleep(0.2)  # a training step
            with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics") as answer:
                found = metric.search(answer.read())
    assert found is not None
    assert float(found[1]) >= 1
