"""Whatever one client of the gateway does, it is refused by a sentence, and the others go on."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

import penstock
from penstock.__main__ import main
from penstock.gateway.limits import MAX_UNPROVEN, OriginCheck, RateLimit
from penstock.gateway.refusals import Refusal
from tests.front.gateway.clients import GROUP, GatewayProcess, gateway_for, raw, told, write_train

OPEN = {"type": "open", "stream": "train", "group": "resnet", "batch_size": 4}


def refusal_of(connection: ClientConnection) -> tuple[str, int, str]:
    """Return the code, the close code and the sentence with which a connection was closed."""
    code = text = ""
    try:
        while True:
            found = json.loads(connection.recv(timeout=30))
            if found["type"] == "error":
                code, text = found["code"], found["text"]
    except ConnectionClosed:
        pass
    assert text.startswith(connection.close_reason or "")
    return code, connection.close_code or 0, text


def test_what_is_no_message_is_refused_by_name(any_url: str) -> None:
    """Malformed and hostile messages end their own connection, with a code, and another client reads on."""
    written = write_train(any_url)
    with gateway_for(any_url) as gateway, gateway.client() as beside:
        opened = {**OPEN, "token": gateway.token}
        wrong: list[tuple[list[Any], str]] = [
            ([{**OPEN, "token": "wrong" * 9}], "bad_token"),
            ([{**OPEN, "token": "Ã¼" * 20}], "bad_token"),
            ([{**OPEN, "token": ["a"]}], "bad_token"),
            ([OPEN], "bad_token"),
            ([{**opened, "stream": "other"}], "bad_message"),
            ([{**opened, "group": "other"}], "bad_message"),
            ([{**opened, "batch_size": True}], "bad_message"),
            ([{**opened, "batch_size": 10**6}], "bad_message"),
            ([{"type": "ack"}], "bad_message"),
            (["no json"], "bad_message"),
            (["[" * 9000], "bad_message"),
            ([b"\x00\xff"], "bad_message"),
            ([opened, {"type": "credits", "batches": 10**9}], "bad_message"),
            ([opened, {"type": "credits", "batches": 16}, {"type": "credits", "batches": 16}], "bad_message"),
            ([opened, {"type": "ack", "batches": ["1"]}], "bad_message"),
            ([opened, {"type": "ack", "batches": [2**64]}], "bad_message"),
            ([opened, {"type": "ack", "batches": [5, 77]}], "bad_message"),
            ([opened, {"type": "eval", "script": "redis.call('FLUSHALL')"}], "bad_message"),
            ([opened, b"\x00"], "bad_message"),
        ]
        for messages, code in wrong:
            with raw(gateway.url) as connection:
                for message in messages:
                    connection.send(message if isinstance(message, str | bytes) else json.dumps(message))
                found, close_code, text = refusal_of(connection)
            assert (found, close_code) == (code, {"bad_token": 4401, "bad_message": 4400}[code]), messages
            assert len(text) > 20
        assert sorted(beside.read()) == written
    assert gateway.token not in gateway.said
    assert "wrongwrong" not in gateway.said


def test_an_oversized_message_ends_its_own_connection(any_url: str) -> None:
    """A message is bounded before it is in memory."""
    written = write_train(any_url)
    with gateway_for(any_url) as gateway, gateway.client() as beside:
        with raw(gateway.url) as connection:
            connection.send("x" * 100_000)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=30)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        assert sorted(beside.read()) == written


def test_a_page_of_a_foreign_origin_reads_nothing(any_url: str) -> None:
    """Any page may open a WebSocket to this host. Only those that the operator allows get further."""
    write_train(any_url)
    with gateway_for(any_url, GROUP, "--origin", "https://lab.example.org") as gateway:
        for origin, code in [
            ("https://evil.example.org", "foreign_origin"),
            ("http://localhost.evil.example.org", "foreign_origin"),
            ("null", "foreign_origin"),
            ("https://lab.example.org", "bad_token"),
            ("http://localhost:5173", "bad_token"),
        ]:
            with raw(gateway.url, origin=origin) as connection:
                if code != "foreign_origin":  # a foreign page is not even asked for its token
                    connection.send(json.dumps({**OPEN, "token": "wrong" * 9}))
                assert refusal_of(connection)[0] == code, origin


def test_a_gateway_on_a_network_takes_no_local_page(any_url: str) -> None:
    """A page of the visitor's own host is foreign to a gateway that other hosts reach."""
    check = OriginCheck([], allows_local=False)
    check.require("https://gate.example.org", "gate.example.org")
    check.require(None, "gate.example.org")
    for origin in ("http://localhost:5173", "https://gate.example.org.evil.org", "http://[::1", "null"):
        with pytest.raises(Refusal):
            check.require(origin, "gate.example.org")


