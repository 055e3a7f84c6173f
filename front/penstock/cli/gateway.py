"""``penstock gateway``: let browsers and other programs without Redis read and acknowledge as members of groups."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import (
    PORT,
    WrongUsage,
    accepted_by,
    add_json,
    add_url,
    byte_size,
    of_usage,
    require_web,
    seconds,
    url_of,
)
from penstock.cli import whole_number as whole
from penstock.cli.interrupts import end_by_signals
from penstock_common.tuning import LEASE_S

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.gateway.tokens import Grant


DEFAULT_PORT = 8466
GRANT = accepted_by("penstock.gateway.tokens:parse_grant")
ORIGIN = accepted_by("penstock.gateway.limits:parse_origin")


EPILOG = (
    "example:\n  penstock gateway train/resnet\n"
    "  penstock gateway --make-token train/resnet\n"
    "  penstock gateway --tokens tokens.txt --bind 0.0.0.0 --origin https://lab.example.org\n\n"
    'A page reads with load("train", { group: "resnet", url: "ws://localhost:8466", token, batchSize: 64 }).\n'
    "Each client becomes a member of its group, and leaves it when it closes: its batches go to the others.\n"
    "A token opens one group. The gateway speaks no TLS: on a network, a proxy with TLS belongs before it.\n"
    "docs/gateway.md has the steps, docs/gateway-messages.md the messages.\n\n"
    "exit codes: 0 ended by Ctrl-C, SIGTERM or SIGHUP, 1 no free port or no file of tokens, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument(
        "grant", nargs="*", type=GRANT, metavar="STREAM/GROUP", help="open it with a token that is made and printed now"
    )
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help="lines of STREAM/GROUP TOKEN (default: PENSTOCK_GATEWAY_TOKENS)"
    )
    parser.add_argument(
        "--make-token", type=GRANT, metavar="STREAM/GROUP", help="print a line for such a file, and end"
    )
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1; 0.0.0.0 for all")
    parser.add_argument("--port", type=PORT, default=DEFAULT_PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    parser.add_argument(
        "--origin",
        action="append",
        type=ORIGIN,
        default=[],
        metavar="URL",
        help="pages of this origin may connect; may be repeated (default: pages of this host's own address)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--members", type=whole(1, 4096), default=64, metavar="N", help="at once (default: 64)")
    limits.add_argument(
        "--per-token", type=whole(1, 4096), default=32, metavar="N", help="members of one token (default: 32)"
    )
    limits.add_argument(
        "--rate", type=whole(1), default=200, metavar="N", help="messages a second of one client (default: 200)"
    )
    limits.add_argument(
        "--batch-bytes", type=byte_size, default="64mb", metavar="SIZE", help="the largest batch (default: 64mb)"
    )
    limits.add_argument(
        "--ahead", type=byte_size, default="8mb", metavar="SIZE", help="read ahead for each member (default: 8mb)"
    )
    limits.add_argument(
        "--lease",
        type=seconds(1, 3600),
        default=LEASE_S,
        metavar="SECONDS",
        help="after which others take the batches of a client that is silent (default: %(default)g)",
    )
    add_url(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP, or make a token."""
    from penstock.gateway.tokens import new_token

    if args.make_token is not None:
        token = new_token()
        stream, _, group = args.make_token.partition("/")
        value = {"stream": stream, "group": group, "token": token}
        console.answer(value, f"{args.make_token} {token}", as_json=args.json)
        return 0
    require_web("penstock gateway")
    end_by_signals()
    return _serve(args, console)


def _serve(args: argparse.Namespace, console: Console) -> int:
    from penstock.gateway.app import Gateway
    from penstock.gateway.limits import LOCAL_HOSTS, Limits, OriginCheck
    from penstock.gateway.serve import address_of, bound, serve
    from penstock.gateway.server_report import report_server
    from penstock.gateway.tokens import Tokens, new_token, parse_grant

    given = _given(args, console)
    is_local = args.bind in LOCAL_HOSTS
    if not given and not is_local:
        raise WrongUsage(
            f"--bind {args.bind} lets other hosts in, so it needs tokens that you made: `penstock gateway --make-token "
            "STREAM/GROUP >> tokens.txt`, then --tokens tokens.txt; and a proxy with TLS before it"
        )
    made = [(parse_grant(text), new_token()) for text in dict.fromkeys(args.grant)]
    if not given and not made:
        raise WrongUsage("no group is named: type `penstock gateway train/resnet`, or give --tokens FILE")
    limits = Limits(
        members=args.members,
        members_per_token=args.per_token,
        messages_per_s=args.rate,
        batch_bytes=args.batch_bytes,
        buffer_bytes=args.ahead,
        lease_s=args.lease,
    )
    tokens = Tokens([*given, *made])
    origins = OriginCheck(args.origin, allows_local=is_local)
    gateway = Gateway(url_of(args), tokens, origins, limits, console.notice)
    with bound(args.bind, args.port, args.lease) as listening:
        address = address_of(listening, args.bind)
        _announce(args, console, address.replace("http", "ws", 1), made, tokens.grants)
        report_server(url_of(args), tokens.grants, console.notice)
        serve(gateway.app(), listening, args.lease)
    return 0


def _given(args: argparse.Namespace, console: Console) -> list[tuple[Grant, str]]:
    """Return the tokens of the file, or of the environment."""
    from penstock.gateway.tokens import parse_tokens
    from penstock_common.errors import PenstockError
    from penstock_common.settings import Settings

    if args.tokens is None:
        text = Settings.from_environment().gateway_tokens
        return parse_tokens(text, "PENSTOCK_GATEWAY_TOKENS") if text else []
    try:
        text = args.tokens.read_text(encoding="utf-8")
        if args.tokens.stat().st_mode & 0o077:
            console.notice(f"penstock: other users may read {args.tokens}: chmod 600 {args.tokens}")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PenstockError(f"the tokens in {args.tokens} cannot be read: {why}") from None
    with of_usage():
        return parse_tokens(text, str(args.tokens))


def _announce(
    args: argparse.Namespace, console: Console, address: str, made: list[tuple[Grant, str]], grants: list[Grant]
) -> None:
    """Print where clients connect, and the tokens that were made for this run."""
    if args.json:
        tokens = [{"stream": grant.stream, "group": grant.group, "token": token} for grant, token in made]
        console.json({"url": address, "groups": [str(grant) for grant in grants], "tokens": tokens})
        return
    console.line(f"gateway at {address} for {', '.join(map(str, grants))}; Ctrl-C ends it")
    for grant, token in made:
        console.line(f"  the token of {grant}, for this run: {token}")
