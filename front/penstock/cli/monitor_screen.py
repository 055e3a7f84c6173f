"""The blocks of ``penstock monitor``: one for each stream, from the records of ``views.monitor``.

Rich draws a block as a panel on the terminal. Elsewhere it is plain lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.console import Bar, Styled, TextTable
from penstock.cli.interrupts import QUIT_KEY, quit_key
from penstock.views.servers import HEAD, server_row
from penstock_common.errors import ServerUnavailable
from penstock_common.printable import printable, printable_values, readable_bytes

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType

    from penstock.cli.console import Console

BAR, SHORT_BAR = 24, 12
NARROW, SLIM = 100, 76
"""Columns. A terminal has 80 unless its user made it wider. Half of a split screen has 60, where less important columns
are left out.
"""
EPOCHS_SHOWN = 6
GOOD = ("balanced", "done")
BAD = ("deletion", "writes refused", "memory", "folder", "dead member", "open epoch", "absent group", "unacknowledged")
NO_STREAMS = "no streams yet: start a producer (`penstock produce`, or penstock.Writer)"

Records = list[dict[str, Any]]
Part = str | Styled | TextTable


def print_streams(records: Records, console: Console) -> None:
    """Print a block for each stream."""
    if console.terminal is not None:
        console.draw(drawn(records, console.terminal.width))
        return
    for number, record in enumerate(printable_values(records)):
        if number:
            console.line()
        console.line(_title(record))
        for part in _parts(record, NARROW):
            if isinstance(part, TextTable):
                console.show(part)
            else:
                console.line(part)
    if not records:
        console.line(NO_STREAMS)


def follow(looks: Iterator[Records], console: Console) -> None:
    """Show each look until a key, a signal or the server ends it. Without rich, each look is printed below the last."""
    if console.terminal is not None:
        _redraw(looks, console.terminal)
        return
    with quit_key(lambda is_shown: None):
        for records in looks:
            print_streams(records, console)
            console.line()


def _redraw(looks: Iterator[Records], terminal: Terminal) -> None:
    """Draw each look in place of the one before. If the server goes away, a line below says so."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with quit_key(terminal.show_cursor) as has_key, Live(console=terminal, auto_refresh=False, screen=False) as live:
        shown: RenderableType = Text("looking")
        last = Text(f"{QUIT_KEY} ends it" if has_key else "Ctrl-C ends it", style="dim")
        try:
            for records in looks:
                shown = Group(drawn(records, terminal.width), last)
                live.update(shown, refresh=True)
        except ServerUnavailable as failure:
            why = Text(printable(" ".join(str(failure).split())), style="red")
            live.update(Group(shown, why), refresh=True)
            raise


