"""The table of commands, one file each, and the options they share. A command's file is imported when it is called.

A command is a module with ``EPILOG`` (an example, and what else its help says), ``add_arguments(parser)`` and
``run(args, console) -> exit code``, whose PenstockError becomes one line and exit code 1. Its name and its line of help
are in the table.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import operator
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from penstock_common.errors import PenstockError
from penstock_common.extras import needed
from penstock_common.settings import DEFAULT_URL, Settings

if TYPE_CHECKING:
    from penstock_common.stream.commands import Client
    from penstock_common.stream.streams import Stream


class WrongUsage(PenstockError):
    """Options that contradict each other, or values without a meaning. The command ends with 2, not with 1."""


@contextmanager
def of_usage() -> Iterator[None]:
    """Turn a PenstockError about the command line into WrongUsage."""
    try:
        yield
    except PenstockError as error:
        raise WrongUsage(str(error)) from None


COMMANDS = {
    "demo": "see it all work: digits, workers, Redis, two models, an audit",
    "run": "start server, workers and a training command together",
    "bench": "measure your source through a DataLoader and through Penstock, and say which to use",
    "produce": "make epochs of a source with worker processes",
    "worker": "do the jobs of penstock produce, here or on another host",
    "server": "run a private redis-server in the foreground",
    "inspect": "show streams, or one stream's epochs, groups, lag and bytes",
    "partitions": "show where a stream's partitions lie, and how to even them out",
    "show": "show samples of a stream as pictures, with labels and identity",
    "stat": "tell ranges, means, classes and troubles of a stream's samples",
    "monitor": "watch streams live: rates, lag, members, workers, the bottleneck",
    "tail": "follow what is written to a stream: a line for each entry, no payloads",
    "gateway": "let browsers read and acknowledge as members of groups",
    "exporter": "serve metrics of streams for Prometheus",
    "doctor": "check server and streams as an expert would, and say what fixes it",
    "health": "say whether a worker or a trainer of this host gave a heartbeat lately",
    "audit": "compare planned, written and trained on; name what is lost or duplicated",
    "bad": "list, show, retry or drop bad samples and dead letters",
    "groups": "list a stream's groups; declare or reset one, drop some",
    "epochs": "list a stream's epochs; close, abandon or pin one; say how many are kept",
    "trim": "release what a stream's retention gives up, now",
    "export": "copy a stream's epochs to files, bit-exact",
    "import": "bring exported epochs back into a stream",
    "delete": "remove a stream with all its epochs and groups",
    "completion": "print a script that lets a shell complete penstock's commands",
}
"""Command -> its line of help, in the order of ``penstock --help``, which therefore imports no command."""


WIDEST = 110
"""The widest help in columns, because longer lines are hard to read."""
EXIT_CODES = "exit codes: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C or SIGTERM"


_CONFIG_SET = re.compile(r'redis-cli(?: -h \S+ -p \d+)? CONFIG SET (\S+) ("[^"]*"|\S+)')
LOGIN_HINT = "# REDISCLI_AUTH must hold the password"
_PENSTOCK = re.compile(r"(^|: )penstock ")
"""A command of ours in a proposal, which may begin with a sentence."""


class HelpText(argparse.HelpFormatter):
    """A formatter of help: paragraphs are as wide as the terminal, and indented lines stay as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **options)
        self._width = min(self._width, WIDEST)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = [
            part if "\n  " in part else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in text.split("\n\n")
        ]
        return "\n\n".join(filled)


class Actions(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The actions of a command on a stream, which explain an unknown word; argparse only lists the known ones.

    For a stream in the place of an action, the error gives the command to type.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """See argparse."""
        if values[0] not in self.choices:
            parser.error(self.explain(parser.prog, values))
        super().__call__(parser, namespace, values, option_string)

    def explain(self, prog: str, words: Sequence[str]) -> str:
        """Return what is wrong with the first word, and what to type. The other words are the rest of the line."""
        near = difflib.get_close_matches(words[0], self.choices, 1) if len(words) > 1 else []
        if near:
            line = [*prog.split(), near[0], *words[1:]]
        elif len(words) == 1 or words[1].startswith("-"):
            line = [*prog.split(), next(iter(self.choices)), *words]
        else:
            return f"{words[0]!r} is no action; there are {', '.join(self.choices)}"
        return f"{words[0]!r} is no action; there are {', '.join(self.choices)}: type `{shlex.join(line)}`"


_FEW = 12
"""The most options that fit on a line."""
_OTHER_NAMES = {"--workers": ("processes",), "--num-workers": ("workers", "processes"), "--size": ("resize",)}
"""Name of an option elsewhere -> the names that it may have here."""
PART = "--part WEIGHT"
"""The beginning of errors in a part of a mixture. It is no command, so help comes from the command of such a source."""
_EXAMPLES = {
    "stream": "train",
    "group": "resnet",
    "name": "resnet",
    "number": "0",
    "epoch": "0",
    "SOURCE": "images photos/ --resize 224x224",
}


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)


