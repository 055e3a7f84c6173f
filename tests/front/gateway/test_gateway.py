"""A client of the gateway is a member of its group: it reads, acknowledges and leaves like the others."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

import penstock
from penstock.__main__ import main
from penstock_common.errors import WaitTimeout
from penstock_common.stream.commands import Client
from penstock_common.wire.spec import Spec
from tests.contracts.feed import entries
from tests.front.gateway.clients import (
    GROUP,
    GatewayProcess,
    Identity,
    decoded,
    gateway_for,
    identities,
    write_train,
)

QUICK_LEASE = ("--lease", "2")


class PythonMember:
    """A member in a thread that reads, and acknowledges what it was given, until nothing is left of ``left``."""

    def __init__(self, url: str, name: str, left: set[Identity]) -> None:
        self.seen: list[Identity] = []
        self._left = left
        tuning = penstock.Tuning(member=name, lease_s=30.0, prefetch_bytes=1, timeout_s=0.5)
        self._loader = penstock.Loader("train", group="resnet", batch_size=4, url=url, tuning=tuning)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._loader as loader:
            while self._left:
                with suppress(WaitTimeout):  # another member has what is left
                    for batch in loader:
                        self.seen += batch.identities()
                        self._left.difference_update(batch.identities())

    def join(self) -> list[Identity]:
        """Wait for the end, and return what was given."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.seen


