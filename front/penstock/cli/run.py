"""``penstock run SOURCE ... -- COMMAND``: a server, workers and a training command, started and ended together."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.cli import Parser, queue_url_of
from penstock.cli.interrupts import end_by_signals
from penstock.cli.sources import add_sources, check_source, options_of, plans_of, streams_of, workers_of
from penstock_common.errors import PenstockError
from penstock_common.settings import Settings, child_environment

if TYPE_CHECKING:
    from penstock.cli.console import Console


_END_S = 10.0
"""The longest time that a trainer may take to end when it is asked to."""
_NICENESS = 10
"""The niceness of the production and its workers. Without it they would take processor time from the training command.

No sample comes later because of it: while the command waits for one, the workers have the processor.
"""
_PROGRESS_S = 10.0
"""The time between two progress lines among the lines of the trainer."""


class _RunParser(Parser):
    """A source's parser that leaves the words after ``--`` to the command."""

    def format_help(self) -> str:
        """Return the help with the training command in its usage, which argparse does not know."""
        whole = super().format_help()
        usage = self.format_usage()
        return whole.replace(usage, f"{usage.rstrip()} -- COMMAND ...\n", 1)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """See the class."""
        given: Sequence[str] = list(args or ())
        is_given = "--" in given
        at = given.index("--") if is_given else self._command_at(given)
        found, rest = super().parse_known_args(given[:at], namespace)
        found.command = list(given[at + 1 :]) if is_given else []
        if not found.command:
            command = [] if is_given else given[at:]
            words = [*self.prog.split(), *given[:at], "--", *(command or ["python", "train.py"])]
            self.error(f"no command to run: the training command goes after --, as in `{shlex.join(words)}`")
        return found, rest

    def _command_at(self, given: Sequence[str]) -> int:
        """Return where a command without its ``--`` begins: at the first word that is not the source's."""
        found, rest = argparse.ArgumentParser.parse_known_args(self, given)
        no_files = [word for word in getattr(found, "files", ()) if not word.endswith((".npy", ".npz"))]
        first = [*no_files, *rest][:1]
        return given.index(first[0]) if first and not first[0].startswith("-") else len(given)