@pytest.mark.parametrize(
    ("origin", "write"),
    [
        ("lab.example.org", "write https://lab.example.org"),
        ("localhost:5173", "write https://localhost:5173"),
        ("http://lab.example.org/app/", "write http://lab.example.org"),
        ("https://me@lab.example.org", "write https://lab.example.org"),
        ("https://", "write https://lab.example.org"),
        ("*", "give --origin for each origin"),
        ("https://*.example.org", "give --origin for each origin"),
    ],
)
def test_an_origin_that_no_page_has_is_refused(capsys: pytest.CaptureFixture[str], origin: str, write: str) -> None:
    """It would be accepted, and keep every page out."""
    assert main(["gateway", GROUP, "--origin", origin]) == 2
    assert write in capsys.readouterr().err


def test_an_origin_is_compared_as_browsers_send_it() -> None:
    """A browser leaves out the usual port, and writes in small letters without a slash at the end."""
    written = {"https://Lab.Example.org/": "https://lab.example.org", "http://[::1]:80": "http://[::1]"}
    for given, sent in {**written, "http://a:5173": "http://a:5173", "null": "null"}.items():
        OriginCheck([given], allows_local=False).require(sent, "gate.example.org")


def test_a_crowd_without_a_token_keeps_nobody_out(any_url: str) -> None:
    """1,000 connections that say little or nothing disconnect no client, refuse no new one, and all end."""
    written = write_train(any_url)
    with gateway_for(any_url) as gateway, gateway.client() as beside, ExitStack() as crowd:
        found = beside.batch()
        silent = [crowd.enter_context(upgraded(gateway)) for _ in range(600)]
        for number in range(400):
            connection = crowd.enter_context(connected(gateway))
            if number % 2:
                connection.sendall(b"GET /v1/read HTTP/1.1\r\nHost: x\r\nX: ")
            silent.append(connection)
        with gateway.client() as new:
            number, blocks = new.batch() or pytest.fail("no batch for the new client")
            new.acknowledge(number)
            taken = sum(block.count for _, block in blocks)
        assert len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir())) < MAX_UNPROVEN + 64
        for connection in silent:
            assert ends(connection), "a connection without a token stays open"
        assert found is not None
        beside.acknowledge(found[0])
        assert len(beside.read()) + sum(block.count for _, block in found[1]) + taken == len(written)


@pytest.mark.parametrize("frame", [b"\x00\x80\0\0\0\0", b"\x89\x80\0\0\0\0"], ids=["fragments", "pings"])
def test_empty_frames_without_a_token_end_their_connection(any_url: str, frame: bytes) -> None:
    """An empty frame costs its sender 6 bytes, and the gateway more than that. Endless ones delayed every client."""
    write_train(any_url)
    with gateway_for(any_url) as gateway, upgraded(gateway) as connection:
        connection.sendall(b"\x01\x80\0\0\0\0" + frame * 100)
        try:
            answered = connection.recv(4096)
        except ConnectionError:
            answered = b""
        assert answered == b"", "it was parsed to its end, and refused at its deadline"