def _example(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):  # one name for each value of the option
        return " ".join(action.metavar)
    return _EXAMPLES.get(_metavar(action), _EXAMPLES.get(action.dest, _metavar(action)))


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line, and names the nearest option for an unknown one."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{"formatter_class": HelpText, **named})

    def format_help(self) -> str:
        """Return the help, which ends with exit codes: the ordinary ones if the command has no others."""
        text = super().format_help()
        return text if "exit codes:" in text else f"{text}\n{EXIT_CODES}\n"

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line, which names --help."""
        if message.startswith("the following arguments are required: "):
            lacking = [action for action in self._actions if action.required]
            line = " ".join(w for a in lacking for w in [*a.option_strings[:1], _example(a)])
            message = f"{message}: type `{self.prog} {line}`"
        self.exit(2, f"{self.prog}: {message}; see {self.prog.replace(PART, 'penstock produce')} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, Actions):
            super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Report unknown options here, because the outermost parser knows none of a sub-command's options."""
        self._refuse_repeated(list(args or ()))
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            word = rest[0].partition("=")[0]
            options = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
            meant = [name for name in _OTHER_NAMES.get(word, ()) if name in options]
            guess = meant or difflib.get_close_matches(word.lstrip("-"), options, 1) if word.startswith("-") else []
            hint = f"did you mean {options[guess[0]]}?" if guess else self._why_too_many(rest[0], list(args or ()))
            self.error(f"unknown argument {rest[0]!r}" + (f" ({hint})" if hint else ""))
        return found, rest

    def _refuse_repeated(self, words: list[str]) -> None:
        """End with 2 if an option with one value is given two. Otherwise the last one would win silently."""
        seen: dict[str, str] = {}
        for at, word in enumerate(words[: words.index("--")] if "--" in words else words):
            name, _, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if not name.startswith("-") or type(action) is not argparse._StoreAction or action.nargs is not None:
                continue
            value = value or (words[at + 1] if at + 1 < len(words) else "")
            if seen.setdefault(action.dest, value) != value:
                self.error(f"{name} is given twice, with {seen[action.dest]!r} and {value!r}: once is enough")

    def _why_too_many(self, word: str, given: Sequence[str]) -> str:
        """Return why an unexpected argument is wrong here, or '' if no reason is known."""
        if "--" in given:
            return "`penstock run` starts a training command; this one starts none"
        if word.startswith("-") or word not in given:
            known = [a.option_strings[-1] for a in self._actions if a.option_strings and a.dest != "help"]
            return f"it takes {', '.join(known)}" if 0 < len(known) <= _FEW else ""
        at = len(given) - 1 - given[::-1].index(word)
        if (action := self._option_string_actions.get("".join(given[at - 3 : at - 2]))) and action.nargs == 2:
            return f"a source of several words stands in quotes: {given[at - 3]} 3 'images photos/ --resize 224'"
        for before, takes in ((given[at - 1 : at], "no value"), (given[at - 2 : at - 1], "one value")):
            action = self._option_string_actions.get("".join(before))
            if action is not None and action.nargs == (0 if takes == "no value" else None):
                return f"{before[0]} takes {takes}" + ("" if takes == "no value" else f", {_metavar(action)}")
        positionals = [action for action in self._get_positional_actions() if action.nargs is None]
        return ", ".join(f"{_metavar(a)} is one: {a.help}" if a.help else _metavar(a) for a in positionals) or (
            "" if self._get_positional_actions() else "only options are taken"
        )


def load_command(name: str) -> ModuleType:
    """Import the module of a command in the table. The demo uses the public names, so it stands above this package."""
    return importlib.import_module("penstock.demo.command" if name == "demo" else f"penstock.cli.{name}")


def parser_of(name: str) -> Parser:
    """Return the parser of a command in the table."""
    command = load_command(name)
    parser = Parser(f"penstock {name}", description=COMMANDS[name], epilog=command.EPILOG)
    command.add_arguments(parser)
    return parser


