"""The text of an error as a terminal gets it, in Python's own traceback, too."""

from __future__ import annotations

import pickle
import socketserver
import subprocess
import sys
import threading
import traceback

import pytest
from redis import exceptions as foreign

from penstock_common.errors import GroupNotFound, MissingExtra, ServerUnavailable, Unauthorized, WritesRefused
from penstock_common.server.error_translation import translated
from penstock_common.stream.groups.roster import unknown_group

CONTROLS = "\x1b]0;OWNED\x07\x1b[2J\x9b31m\r\nforged\u2028line"
SPELLED = r"\x1b]0;OWNED\x07\x1b[2J\x9b31m\r forged\u2028line"
TRAINER = "import sys, penstock; penstock.Loader('train', group='g', url=sys.argv[1], batch_size=4)"


class Hostile(socketserver.BaseRequestHandler):
    """A server that answers each request with an error that would control a terminal."""

    def handle(self) -> None:
        """Answer until the client leaves."""
        while self.request.recv(4096):
            self.request.sendall(b"-ERR \x1b]0;OWNED\x07\r\n" * 4)


def test_what_a_server_says_controls_no_terminal_in_a_traceback() -> None:
    """A trainer prints no error through the command's console. The words reached its terminal as they were."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Hostile) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"redis://127.0.0.1:{server.server_address[1]}"
        done = subprocess.run([sys.executable, "-c", TRAINER, url], capture_output=True, check=False)
        server.shutdown()
    assert done.returncode == 1
    assert rb"ReplyError: Redis at redis://127.0.0.1:" in done.stderr
    assert rb"\x1b]0;OWNED\x07" in done.stderr
    assert b"\x1b" not in done.stderr


def test_the_cause_of_an_error_controls_no_terminal_either() -> None:
    """A traceback shows redis-py's exception above Penstock's."""
    with pytest.raises(Unauthorized) as caught, translated("redis://h"):
        raise foreign.AuthenticationError(CONTROLS)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count(r"\x1b]0;OWNED") == 2
    assert not any(char in text for char in "\x1b\x07\x9b\r\u2028")


def test_an_error_has_one_line_of_printable_characters_and_keeps_its_fields() -> None:
    """Programs catch it by its class and send it between processes. Text of any language is printable."""
    for error in (
        unknown_group("train", CONTROLS, [CONTROLS]), GroupNotFound(CONTROLS), Unauthorized(CONTROLS),
        MissingExtra(CONTROLS), ServerUnavailable(CONTROLS).of("partition 0"), WritesRefused(CONTROLS),
    ):  # fmt: skip
        assert SPELLED in str(error)
        assert str(error).isprintable()
        assert pickle.loads(pickle.dumps(error)).args == error.args
    assert str(GroupNotFound("größer als 5 µs, 日本 🚀")) == "größer als 5 µs, 日本 🚀"
    assert str(GroupNotFound()) == ""