def test_an_endless_body_without_a_token_ends_its_connection(any_url: str) -> None:
    """A request that is refused sends no gigabytes, which the gateway would parse and drop."""
    with gateway_for(any_url) as gateway, connected(gateway) as connection:
        connection.sendall(b"POST /v1/members HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            for _ in range(1024):
                connection.sendall(bytes(1 << 16))


def test_a_client_may_send_its_first_messages_at_once(any_url: str) -> None:
    """The bounds before a token disconnect no client that does not wait for an answer."""
    write_train(any_url)
    with gateway_for(any_url) as gateway, upgraded(gateway) as connection:
        credit = {"type": "credits", "batches": 1}
        messages: list[dict[str, Any]] = [{**OPEN, "token": gateway.token}, *[credit] * 16, {"type": "epoch"}]
        connection.sendall(b"".join(framed(message) for message in messages))
        received = b""
        while b"PSB1" not in received:
            received += connection.recv(4096) or pytest.fail(f"closed after {received!r}")


def connected(gateway: GatewayProcess) -> socket.socket:
    """Return a connection to a gateway that has sent nothing."""
    host, port = gateway.url.removeprefix("ws://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def upgraded(gateway: GatewayProcess, connection: socket.socket | None = None) -> socket.socket:
    """Return a connection that has become a WebSocket, whose frames a test writes by itself."""
    connection = connection or connected(gateway)
    connection.sendall(
        b"GET /v1/read HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    while b"\r\n\r\n" not in connection.recv(4096):
        pass
    return connection


def framed(message: dict[str, Any]) -> bytes:
    """Return a message as one masked frame."""
    payload = json.dumps(message).encode()
    assert len(payload) < 2**16
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return b"\x81" + size + bytes(4) + payload


def ends(connection: socket.socket) -> bool:
    """Return whether the other side closes a connection within 30 s."""
    connection.settimeout(30)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:  # it was reset
        pass
    return True


def test_a_token_has_a_limit_of_its_own(any_url: str, tmp_path: Path) -> None:
    """One group's clients do not take the places of another's."""
    write_train(any_url)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# two groups\ntrain/resnet {'r' * 20}\ntrain/other {'o' * 20}\n")
    tokens.chmod(0o600)
    with (
        gateway_for(any_url, "--tokens", str(tokens), "--per-token", "1", "--members", "2") as gateway,
        ExitStack() as all,
    ):
        opened = [all.enter_context(raw(gateway.url)) for _ in range(3)]
        for connection, token, group in zip(opened, "rro", ("resnet", "resnet", "other"), strict=True):
            connection.send(json.dumps({**OPEN, "group": group, "token": token * 20}))
            if group == "resnet" and connection is opened[1]:
                assert refusal_of(connection)[:2] == ("too_many", 4429)
            else:
                assert told(connection)["type"] == "opened"


def test_a_batch_over_the_limit_is_refused_before_it_is_whole(any_url: str) -> None:
    """A batch of byte strings has no size before it is read. It took the memory of an epoch, and was refused then."""
    tuning = penstock.Tuning(block_bytes=20_000)
    with penstock.Writer("train", url=any_url, spec={"x": ("bytes", ())}, tuning=tuning) as writer:
        for _ in range(200):
            writer.write({"x": bytes(10_000)})
    with gateway_for(any_url, GROUP, "--batch-bytes", "100kb") as gateway, raw(gateway.url) as connection:
        for message in (
            {**OPEN, "token": gateway.token, "batch_size": 65536},
            {"type": "credits", "batches": 1},
            {"type": "epoch"},
        ):
            connection.send(json.dumps(message))
        code, close_code, text = refusal_of(connection)
    assert (code, close_code) == ("batch_too_large", 4413)
    found = re.match(r"a batch of ([\d,]+) bytes or more", text)
    assert found is not None, text
    assert 100_000 < int(found[1].replace(",", "")) < 150_000, "the limit and one block, of 2,000,000 bytes"


@pytest.mark.parametrize("waits_for", ["stream", "epoch"])
def test_a_client_that_leaves_a_waiting_member_leaves_no_thread(any_url: str, any_client: Any, waits_for: str) -> None:
    """A member without a stream or an epoch waited on after its client left, and the limit of members counted none."""
    if waits_for == "epoch":
        penstock.Writer("train", url=any_url, spec={"x": ("uint8", ())}).close()
    threads = []
    with gateway_for(any_url, GROUP, "--members", "1") as gateway:
        for _ in range(8):
            blocked = any_client.info("clients")["blocked_clients"]
            with raw(gateway.url) as connection:
                connection.send(json.dumps({**OPEN, "token": gateway.token}))
                connection.send(json.dumps({"type": "epoch"}))
                connection.send(json.dumps({"type": "credits", "batches": 1}))
                while any_client.info("clients")["blocked_clients"] <= blocked:
                    pass
                connection.send(json.dumps({"type": "close"}))
                assert refusal_of(connection) == ("", 1000, "")
            threads.append(len(list(Path(f"/proc/{gateway.process.pid}/task").iterdir())))
    assert threads[-1] <= threads[0] + 4, threads  # the pool has 5 at most


def test_a_client_that_takes_nothing_is_closed_and_delays_nobody(any_url: str) -> None:
    """Its batches go to the others once it has taken nothing for the time of a lease."""
    written = write_train(any_url, side=256)
    with gateway_for(any_url, GROUP, "--lease", "2") as gateway, gateway.client() as beside:
        slow = stalled(gateway)
        try:
            seen = beside.read()
            beside.send(type="epoch")  # it goes on with what the slow one held
            assert sorted([*seen, *beside.read()]) == written
        finally:
            slow.close()
        gateway.end()
    assert "leaves train/resnet; " in gateway.said


def stalled(gateway: GatewayProcess) -> socket.socket:
    """Return a connection that grants credits for 16 batches of 4 MiB, and reads nothing."""
    host, port = gateway.url.removeprefix("ws://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    upgraded(gateway, connection)
    for message in (
        {**OPEN, "batch_size": 16, "token": gateway.token},
        {"type": "epoch"},
        {"type": "credits", "batches": 16},
    ):
        connection.sendall(framed(message))
    return connection


def test_a_client_over_its_rate_is_read_more_slowly_and_nobody_else_is(any_url: str) -> None:
    """Messages without end delay only their sender, and another client reads on."""
    written = write_train(any_url)
    with gateway_for(any_url, GROUP, "--rate", "20") as gateway, gateway.client() as beside, raw(gateway.url) as busy:
        busy.send(json.dumps({**OPEN, "token": gateway.token}))
        assert told(busy)["type"] == "opened"
        is_over = threading.Event()
        sent = 0

        def flood() -> None:
            nonlocal sent
            while not is_over.is_set():
                try:
                    busy.send(json.dumps({"type": "epoch"}))
                except ConnectionClosed:
                    return
                sent += 1

        sender = threading.Thread(target=flood, daemon=True)
        sender.start()
        seen = beside.read()
        is_over.set()
        busy.socket.shutdown(socket.SHUT_RDWR)
        sender.join(30)
    assert sorted(seen) == written
    assert sent > 100


def test_a_rate_allows_a_burst_and_then_its_pace() -> None:
    """A client that asks twice as fast as it may waits half of the time."""
    now = [0.0]
    rate = RateLimit(10.0, lambda: now[0])
    assert [rate.spend() for _ in range(20)] == [0.0] * 20
    assert rate.spend() == pytest.approx(0.1)
    now[0] += 1.0
    assert [rate.spend() for _ in range(9)] == [0.0] * 9
    assert rate.spend() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("train/resnet short", "line 1: expected"),
        ("train resnet token-token-token", "line 1: expected"),
        ("# nothing\n\n", "has no token"),
        (f"train/a {'t' * 20}\ntrain/b {'t' * 20}", "same token"),
        (f"a b/c {'t' * 20}", "line 1"),
        (f"_x/c {'t' * 20}", "line 1: stream name"),
    ],
)
def test_a_bad_file_of_tokens_is_refused_without_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    """A message names the file and the line, and shows no secret."""
    file = tmp_path / "tokens"
    file.write_text(content)
    file.chmod(0o600)
    assert main(["gateway", "--tokens", str(file)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "tttt" not in said


def test_a_public_address_needs_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """A token that is printed at a start is for one host. Others get one that the operator made."""
    assert main(["gateway", "train/resnet", "--bind", "0.0.0.0", "--port", "0"]) == 2
    assert "TLS" in capsys.readouterr().err


def test_a_token_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One command makes the line that the file of tokens has."""
    lines = []
    for _ in range(2):
        assert main(["gateway", "--make-token", "train/resnet"]) == 0
        lines.append(capsys.readouterr().out.split())
    assert [line[0] for line in lines] == ["train/resnet"] * 2
    assert len(lines[0][1]) >= 40
    assert lines[0][1] != lines[1][1]