def drawn(records: Records, width: int) -> RenderableType:
    """Return panels of all streams for a terminal of this width."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    def drawn_part(part: Part) -> RenderableType:
        if isinstance(part, TextTable):
            return part.drawn()
        return Text(part) if isinstance(part, str) else Text(*part)

    if not records:
        return Text(NO_STREAMS)
    return Group(*[
        Panel(Group(*map(drawn_part, _parts(record, width))), title=Text(*_title(record)), title_align="left")
        for record in printable_values(records)
    ])  # fmt: skip


def _title(record: dict[str, Any]) -> Styled:
    return f"stream {record['stream']}", "bold"


def _parts(record: dict[str, Any], width: int) -> list[Part]:
    """Return the lines and tables of a stream for a terminal of this width."""
    if "error" in record:
        return [(record["error"], "red")]
    bar, is_slim = SHORT_BAR if width < NARROW else BAR, width < SLIM
    cause = record["bottleneck"]["cause"]
    style = "green" if cause in GOOD else "red" if cause in BAD else "yellow"
    parts: list[Part] = [*_top(record, bar, is_slim), (record["bottleneck"]["text"], f"bold {style}")]
    if record["bottleneck"]["remedy"]:
        parts.append((f"  {record['bottleneck']['remedy']}", "dim"))
    if record["epochs"]:
        parts += ["", _epochs(record["epochs"], bar, is_slim)]
    if record["groups"]:
        parts += ["", _groups(record["groups"], is_slim)]
        if any(group["members"] for group in record["groups"]):
            parts += ["", _members(record["groups"], is_slim)]
    if record["workers"] or record["silent_workers"]:
        parts += ["", _workers(record["workers"], record["silent_workers"])]
    if record["servers"]:
        table = TextTable(HEAD, list(map(server_row, record["servers"])), wrapped=("server", "partitions"))
        parts += ["", table.without(("replicas", "replica lag")) if is_slim else table]
    return parts


def _top(record: dict[str, Any], bar: int, is_slim: bool) -> list[Part]:
    used, budget, server = record["held_bytes"], record["budget_bytes"], record["server"]
    limit = f" of {readable_bytes(server['limit_bytes'])}" if server["limit_bytes"] else ""
    memory = f"server {readable_bytes(server['used_bytes'])}{limit}"
    held = f"{readable_bytes(used)} of {readable_bytes(budget)}"
    row = ["budget", Bar(min(used, budget), max(1, budget), bar), held, *([] if is_slim else [memory])]
    into = f"in {rate(record['in']['samples_per_s'])} samples, {size_rate(record['in']['bytes_per_s'])}"
    return [TextTable([""] * len(row), [row]), *([memory] if is_slim else []), into]


def _epochs(epochs: list[dict[str, Any]], bar: int, is_slim: bool) -> TextTable:
    """Return a table of the newest epochs, with a bar for the samples that are made."""
    rows: list[Sequence[object]] = []
    if len(epochs) > EPOCHS_SHOWN:
        rows.append(("...", f"{len(epochs) - EPOCHS_SHOWN} more", "", "", "", "", ""))
    for epoch in epochs[-EPOCHS_SHOWN:]:
        planned, made = epoch["planned"], epoch["committed"]
        whole = max(1, planned or made)
        part = f"{100 * made // whole}%" if planned else f"{made}" if is_slim else ""
        bad = epoch["bad"]  # nobody reads a bad sample, and it counts as read
        good = max(1, made - bad)
        read = ", ".join(f"{name} {100 * max(0, count - bad) // good}%" for name, count in epoch["read"].items())
        count = f"{made} of {'?' if planned is None else planned}"
        rows.append((epoch["epoch"], epoch["state"], Bar(made, whole, bar), part, count, epoch["bad"], read))
    head = ("epoch", "state", "", "made", "samples", "bad", "read by")
    table = TextTable(head, rows, numbers=("epoch", "bad"), wrapped=("read by",))
    return table.without(("", "samples")) if is_slim else table


def _groups(groups: list[dict[str, Any]], is_slim: bool) -> TextTable:
    rows: list[Sequence[object]] = []
    for group in groups:
        note = "" if group["holds"] else "left: holds no data"
        if not group["members"] and group["holds"]:
            note = "declared, nobody reads" if group["declared"] else "nobody reads"
        rows.append((
            group["name"], rate(group["out"]["samples_per_s"]), group["lag_entries"], group["lag_samples"],
            f"{group['lag_s']:.1f}", group["pending_entries"], group["redelivered_entries"], group["bad_entries"],
            (note, "yellow"),
        ))  # fmt: skip
    numbers = ("out", "lag\nentries", "lag\nsamples", "lag\ns", "pending", "given\nagain", "bad")
    table = TextTable(("group", *numbers, ""), rows, numbers, wrapped=("group", ""))
    return table.without(("lag\nentries", "given\nagain")) if is_slim else table


def _members(groups: list[dict[str, Any]], is_slim: bool) -> TextTable:
    rows: list[Sequence[object]] = []
    for group in groups:
        for member in group["members"]:
            is_returned = member["name"].startswith("~")
            if is_returned and not member["pending_entries"]:
                continue
            seen = "" if is_returned else "gone" if member["seen_s"] is None else f"{member['seen_s']:.0f} s"
            waits = "" if member["waits"] is None else f"{100 * member['waits']:.0f}%"
            rows.append((
                group["name"], "(returned)" if is_returned else member["name"], seen, member["pending_entries"],
                "" if member["rate"] is None else rate(member["rate"]), waits,
                ("silent" if member["is_silent"] else "", "red"),
            ))  # fmt: skip
    numbers = ("last\nseen", "pending", "would take", "waits")
    table = TextTable(("group", "member", *numbers, ""), rows, numbers, wrapped=("group", "member"))
    return table.without(("would take",)) if is_slim else table


def _workers(hosts: list[dict[str, Any]], silent: list[dict[str, Any]]) -> TextTable:
    rows: list[Sequence[object]] = [
        (
            host["host"], host["workers"], rate(host["samples_per_s"]),
            *(f"{100 * host[kind]:.0f}%" for kind in ("busy", "room", "idle")),
        )
        for host in hosts
    ]  # fmt: skip
    rows += [
        ((f"{host['host']}: silent for {host['seen_s']:.0f} s", "red"), host["workers"], "", "", "", "")
        for host in silent
    ]
    numbers = ("workers", "rate", "busy", "wait\nfor space", "idle")
    return TextTable(("host", *numbers), rows, numbers, wrapped=("host",))


def rate(value: float | None) -> str:
    """Return samples a second as text."""
    return "?" if value is None else f"{value:,.0f}/s" if value >= 10 or not value else f"{value:.1f}/s"


def size_rate(value: float | None) -> str:
    """Return bytes a second as text."""
    return "?" if value is None else f"{value / 1e6:,.1f} MB/s"