def lag(url: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Return the samples that the group has not acknowledged."""
    assert main(["inspect", "train", "--json", "--url", url]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    return int(group["lag_samples"])


def test_a_client_reads_and_acknowledges_every_sample(any_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches arrive to the bit, with their identities, and the group has nothing left to read."""
    written = write_train(any_url)
    with gateway_for(any_url) as gateway, gateway.client() as client:
        assert sorted(client.read()) == written
    assert lag(any_url, capsys) == 0


def test_a_client_reads_one_epoch_after_the_other(any_url: str) -> None:
    """Training goes over the data again and again on one connection."""
    written = write_train(any_url, epochs=2)
    with gateway_for(any_url) as gateway, gateway.client() as client:
        first = client.read()
        client.send(type="epoch")
        assert sorted([*first, *client.read()]) == written


def test_a_compressed_stream_comes_without_compression(any_url: str, any_client: Client) -> None:
    """A page has no codec, and need not know that a writer compresses."""
    written = write_train(any_url, compression="x=blosc2,label=zstd")
    assert all(b'"compression":' in fields[b"meta"] for _, fields in entries(any_client, "train", 0))
    with gateway_for(any_url) as gateway, gateway.client() as client:
        number, blocks = client.batch() or pytest.fail("no batch")
        client.acknowledge(number)
        assert {header.compression is None for header, _ in blocks} == {True}
        assert sorted([*identities(blocks), *client.read()]) == written


def test_no_batch_comes_without_a_credit(any_url: str) -> None:
    """A page decides how many batches its memory holds."""
    write_train(any_url)
    with gateway_for(any_url) as gateway, gateway.client(credits=2) as client:
        assert [client.batch() is not None for _ in range(2)] == [True, True]
        with pytest.raises(TimeoutError):
            client.socket.recv(timeout=0.5)
        client.send(type="credits", batches=1)
        assert client.batch() is not None


def test_the_batches_of_a_client_that_closes_return_at_once(any_url: str) -> None:
    """A page is closed in the middle of a training. The others go on with its batches, long before a lease expires."""
    written = write_train(any_url)
    with gateway_for(any_url) as gateway:
        client = gateway.client(credits=4)
        number, blocks = client.batch() or pytest.fail("no batch")
        client.acknowledge(number)
        acknowledged = identities(blocks)
        held = [one for _ in range(3) for one in identities((client.batch() or pytest.fail("no batch"))[1])]
        left = set(written) - set(acknowledged)
        members = [PythonMember(any_url, name, left) for name in ("gpu-0", "gpu-1")]
        client.socket.close()
        seen = [one for member in members for one in member.join()]
    assert set(held) <= set(seen)
    assert sorted([*acknowledged, *seen]) == written, "each sample once: nothing lost, nothing twice"


def test_nothing_is_lost_when_the_gateway_is_killed(any_url: str) -> None:
    """After kill -9 of the gateway its leases expire, and the other members take what its clients held."""
    written = write_train(any_url)
    with gateway_for(any_url, GROUP, *QUICK_LEASE) as gateway, gateway.client(credits=3) as client:
        number, blocks = client.batch() or pytest.fail("no batch")
        client.acknowledge(number)
        acknowledged = identities(blocks)
        held = identities((client.batch() or pytest.fail("no batch"))[1])
        gateway.kill()
    seen = PythonMember(any_url, "gpu-0", set(written) - set(acknowledged)).join()
    assert set(held) <= set(seen)
    assert set(acknowledged) | set(seen) == set(written)
    assert max(Counter([*acknowledged, *seen]).values()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_gateway_that_ends_returns_its_clients_batches_at_once(any_url: str, number: int) -> None:
    """An operator restarts the gateway, and no member waits for a lease."""
    written = write_train(any_url)
    with gateway_for(any_url) as gateway:
        client = gateway.client(credits=3)
        assert client.batch() is not None
        assert gateway.end(number) == 0
        assert "leaves train/resnet" in gateway.said
        assert "Traceback" not in gateway.said
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        assert gateway.token not in gateway.said
    assert sorted(PythonMember(any_url, "gpu-0", set(written)).join()) == written


# --- HTTP ---


def asked(gateway: GatewayProcess, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
    """Return the status, the content type and the content of an answer."""
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    request = urllib.request.Request(f"{gateway.http_url}/v1/members{path}", data, method=method)
    request.add_header("Authorization", f"Bearer {gateway.token if token is None else token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def test_a_client_of_http_reads_and_acknowledges_every_sample(any_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A program in any language is a member with three kinds of requests."""
    written = write_train(any_url)
    seen: list[Identity] = []
    with gateway_for(any_url) as gateway:
        status, _, content = asked(gateway, "POST", "", {"batch_size": 16})
        facts = json.loads(content)
        member, spec = f"/{facts['member']}", Spec.from_json(json.loads(facts["spec"]))
        assert status == 201
        while True:
            status, kind, content = asked(gateway, "POST", f"{member}/next?wait_s=20", {})
            assert status == 200
            if kind == "application/json":
                assert json.loads(content) == {"type": "end", "epoch": 0}
                break
            number, blocks = decoded(content, spec)
            seen += identities(blocks)
            assert asked(gateway, "POST", f"{member}/ack", {"batches": [number]})[0] == 200
        assert asked(gateway, "DELETE", member)[0] == 204
        assert asked(gateway, "POST", f"{member}/next", {})[0] == 404
    assert sorted(seen) == written
    assert lag(any_url, capsys) == 0


def test_only_what_was_given_is_confirmed(any_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A client whose answer was lost asks again. One that confuses its numbers would believe that Redis has them."""

    def acknowledged() -> int:
        assert main(["audit", "train", "--json", "--url", any_url]) == 0
        return int(json.loads(capsys.readouterr().out)["delivered"].get("resnet", 0))

    write_train(any_url)
    with gateway_for(any_url) as gateway:
        member = f"/{json.loads(asked(gateway, 'POST', '', {'batch_size': 16})[2])['member']}"
        assert asked(gateway, "POST", f"{member}/ack", {"batches": [1]})[0] == 400
        assert asked(gateway, "POST", f"{member}/next?wait_s=20", {})[0] == 200
        status, _, content = asked(gateway, "POST", f"{member}/ack", {"batches": [1, 99]})
        assert (status, json.loads(content)["code"]) == (400, "bad_message")
        assert "batch 99 was never given" in json.loads(content)["text"]
        assert acknowledged() == 0, "a message that is refused acknowledges nothing"
        for _ in range(2):
            status, _, content = asked(gateway, "POST", f"{member}/ack", {"batches": [1]})
            assert (status, json.loads(content)) == (200, {"type": "acked", "batches": [1]})
            assert acknowledged() == 16


def test_a_client_of_http_that_stays_away_leaves_its_group(any_url: str) -> None:
    """No connection is closed here, so silence for the time of a lease returns the batches."""
    written = write_train(any_url)
    with gateway_for(any_url, GROUP, *QUICK_LEASE) as gateway:
        facts = json.loads(asked(gateway, "POST", "", {"batch_size": 16})[2])
        assert asked(gateway, "POST", f"/{facts['member']}/next", {})[1] == "application/octet-stream"
        assert sorted(PythonMember(any_url, "gpu-0", set(written)).join()) == written


WRONG: list[tuple[str, Any, str | None, int, str]] = [
    ("", {"batch_size": 4}, "wrong", 401, "bad_token"),
    ("", {"batch_size": 4}, "", 401, "bad_token"),
    ("", {"batch_size": 0}, None, 400, "bad_message"),
    ("", {}, None, 400, "bad_message"),
    ("", {"batch_size": 4, "stream": "penstock:secret"}, None, 400, "bad_message"),
    ("", b"x" * 100_000, None, 400, "bad_message"),
    ("", b"[" * 10_000, None, 400, "bad_message"),
    ("/gateway-000000000000/next", {}, None, 404, "no_member"),
]


def test_http_says_what_is_wrong(any_url: str) -> None:
    """A developer reads a sentence, and a program a code."""
    with gateway_for(any_url) as gateway:
        for path, body, token, status, code in WRONG:
            found, kind, content = asked(gateway, "POST", path, body, token)
            assert (found, kind) == (status, "application/json")
            told = json.loads(content)
            assert told["code"] == code
            assert "None" not in told["text"]
            assert "expected" in told["text"] or ":" in told["text"], "a sentence says what to do"
