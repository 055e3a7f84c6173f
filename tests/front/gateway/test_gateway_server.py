"""The gateway's server is away or lacks a stream: the operator gets the whole sentence, and clients their part."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.gateway.texts import error_for, notice_for
from penstock.gateway.tokens import Grant
from penstock_common.errors import GroupFinished, SegmentsUnseen, TooManyDeadLetters, Unauthorized
from tests.front.gateway.clients import gateway_for, raw, write_train
from tests.front.gateway.test_gateway import asked
from tests.front.gateway.test_gateway_hostile import OPEN, refusal_of
from tests.journeys.test_redis_in_production_page import free_port

RESNET = Grant("train", "resnet")


def test_a_gateway_without_its_server_says_so_and_says_when_it_is_back(fresh_server: Any) -> None:
    """The address may be wrong, which nobody would notice before the first page."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    with gateway_for(url) as gateway:
        began = time.monotonic()
        assert f"no Redis answers at {url}" in gateway.hears("goes on and tries again")
        assert time.monotonic() - began < 5
        fresh_server(port=port, password="")
        gateway.hears("the server answers now")
        assert "no stream 'train'" in gateway.hears("no streams yet")


def test_a_client_learns_no_address_of_a_server_that_is_away() -> None:
    """The operator learns it, once for all clients."""
    url = f"redis://127.0.0.1:{free_port()}"
    with gateway_for(url) as gateway:
        with raw(gateway.url) as connection:
            connection.send(json.dumps({**OPEN, "token": gateway.token}))
            code, close_code, text = refusal_of(connection)
        status, _, content = asked(gateway, "POST", "", {"batch_size": 4})
        gateway.end()
    assert (code, close_code, status) == ("ServerUnavailable", 4503, 503)
    assert json.loads(content) == {"type": "error", "code": code, "text": text}
    assert "the server behind the gateway" in text
    for word in ("redis", "127.0.0.1", "PENSTOCK_URL"):
        assert word not in text
    assert f"refused (ServerUnavailable): no Redis answers at {url}" in gateway.said


def test_a_client_learns_no_name_of_another_stream_or_group(any_url: str) -> None:
    """A token opens one group, and the names of the others are as private as their samples."""
    write_train(any_url)
    with penstock.Loader("train", group="secret", batch_size=4, url=any_url):
        pass
    heard: list[str] = []
    with gateway_for(any_url, "trail/resnet", "train/resnet", "--rate", "9999") as gateway, ExitStack() as stack:
        for stream, token in zip(("trail", "train"), gateway.tokens, strict=True):
            connection = stack.enter_context(raw(gateway.url))
            connection.send(json.dumps({**OPEN, "stream": stream, "token": token}))
            heard.append(str(connection.recv(timeout=30)))
        assert "did you mean 'train'?" in gateway.hears("waiting: no stream 'trail'")
        assert "there are: secret" in gateway.hears("new group 'resnet'")
    assert json.loads(heard[0])["text"] == "waiting: stream 'trail' is not there yet: is a producer running?"
    assert json.loads(heard[1])["type"] == "opened"
    assert "secret" not in str(heard)


def test_a_client_is_told_of_no_option_that_it_lacks(any_url: str) -> None:
    """A page can neither start at another epoch nor replay one."""
    write_train(any_url)
    with gateway_for(any_url) as gateway, gateway.client() as client:
        client.read()
        client.send(type="epoch")
        text = json.loads(client.socket.recv(timeout=30))["text"]
    assert "has read epoch 0 of 'train'; there is no other: `penstock produce` makes one; is a producer" in text


NONE_CAME = "waiting: more samples of epoch 0 of 'train'; none came for 9 s: its writer waits for space"
ALL_READ = "waiting: group 'resnet' has read epoch 0 of 'train'; there is no other: `penstock produce` makes one"
AWAY = "the server behind the gateway does not answer as it should; the gateway tries again"
NOTICES = [
    (f"{NONE_CAME} (8 MiB of the budget is held; group 'secret' has 8 MiB unacknowledged)", NONE_CAME),
    ("the connection broke while reading (no Redis answers at redis://a:1: start one); trying again for 60 s", AWAY),
    ("waiting: no answer from the primary of service 'main' (Sentinels a:26379) for 5 s", f"waiting: {AWAY}"),
    ("redis://10.0.0.9:6379 answers again, after 9 s", "the server behind the gateway answers again"),
    ("the server answers again, after 9 s (reading)", "the server behind the gateway answers again"),
    (f"{ALL_READ}; start='earliest' or penstock.Replay reads the retained again", ALL_READ),
    ("new group 'resnet' (there are: secret); it starts at epoch 0", ""),
]


@pytest.mark.parametrize(("line", "told"), NOTICES)
def test_a_notice_tells_a_client_what_is_its_own(line: str, told: str) -> None:
    """The rest is for the operator."""
    assert notice_for(RESNET, line) == told


def test_an_error_names_no_folder_and_no_user(tmp_path: Path) -> None:
    """A client can do nothing about them."""
    for error in (
        SegmentsUnseen(f"the stream's folder {tmp_path}/train cannot be read"),
        Unauthorized("Redis at redis://alice@10.0.0.9:6379 does not permit this user a command"),
        Unauthorized("as an administrator, run `ACL SETUSER alice +hget`"),
        TooManyDeadLetters("entry 1-1 of epoch 0: the module alice.secrets is of another version"),
    ):
        name = type(error).__name__
        assert error_for(RESNET, error) == (
            f"train/resnet cannot be read ({name}): ask who runs the gateway, whose output says why"
        )
    assert error_for(RESNET, GroupFinished("group 'resnet' has read all")) == "group 'resnet' has read all"