def add_url(parser: argparse._ActionsContainer, private: str = "") -> None:
    """Add ``--url``; read it with ``url_of``. ``private`` says which command has a private server without it."""
    default = f"PENSTOCK_URL, else {private}your `penstock server`, else localhost:6379"
    parser.add_argument("--url", type=SERVER_URL, help=f"the streams' server (default: {default})")


def add_jobs(parser: argparse._ActionsContainer) -> None:
    """Add ``--queue-url`` and ``--queue`` to a command that looks at jobs; read the first with ``queue_url_of``."""
    parser.add_argument(
        "--queue-url", type=SERVER_URL, help="the jobs' server (default: PENSTOCK_QUEUE_URL, else the streams')"
    )
    parser.add_argument(
        "--queue", type=queue_name, default="penstock", metavar="NAME", help="of jobs (default: %(default)s)"
    )


def queue_name(text: str) -> str:
    """Return the name of a queue as argparse gives it. Raises ArgumentTypeError for an empty or unprintable one."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no name; the queue of `penstock produce` is called penstock")
    return text


def add_no_lease(parser: argparse.ArgumentParser) -> None:
    """Add the option that leaves out the lease on an epoch that is looked at."""
    parser.add_argument(
        "--no-lease",
        action="store_true",
        help="write nothing, not even the lease that keeps a complete epoch: it may be released meanwhile, which is an "
        "error then",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``; print the result with ``console.json`` and nothing else on stdout."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def add_stream(parser: argparse.ArgumentParser) -> None:
    """Add ``stream``, ``--url`` and ``--json``, which every command on one stream has."""
    parser.add_argument("stream", type=STREAM_NAME, help="its name; `penstock inspect` lists them")
    add_url(parser)
    add_json(parser)


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    """Add one of several actions of a command on a stream, e.g. ``penstock groups list``."""
    parser = actions.add_parser(name, help=text, description=text)
    add_stream(parser)
    return parser


def url_of(args: argparse.Namespace) -> str:
    """Return the URL given with ``--url``, else the environment's, else the default."""
    return args.url or Settings.from_environment().url


def connected(args: argparse.Namespace) -> Client:
    """Return a client of the server of ``--url``, to be used in a ``with`` statement."""
    from penstock_common.stream.client import connect

    return connect(url_of(args))


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[tuple[Client, Stream]]:
    """Connect to the server of ``--url``, and load the stream that the command names."""
    from penstock_common.stream.streams import load_stream

    with connected(args) as client:
        yield client, load_stream(client, args.stream)


def queue_url_of(args: argparse.Namespace) -> str | None:
    """Return the URL given with ``--queue-url``, else the environment's, else None for the streams' server."""
    return args.queue_url or Settings.from_environment().named_queue_url


def typed(command: str, args: argparse.Namespace, client: Client) -> str:
    """Return a proposed command as it must be typed to reach the same server."""
    if "CONFIG SET" in command:
        from penstock_common.stream.servers.suitability import config_refusal

        refusal = config_refusal(client)
        if refusal == "server":
            command = _CONFIG_SET.sub(r"set \1 to \2 where the server is managed, because it refuses CONFIG", command)
        elif refusal == "right":
            instead = r"as an administrator run CONFIG SET \1 \2, or set it where the server is managed"
            command = _CONFIG_SET.sub(instead, command)
    is_shown = bool(args.url) and "@" not in args.url  # a password must not appear on screens and in logs
    if client.slots():
        command = of_node(command, client)
    elif where := shlex.quote(args.url) if is_shown else _url_in_shell(args):
        command = command.replace("redis-cli ", f"redis-cli -u {where}{tls_options(client)} ")
    if is_shown:
        parts = command.split("; ")
        url = shlex.quote(args.url)
        command = "; ".join(f"{part} --url {url}" if _PENSTOCK.search(part) else part for part in parts)
    return command


def of_node(command: str, client: Client) -> str:
    """Return a proposed command for a node of a cluster, with the user and the TLS files of the client's address.

    redis-cli takes the password from REDISCLI_AUTH. A command that names no node is for all nodes.
    """
    node = client.node_of(None).connection_pool.connection_kwargs
    where = shlex.quote(f"{node['host']}:{node['port']}")
    command = re.sub(r"redis-cli (?!-)", f"redis-cli --cluster call {where} ", command)
    return command.replace("redis-cli ", f"redis-cli{login_options(client)} ")


