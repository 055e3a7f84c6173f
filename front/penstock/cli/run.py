"""``penstock run SOURCE ... -- COMMAND``: a server, workers and a training command, started and ended together."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli import Parser
from penstock.cli.ending import end_by_signals
from penstock.cli.sources import add_sources, options_of, plans_of, workers_of

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock_producer.working.worker import WorkerOptions

NAME = "run"
HELP = "start server, workers and a training command together"

_END_S = 10.0
"""How long a trainer may take to end when it is asked to."""
_PROGRESS_S = 10.0
"""How often progress is told among the lines of the trainer."""


class _Parser(Parser):
    """A source's parser that leaves what follows ``--`` to the command."""

    def format_help(self) -> str:
        """The usage ends with the command, which argparse does not know of."""
        whole = super().format_help()
        usage = self.format_usage()
        return whole.replace(usage, f"{usage.rstrip()} -- COMMAND ...\n", 1)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """See the class."""
        given: Sequence[str] = list(args or ())
        is_told = "--" in given
        at = given.index("--") if is_told else self._command_at(given)
        found, rest = super().parse_known_args(given[:at], namespace)
        found.command = list(given[at + 1 :]) if is_told else []
        if not found.command:
            command = [] if is_told else given[at:]
            words = [*self.prog.split(), *given[:at], "--", *(command or ["python", "train.py"])]
            self.error(f"no command to run: the training command goes after --, as in `{shlex.join(words)}`")
        return found, rest

    def _command_at(self, given: Sequence[str]) -> int:
        """Return where the command begins whose -- was forgotten: at the first word that is not the source's."""
        found, rest = argparse.ArgumentParser.parse_known_args(self, given)
        no_files = [word for word in getattr(found, "files", ()) if not word.endswith((".npy", ".npz"))]
        first = [*no_files, *rest][:1]
        return given.index(first[0]) if first and not first[0].startswith("-") else len(given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    add_sources(parser, _Parser, " -- python train.py")
    parser.epilog = (
        "example:\n  penstock run images photos/ --resize 224x224 --epochs 3 -- python train.py\n\n"
        "exit codes: the training command's own (128 + n where signal n ended it), 1 the production failed and the\n"
        "command was ended for it, 2 wrong usage, 130 Ctrl-C"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """The command's own exit code; 1 if the production failed, and the command was ended for it."""
    from penstock_producer.planning.productions import Productions

    end_by_signals()
    try:
        with _server(args, console) as options:
            plans = plans_of(args)
            with Productions(plans, options, workers=workers_of(args), notify=console.notice) as production:
                amount = production.samples_per_epoch
                names = " and ".join(repr(plan.stream) for plan in plans.values())
                each = f" of {amount:,} samples" if amount is not None else ""
                console.notice(f"{_making(args)}{each} for stream {names}; running {shlex.join(args.command)}")
                return _Session(console, options, args.command).run(production)
    except KeyboardInterrupt:
        console.notice("ended")
        return 130


def _making(args: argparse.Namespace) -> str:
    if getattr(args, "endless", False):
        return "making a feed without end"
    return f"making {args.epochs or 1} epoch{'s' if (args.epochs or 1) > 1 else ''}"


@contextlib.contextmanager
def _server(args: argparse.Namespace, console: Console) -> Iterator[WorkerOptions]:
    """The server that --url or PENSTOCK_URL names, else one of our own."""
    from penstock_common.settings import Settings
    from penstock_common.stream.servers.embedded import EmbeddedServer

    if args.url or Settings.from_environment().named_url:
        yield options_of(args)
        return
    with EmbeddedServer() as server:
        console.notice(f"{server.name} {server.version} at {server.address}, for this run only")
        here = {**vars(args), "url": server.url, "queue_url": args.queue_url or server.url}
        try:
            yield options_of(argparse.Namespace(**here))
        finally:
            _remove_segments(server.url)


def _remove_segments(url: str) -> None:
    """Of a server that ends with this run: nobody else knows of them."""
    from penstock_common.errors import PenstockError
    from penstock_common.stream.link.connection import connect
    from penstock_common.stream.payloads import segments_of
    from penstock_common.stream.removal.deletion import delete_stream
    from penstock_common.stream.streams import list_streams, load_stream

    with contextlib.suppress(PenstockError), connect(url) as client:
        for name in list_streams(client):
            if segments_of(load_stream(client, name)) is not None:
                delete_stream(client, name)


class _Session:
    """The command and the production beside it."""

    def __init__(self, console: Console, options: WorkerOptions, command: list[str]) -> None:
        self._console, self._options, self._command = console, options, command
        self._failure: BaseException | None = None
        self._stopping = threading.Event()

    def run(self, production: Any) -> int:
        """Starts both; ends when the command does, or when the production fails."""
        self._console.share()
        child = self._start()
        producer = threading.Thread(target=self._produce, args=(production, child), daemon=True)
        producer.start()
        try:
            code = child.wait()
        except KeyboardInterrupt:
            self._end(child)
            raise
        finally:
            self._stopping.set()
            producer.join()
        if self._failure is not None:
            raise self._failure
        return code if code >= 0 else 128 - code

    def _start(self) -> subprocess.Popen[bytes]:
        from penstock_common.errors import PenstockError
        from penstock_common.settings import child_environment

        urls = {"PENSTOCK_URL": self._options.url, "PENSTOCK_QUEUE_URL": self._options.queue_url}
        try:
            return subprocess.Popen(self._command, env=child_environment(urls))
        except OSError as error:
            raise PenstockError(f"cannot start {self._command[0]!r}: {error.strerror}") from None

    def _produce(self, production: Any, child: subprocess.Popen[bytes]) -> None:
        from penstock.cli.production import ProductionView, tell

        try:
            with self._console.progress(_PROGRESS_S) as shown:
                views = {part: ProductionView(self._console, shown, part) for part in production.parts}
                for part, look in production.run():
                    views[part].update(look)
                    if self._stopping.is_set():
                        return
            for summary in production.summaries():
                tell(_OnStderr(self._console), summary, False)  # type: ignore[arg-type]
        except Exception as error:
            self._failure = error
            if child.poll() is None:
                self._console.notice(f"penstock: the production failed, so {self._command[0]} is ended")
            self._end(child)

    @staticmethod
    def _end(child: subprocess.Popen[bytes]) -> None:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class _OnStderr:
    """Stdout belongs to the command that runs beside us."""

    def __init__(self, console: Console) -> None:
        self.line = console.notice
