"""The stall detector reports a server that does not answer, while a caller waits in a socket and cannot report it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from penstock_common.errors import WaitTimeout
from penstock_common.server.channel import Channel
from penstock_common.server.connection import open_channel
from penstock_common.stall_detector import STALL_DETECTOR, PendingRequest, StallDetector
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_common.waiting import Wait
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.processes import child
from tests.interruption import Interruption
from tests.journeys.trouble import stopped

WHERE = "redis://here:6379"
END_S = 10.0


class Dog(StallDetector):
    """A stall detector without its thread, whose time passes on request."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(lambda: self.now)
        self.said: list[str] = []

    def start(self) -> None:
        """Do nothing, because the test calls `look`."""

    def request(self, where: str = WHERE) -> PendingRequest:
        """Return a request that was just sent."""
        request = PendingRequest(where, self.said.append, dog=self)
        request.begin()
        return request

    def passes(self, seconds: float) -> list[str]:
        """Let time pass, and return the lines that were reported during it."""
        before = len(self.said)
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.look()
        return self.said[before:]


def answer(request: PendingRequest) -> None:
    """Answer a request."""
    request.answered()
    request.end()


def test_a_silent_server_is_named_within_five_seconds_and_not_at_once() -> None:
    """A caller that asks every two seconds must still be told within five seconds that the server stopped."""
    dog = Dog()
    dog.request()
    assert dog.passes(2.4) == []
    (line,) = dog.passes(0.5)
    assert line == f"waiting: no answer from {WHERE} for 2.5 s: is it stopped, overloaded or cut off?"


def test_all_that_wait_for_one_server_are_told_once_and_again_after_half_a_minute() -> None:
    """A process has a dozen threads, and a night has many seconds."""
    dog = Dog()
    for _ in range(5):
        dog.request()
    assert len(dog.passes(29)) == 1
    assert [line for line in dog.passes(10) if "for 33 s" in line] == dog.said[1:]
    assert len(dog.said) == 2


def test_the_answer_ends_a_silence_with_a_line() -> None:
    """A reader of the log must see that the server answers again."""
    dog = Dog()
    first, second = dog.request(), dog.request()
    dog.passes(4)
    answer(first)
    assert dog.passes(1) == []  # the other request still waits
    answer(second)
    assert dog.passes(1) == [f"{WHERE} answers again, after 5 s"]
    assert dog.passes(60) == []


def test_an_answer_to_somebody_else_ends_no_silence() -> None:
    """Under CLIENT PAUSE WRITE a server answers readers and lets writers wait."""
    dog = Dog()
    dog.request()
    dog.passes(4)
    for _ in range(20):
        answer(dog.request())
        assert dog.passes(0.2) == []


def test_a_request_that_was_given_up_ends_no_silence() -> None:
    """After a timeout the next try waits for the same server, which has not answered."""
    dog = Dog()
    for _ in range(3):
        request = dog.request()
        dog.passes(5)
        request.end()
    assert len(dog.said) == 1
    dog.passes(10)
    assert dog.look() is None  # no request waits any more, so it is forgotten without a line
    assert len(dog.said) == 1


def test_two_servers_are_two_silences() -> None:
    """The queue's server and the stream's may differ, and one of them stands still."""
    dog = Dog()
    dog.request()
    for _ in range(40):
        answer(dog.request("redis://there:6379"))
        dog.passes(0.1)
    assert len(dog.said) == 1
    assert dog.silent_s("redis://there:6379") == 0
    assert dog.silent_s(WHERE) == pytest.approx(4, abs=0.2)


def test_bytes_that_come_are_no_silence() -> None:
    """A large payload on a slow network takes time, and that is not a fault."""
    dog = Dog()
    heard = [0.0]
    request = PendingRequest(WHERE, dog.said.append, heard=lambda: heard[0], dog=dog)
    request.begin()
    for _ in range(100):
        heard[0] = dog.now
        assert dog.passes(0.2) == []
    assert len(dog.passes(3)) == 1


def test_a_pause_of_the_process_is_no_silence_of_the_server() -> None:
    """After SIGSTOP, or in a frozen container, the answer may lie in the socket already."""
    dog = Dog()
    dog.request()
    dog.now += 30.0
    dog.note_pause(29.9)
    assert not dog.passes(2.0)
    assert [line[:18] for line in dog.passes(1.0)] == ["waiting: no answer"], "the server is silent beyond the pause"