def login_options(client: Client) -> str:
    """Return the options of redis-cli that every connection to a node needs.

    A password is no option, because every user of the host could read it.
    """
    name = client.connection_pool.connection_kwargs.get("username")
    user = f" --user {shlex.quote(name)}" if name else ""
    return f"{user} --tls{tls_options(client)}" if client.where.startswith("rediss:") else user


def needs_password(command: str, client: Client) -> bool:
    """Return whether a command for a node of a cluster takes a password from REDISCLI_AUTH."""
    has_password = bool(client.connection_pool.connection_kwargs.get("password"))
    return has_password and "redis-cli " in command and bool(client.slots())


def tls_options(client: Client) -> str:
    """Return the options of redis-cli for the TLS files of an address, in which redis-cli ignores them."""
    settings = client.connection_pool.connection_kwargs
    options = {"--cacert": "ssl_ca_certs", "--cert": "ssl_certfile", "--key": "ssl_keyfile"}
    return "".join(f" {name} {shlex.quote(settings[key])}" for name, key in options.items() if settings.get(key))


def _url_in_shell(args: argparse.Namespace) -> str:
    """Return an expression that a shell expands to the URL, which may hold a password.

    It is '' for Redis' own port on this host.
    """
    settings = Settings.from_environment()
    if args.url or (settings.named_url and not settings.url_file):
        return '"$PENSTOCK_URL"'
    if settings.url_file:
        return '"$(cat "$PENSTOCK_URL_FILE")"'
    return '"$(penstock server --print-url)"' if settings.url != DEFAULT_URL else ""


def require_web(user: str, hint: str = "") -> None:
    """Raise MissingExtra, with these words, unless the packages of an HTTP server are installed."""
    for name in ("starlette", "uvicorn"):
        with needed(name, user, hint):
            importlib.import_module(name)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: a whole number within these bounds."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            upto = "" if most is None else f" to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}{upto}")
        return int(text)

    return number


def seconds(least: float, most: float | None = None) -> Callable[[str], float]:
    """Return an argparse type: a finite number of seconds within these bounds, also a fraction."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = -1.0
        if not least <= found < math.inf or (most is not None and found > most):
            bounds = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds {bounds}")
        return found

    return number


def accepted_by(parser: str, *before: str) -> Callable[[str], str]:
    """Return an argparse type: an unchanged text that one of our functions accepts.

    Args:
        parser: ``module:function`` or ``module:Class.method``, imported once there is a text. It raises PenstockError
            for an invalid text.
        before: The function's arguments before the text.
    """

    def text_itself(text: str) -> str:
        module, _, name = parser.partition(":")
        try:
            operator.attrgetter(name)(importlib.import_module(module))(*before, text)
        except PenstockError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return text_itself


STREAM_NAME = accepted_by("penstock_common.stream.keys:checked_name", "stream")
GROUP_NAME = accepted_by("penstock_common.stream.keys:checked_name", "group")
IMPORT_NAME = accepted_by("penstock_producer.sources.names:split_name")
SERVER_URL = accepted_by("penstock_common.server.connection:check_url")
POLICY = accepted_by("penstock_producer.write.retention:parse_policy")
PAYLOAD = accepted_by("penstock_common.segments.folder:parse_payload")
DURABILITY = accepted_by("penstock_common.stream.servers.durability:Durability.parse")
COMPRESSION = accepted_by("penstock_common.wire.compression:Compression.parse")
EPOCH_NUMBER = whole_number(0)
PORT = whole_number(0, 65535)


def byte_size(text: str) -> int:
    """Parse ``2gb``, ``500mb``, ``64kb`` (powers of 1024, as in redis.conf) or plain bytes, as an argparse type."""
    number = text.strip().lower().removesuffix("b")
    power = "kmgt".find(number[-1:]) + 1 if number[-1:].isalpha() else 0
    try:
        size = int(float(number[:-1] if power else number) * 1024**power)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 2gb, 500mb or 1048576")
    return size


def budget_size(text: str) -> int:
    """Parse the size of a budget, as an argparse type."""
    size = byte_size(text)
    if size < 1 << 12:  # probably a number whose unit was forgotten
        raise argparse.ArgumentTypeError(
            f"{text!r} is {size:,} bytes, too little to hold a block: give 4kb or more, as in 2gb"
        )
    return size