EPILOG = (
    "example:\n  penstock run images photos/ --resize 224x224 --epochs 3 -- python train.py\n\n"
    "exit codes: the training command's own (128 + n where signal n ended it), 1 the production failed and the\n"
    "command was ended for it, 2 wrong usage, 130 Ctrl-C or SIGTERM"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_sources(parser, _RunParser, " -- python train.py")


def run(args: argparse.Namespace, console: Console) -> int:
    """Return the command's own exit code, or 1 if the production failed and the command was ended for it.

    Another process checks the options while a private server starts. The command starts once both are done, and imports
    its framework while the production is prepared.
    """
    end_by_signals()
    _require_producer()
    streams, checking = streams_of(args), _begin_check(args)
    try:
        with _server(args, console, checking) as here, _Trainer(console, args.command, here, streams) as trainer:
            os.nice(_NICENESS)
            from penstock_producer.jobs.production import SplitProduction

            plans = plans_of(here)
            with SplitProduction(
                plans,
                options_of(here),
                workers=workers_of(here),
                notify=console.notice,
                server_stays=here.server_stays,
            ) as production:
                amount = production.samples_per_epoch
                names = " and ".join(map(repr, streams))
                each = f" of {amount:,} samples" if amount is not None else ""
                console.notice(f"{_making(args)}{each} for stream {names}")
                return _RunSession(console, trainer).run(production)
    except KeyboardInterrupt:
        console.notice("ended")
        return 130


def _require_producer() -> None:
    """Raise the error of a missing extra before a server and a command are started for nothing."""
    if importlib.util.find_spec("rq") is None:
        importlib.import_module("penstock_producer.jobs.worker")


def _begin_check(args: argparse.Namespace) -> int:
    """Start a process that checks the source's options, and return its pid.

    The check imports pydantic for a tenth of a second, which would delay the command's start. Nothing of it is needed
    here until the command runs.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            check_source(args)
            code = 0
        finally:
            os._exit(code)
    return pid


def _end_check(args: argparse.Namespace, checking: int) -> None:
    """Wait for the check, and raise the error that it met."""
    if os.waitpid(checking, 0)[1]:
        check_source(args)


def _making(args: argparse.Namespace) -> str:
    if getattr(args, "endless", False):
        return "making a feed without end"
    if args.follow and args.epochs is None:
        return "making an epoch whenever the trainer is about to need one,"
    return f"making {args.epochs or 1} epoch{'s' if (args.epochs or 1) > 1 else ''}"


@contextlib.contextmanager
def _server(args: argparse.Namespace, console: Console, checking: int) -> Iterator[argparse.Namespace]:
    """Yield the options with the server that --url or PENSTOCK_URL names, else with a private one.

    Raises the error of wrong options once the process ``checking`` has ended.
    """
    from penstock_common.stream.servers.embedded import EmbeddedServer

    settings = Settings.from_environment()
    if url := args.url or settings.named_url:
        queue_url = queue_url_of(args) or url
        _end_check(args, checking)
        yield argparse.Namespace(**{**vars(args), "url": url, "queue_url": queue_url}, server_stays=True)
        return
    with EmbeddedServer() as server:
        _end_check(args, checking)
        console.notice(f"{server.name} {server.version} at {server.address}, for this run only")
        try:
            queue_url = args.queue_url or server.url
            yield argparse.Namespace(**{**vars(args), "url": server.url, "queue_url": queue_url}, server_stays=False)
        finally:
            _remove_segments(server.url)


def _remove_segments(url: str) -> None:
    """Remove the segments of a server that ends with this run, because no other program knows of them."""
    from penstock_common.stream.client import connect
    from penstock_common.stream.directory import list_streams
    from penstock_common.stream.payloads import segments_of
    from penstock_common.stream.removal.deletion import delete_stream
    from penstock_common.stream.streams import load_stream

    with contextlib.suppress(PenstockError), connect(url) as client:
        for name in list_streams(client):
            if segments_of(load_stream(client, name)) is not None:
                delete_stream(client, name)


_SHELL_WORDS = frozenset(("source", ".", "cd", "export", "set", "alias", "ulimit", "if", "for", "while"))
_STARTERS = ("python", "python3", "torchrun", "accelerate", "bash", "sh", "mpirun", "uv", "poetry", "conda")
"""The programs that start most training jobs."""


class _Trainer:
    """The training command. An error that leaves the ``with`` block ends it."""

    def __init__(self, console: Console, command: list[str], here: argparse.Namespace, streams: Sequence[str]) -> None:
        self._console, self._name = console, command[0]
        environment = {
            "PENSTOCK_URL": here.url,
            "PENSTOCK_QUEUE_URL": here.queue_url,
            "PENSTOCK_AWAITED": ",".join(streams),
        }
        console.share()
        self._process = self._start(command, environment)

    def _start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        _require_script(command)
        try:
            return subprocess.Popen(command, env=child_environment(environment))
        except OSError as error:
            if self._name.endswith(".py") and Path(self._name).is_file():
                why = f"a Python file is started by Python: write -- python {shlex.join(command)}"
            elif re.match(r"\w+=", self._name):
                why = f"a shell sets variables, and this is no shell: write -- env {shlex.join(command)}"
            elif self._name in _SHELL_WORDS:
                why = (
                    f"it is a word of the shell: write -- bash -c {shlex.quote(' '.join([*command, '&& python ...']))}"
                )
            elif " " in self._name:
                why = f"command and arguments are words of their own: write -- {self._name}"
            elif near := difflib.get_close_matches(self._name, _STARTERS, 1):
                why = f"no such command; did you mean {near[0]}?"
            else:
                why = f"{error.strerror}: after -- comes a command as you would type it without Penstock"
            raise PenstockError(f"cannot start {self._name!r}: {why}") from None

    def wait(self) -> int:
        """Wait for its end, and return its exit code in a shell's form."""
        code = self._process.wait()
        if code == -signal.SIGKILL:
            self._console.notice(
                f"penstock: {self._name} was ended by signal 9 (SIGKILL): the system does that to a process that takes "
                "too much memory, and `dmesg` says so"
            )
        elif code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            self._console.notice(f"penstock: {self._name} crashed: signal {-code} ({signal.Signals(-code).name})")
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """End it, also if it ignores signals. A second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fail(self) -> None:
        """End it because its data will not come, and print that."""
        if self._process.poll() is None:
            self._console.notice(f"penstock: the production failed, so {self._name} is ended")
            self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.fail()
        elif error is not None:
            self.end()


def _require_script(command: Sequence[str]) -> None:
    """Raise PenstockError for a missing Python script, before Python reports it among other lines."""
    is_python = Path(command[0]).name.startswith("python")
    script = command[1] if is_python and len(command) > 1 and command[1].endswith(".py") else ""
    if script and not Path(script).exists():
        near = difflib.get_close_matches(Path(script).name, [path.name for path in Path(script).parent.glob("*.py")], 1)
        hint = f"; did you mean {Path(script).with_name(near[0])}?" if near else f" in {Path.cwd()}"
        raise PenstockError(f"no file {script}{hint}")


class _RunSession:
    """The production of a run, while the trainer runs."""

    def __init__(self, console: Console, trainer: _Trainer) -> None:
        self._console, self._trainer = console, trainer
        self._failure: BaseException | None = None
        self._stopping = threading.Event()

    def run(self, production: Any) -> int:
        """Run until the trainer ends, or the production fails."""
        producer = threading.Thread(target=self._produce, args=(production,), daemon=True)
        producer.start()
        try:
            code = self._trainer.wait()
        except KeyboardInterrupt:
            self._trainer.end()
            raise
        finally:
            self._stopping.set()
            producer.join()
        if self._failure is not None:
            raise self._failure
        return code

    def _produce(self, production: Any) -> None:
        from penstock.cli.production import ProductionView, summary_line

        try:
            with self._console.progress(_PROGRESS_S) as shown:
                views = {part: ProductionView(self._console, shown, part) for part in production.parts}
                for part, look in production.run():
                    views[part].update(look)
                    if self._stopping.is_set():
                        return
            for summary in production.summaries():
                self._console.notice(summary_line(summary))  # stdout belongs to the training command
        except Exception as error:
            self._failure = error
            self._trainer.fail()