def test_a_pause_is_not_taken_off_a_later_silence() -> None:
    """Bytes came after the pause, and then no more."""
    dog, heard = Dog(), [0.0]
    request = PendingRequest(WHERE, dog.said.append, heard=lambda: heard[0], dog=dog)
    request.begin()
    dog.now += 3600.0
    dog.note_pause(3599.0)
    heard[0] = dog.now
    dog.now += 60.0
    assert request.silent_s(dog.now) == 60.0


def waiting_for_an_epoch(url: str) -> None:
    """Wait for an epoch that nobody makes, and print what is said."""
    tuning = Tuning(notify=lambda line: print(line, flush=True))
    with Loader("train", group="g", batch_size=4, url=url, tuning=tuning) as loader:
        next(iter(loader))


def test_a_trainer_that_was_stopped_does_not_blame_the_server(any_url: str) -> None:
    """An operator would look at the server, which answered in time."""
    with Writer("train", url=any_url, spec={"x": ("int32", ())}), child(waiting_for_an_epoch, any_url) as trainer:
        assert trainer.line().startswith("waiting: ")
        for _ in range(3):
            trainer.process.send_signal(signal.SIGSTOP)
            time.sleep(4)
            trainer.process.send_signal(signal.SIGCONT)
            time.sleep(1)
        trainer.process.send_signal(signal.SIGINT)
        assert not [line for line in trainer.finish() if "answer" in line]


def test_a_listener_that_fails_costs_nobody_else_the_word() -> None:
    """A user's notify may raise an error, and the reporting thread must survive it."""
    dog = Dog()

    def fails(_: str) -> None:
        raise ZeroDivisionError

    PendingRequest(WHERE, fails, dog=dog).begin()
    dog.request()
    assert len(dog.passes(3)) == 1


class TestWaits:
    """A wait while a server is silent."""

    @staticmethod
    def turn(dog: Dog, wait: Wait, seconds: float, reason: Callable[[], str]) -> None:
        """Run its loop for ``seconds``."""
        for _ in range(round(seconds * 10)):
            dog.passes(0.1)
            wait.because("producer", reason)

    def test_blames_nobody_else_while_the_server_owes_an_answer(self) -> None:
        """Only the server knows whether a producer runs."""
        dog = Dog()
        wait = Wait(dog.said.append, None, dog.clock, server=WHERE, detector=dog)
        request = dog.request()
        self.turn(dog, wait, 20, lambda: "a producer")
        answer(request)
        assert ["producer" in line for line in dog.said] == [False]
        self.turn(dog, wait, 2, lambda: "a producer")
        assert not any("producer" in line for line in dog.said)
        self.turn(dog, wait, 2, lambda: "a producer")
        assert dog.said[-1] == "waiting: a producer"

    def test_forgets_a_reason_that_the_server_answered_late(self) -> None:
        """The reason is read from the server, which may be silent at that time.

        Then the reason is as old as the silence.
        """
        dog = Dog()
        wait = Wait(dog.said.append, None, dog.clock, server=WHERE, detector=dog)

        def asks() -> str:
            request = dog.request()
            dog.passes(20)
            answer(request)
            return "a producer"

        self.turn(dog, wait, 3.1, asks)
        assert [line for line in dog.said if "producer" in line] == []

    def test_gives_up_with_the_servers_name(self) -> None:
        """An error that names a producer sends people to the wrong host."""
        dog = Dog()
        wait = Wait(dog.said.append, 6.0, dog.clock, server=WHERE, detector=dog)
        dog.request()
        with pytest.raises(WaitTimeout, match=f"gave up after 6 s: no answer from {WHERE}"):
            self.turn(dog, wait, 7, lambda: "a producer")


# --- the thread -------------------------------------------------------------------------------------------------------


def watching() -> list[threading.Thread]:
    """Return the threads of stall detectors in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "penstock-stall-detector"]


@contextmanager
def silent_listener() -> Iterator[str]:
    """Accept connections like a stopped server, and answer nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


