"""The ``penstock`` command: finds the named command, runs it, and turns its end into an exit code.

Exit codes: 0 done, 1 a PenstockError (one line on stderr), 2 wrong usage, 130 Ctrl-C, 141 a closed pipe.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli import COMMANDS, WrongUsage, load_command, parser_of
from penstock.cli.console import Console
from penstock_common.errors import PenstockError
from penstock_common.waiting import to_stderr

_OTHER_NAMES = {"train": "run", "start": "run", "list": "inspect", "ls": "inspect", "status": "inspect"} | {
    "rm": "delete",
    "remove": "delete",
    "watch": "monitor",
}
"""Names that newcomers use for a command -> its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    _prepare_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), Console())
        sys.stdout.flush()
    except BrokenPipeError:  # `penstock ... | head`
        _discard_output()
        return 141
    except OSError as error:
        if error.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            enough = max(1024, 4 * most)
            to_stderr(f"a process may have {most} files open here, and needs more: `ulimit -n {enough}` raises that")
            return 1
        if error.errno != errno.ENOSPC:
            raise
        to_stderr(f"the output cannot be written ({error.strerror})")
        _discard_output()
        return 1
    return code


def _prepare_streams() -> None:
    """Open /dev/null for each standard stream that is closed, and spell out what the encoding of stdout lacks.

    The next file or socket would take the number of a closed stream, and receive what a child process prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - it stays open; the lowest free number
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Let nothing be flushed at exit into an output that takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str], console: Console) -> int:
    try:
        return _dispatch(argv, console)
    except SystemExit as ended:  # argparse: 0 after --help, 2 after a usage error, with its text already printed
        return ended.code if isinstance(ended.code, int) else 2
    except PenstockError as error:
        console.notice(f"penstock: {' '.join(str(error).split())}")
        return 2 if isinstance(error, WrongUsage) else 1
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: list[str], console: Console) -> int:
    name = argv[0] if argv else ""
    if name in COMMANDS:
        code: int = load_command(name).run(parser_of(name).parse_args(argv[1:]), console)
        return code
    if name in ("-V", "--version"):
        import penstock

        console.line(f"penstock {penstock.__version__}")
        return 0
    if name in ("-h", "--help"):
        console.lines(_overview())
        return 0
    if name.startswith("-") and (command_at := _command_at(argv)):
        console.notice(
            f"penstock: {name} is an option of a command, so it follows the command: {_moved(argv, command_at)}"
        )
        return 2
    if name:
        if name.endswith(".py"):
            line = shlex.join(["penstock", "run", "images", "photos/", "--", "python", *argv])
            console.notice(f"penstock: {name!r} is a script, and a command is missing before it: type `{line}`")
            return 2
        asked = f"--{name}"
        if asked in ("--help", "--version"):
            guess = [asked]
        else:
            guess = (
                [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, [*COMMANDS, "-V"], 1)
            )
        hint = f"did you mean {guess[0]!r}?" if guess else "see penstock --help"
        console.notice(f"penstock: unknown command {name!r}; {hint}")
    else:
        console.notices(_overview())
    return 2


def _command_at(argv: Sequence[str]) -> int:
    """Return the position of the command in a line that begins with options, or 0 if there is none."""
    return next((at for at, word in enumerate(argv) if word in COMMANDS), 0)


def _moved(argv: Sequence[str], command_at: int) -> str:
    """Return the line to type instead of one that begins with options.

    Options come last, but before a ``--``.
    """
    rest = list(argv[command_at:])
    end = rest.index("--") if "--" in rest else len(rest)
    return f"type `{shlex.join(['penstock', *rest[:end], *argv[:command_at], *rest[end:]])}`"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: penstock COMMAND ...\n\nFeed training jobs through Redis Streams.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  -h, --help     this text; penstock COMMAND --help tells all of one command\n"
        "  -V, --version  print the version\n\n"
        "example:\n  penstock server --maxmemory 2gb\n\n"
        "exit codes: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C or SIGTERM; docs/commands.md tells more of each"
    )


if __name__ == "__main__":
    sys.exit(main())