def test_one_thread_speaks_and_ends_with_the_last_request() -> None:
    """A thread that stayed would wake a sleeping machine for ever."""
    dog, said = StallDetector(), list[str]()
    request = PendingRequest(WHERE, said.append, dog=dog)
    request.begin()
    assert dog.thread is not None
    deadline = time.monotonic() + END_S
    while not said:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    thread = dog.thread
    answer(request)
    thread.join(END_S)
    assert not thread.is_alive()
    assert said[1:] == [f"{WHERE} answers again, after {said[1].split()[-2]} s"]
    request.begin()  # and starts again
    assert dog.thread is not None
    request.end()


def test_quick_answers_share_one_thread() -> None:
    """A thread for each of a writer's thousand requests a second would cost more than they do."""
    dog, threads = StallDetector(), set[int | None]()
    request = PendingRequest(WHERE, lambda _: None, dog=dog)
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        request.begin()
        assert dog.thread is not None
        threads.add(dog.thread.ident)
        answer(request)
        time.sleep(0.001)
    assert len(threads) == 1


def test_a_forked_process_has_a_stall_detector_of_its_own() -> None:
    """Threads do not survive a fork, and the parent's waits are not the child's."""
    read, write = os.pipe()
    with silent_listener() as parents, silent_listener() as url:
        asked = PendingRequest(parents, lambda _: None)
        asked.begin()
        pid = os.fork()
        if pid == 0:

            def say(text: str) -> None:
                os.write(write, text.encode())

            try:
                connect(url, timeout_s=3.5, notify=say)
            finally:
                os._exit(0)
        os.close(write)
        try:
            said = b""
            while more := os.read(read, 1000):
                said += more
        finally:
            os.waitpid(pid, 0)
            asked.end()
            os.close(read)
        assert said.decode().startswith(f"waiting: no answer from {url} for ")
        assert parents not in said.decode()


def test_a_password_is_never_said() -> None:
    """The line goes into logs that others read."""
    said: list[str] = []
    with silent_listener() as url, pytest.raises(ConnectionError):
        connect(url.replace("redis://", "redis://somebody:secret@"), timeout_s=3.5, notify=said.append)
    assert said[0].startswith(f"waiting: no answer from {url.replace('://', '://somebody@')} for ")
    assert "secret" not in said[0]


def test_channels_are_watched_while_they_read_and_while_they_send(
    fresh_server: Callable[..., EmbeddedServer],
) -> None:
    """A writer may meet the silence with the kernel's buffers full, before it waits for any answer."""
    server = fresh_server()
    payload = bytes(64 << 20)
    said: dict[str, list[str]] = {"read": [], "send": []}

    def ask(channel: Channel, what: str) -> None:
        if what == "read":
            channel.send([(b"PING",)])
            channel.read()
        else:
            channel.send([(b"SET", b"k", payload)])

    with ExitStack() as stack:
        asking = []
        for what, lines in said.items():
            client = stack.enter_context(connect(server.url, notify=lines.append))
            channel = stack.enter_context(closing(open_channel(client)))
            asking.append(threading.Thread(target=ask, args=(channel, what)))
        with stopped(server):
            for thread in asking:
                thread.start()
            deadline = time.monotonic() + END_S
            while not all(said.values()):
                assert time.monotonic() < deadline, said
                time.sleep(0.02)
        for thread in asking:
            thread.join(END_S)
    for lines in said.values():
        assert lines[0].startswith(f"waiting: no answer from redis://127.0.0.1:{server.port} for "), said


@pytest.mark.parametrize("kind", ["channel", "client"])
def test_an_interrupted_request_is_no_silence_for_the_rest_of_the_process(server: EmbeddedServer, kind: str) -> None:
    """After Ctrl-C in a notebook each wait said that the server owed an answer, however long ago that was."""

    def marks_after(interruption: Interruption) -> list[PendingRequest]:
        with connect(server.url) as client, closing(open_channel(client)) as channel:

            def ask() -> None:
                channel.send([(b"PING",)])
                channel.read()

            client.ping()  # redis-py leaves a socket open that is interrupted as it connects
            with suppress(KeyboardInterrupt):
                interruption.of(ask if kind == "channel" else client.ping)
            return [one for one in STALL_DETECTOR.asked if one.where == client.where]

    whole = Interruption()
    assert not marks_after(whole)
    for after in range(1, whole.calls):
        assert not marks_after(Interruption(after)), after
