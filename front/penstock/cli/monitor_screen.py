"""The screen of ``penstock monitor``: one panel for each stream, from the records of ``watching.rates``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, TextIO

from penstock.cli.interrupts import QUIT_KEY, quit_key
from penstock_common.errors import ServerUnavailable
from penstock_common.extras import needed
from penstock_common.printable import printable, printable_values
from penstock_common.stream.servers.suitability import readable_bytes

with needed("rich", "the screen of penstock monitor", "--json works without"):
    from rich.console import Console as Terminal
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

BAR, SHORT_BAR = 24, 12
NARROW, SLIM = 100, 76
"""Columns. A terminal has 80 unless its user made it wider. Half of a split screen has 60, where less important columns
are left out.
"""
EPOCHS_SHOWN = 6
GOOD = ("balanced", "done")
BAD = ("memory", "folder", "dead member", "absent group", "unacknowledged")

Records = list[dict[str, Any]]


class MonitorScreen:
    """A terminal, or a file instead of it. It obeys NO_COLOR."""

    def __init__(self, out: TextIO) -> None:
        from penstock_common.settings import Settings

        self._out = out
        self._terminal = Terminal(
            file=out, no_color=Settings.from_environment().no_color or not out.isatty(), highlight=False, markup=False
        )

    def print(self, records: Records) -> None:
        """Print one screen."""
        self._terminal.print(drawn(records, self._terminal.width))

    def follow(self, looks: Iterator[Records]) -> None:
        """Draw each record in place of the one before. If the server goes away, a line below says so."""
        with (
            quit_key(self._out) as has_key,
            Live(console=self._terminal, auto_refresh=False, screen=False) as live,
        ):
            shown: RenderableType = Text("looking")
            last = Text(f"{QUIT_KEY} ends it" if has_key else "Ctrl-C ends it", style="dim")
            while True:
                try:
                    shown = Group(drawn(next(looks), self._terminal.width), last)
                    live.update(shown, refresh=True)
                except ServerUnavailable as failure:
                    live.update(
                        Group(shown, Text(printable(" ".join(str(failure).split())), style="red")), refresh=True
                    )
                    raise
                except StopIteration:
                    return


def drawn(records: Records, width: int) -> RenderableType:
    """Return panels of all streams for a terminal of this width."""
    if not records:
        return Text("no streams yet: start a producer (`penstock produce`, or penstock.Writer)")
    return Group(*[_panel(record, width) for record in printable_values(records)])


def _panel(record: dict[str, Any], width: int) -> RenderableType:
    title = Text(f"stream {record['stream']}", style="bold")
    if "error" in record:
        return Panel(Text(record["error"], style="red"), title=title, title_align="left")
    cause = record["bottleneck"]["cause"]
    style = "green" if cause in GOOD else "red" if cause in BAD else "yellow"
    sentence = Text(record["bottleneck"]["text"], style=f"bold {style}")
    bar, is_slim = SHORT_BAR if width < NARROW else BAR, width < SLIM
    parts: list[RenderableType] = [_top(record, bar, is_slim), sentence]
    if record["bottleneck"]["remedy"]:
        parts.append(Text(f"  {record['bottleneck']['remedy']}", style="dim"))
    if record["epochs"]:
        parts += [Text(), _epochs(record, bar, is_slim)]
    if record["groups"]:
        parts += [Text(), _groups(record["groups"], is_slim)]
        if any(group["members"] for group in record["groups"]):
            parts += [Text(), _members(record["groups"], is_slim)]
    if record["workers"] or record["silent_workers"]:
        parts += [Text(), _workers(record["workers"], record["silent_workers"])]
    return Panel(Group(*parts), title=title, title_align="left")


def _top(record: dict[str, Any], bar: int, is_slim: bool) -> RenderableType:
    used, budget = record["held_bytes"], record["budget_bytes"]
    row = Table.grid(padding=(0, 2))
    server = Text(_server(record["server"]))
    row.add_row(
        Text("budget"),
        ProgressBar(total=max(1, budget), completed=min(used, budget), width=bar),
        Text(f"{readable_bytes(used)} of {readable_bytes(budget)}"),
        *([] if is_slim else [server]),
    )
    into = f"in {rate(record['in']['samples_per_s'])} samples, {size_rate(record['in']['bytes_per_s'])}"
    return Group(row, *([server] if is_slim else []), Text(into))


def _server(server: dict[str, int]) -> str:
    limit = f" of {readable_bytes(server['limit_bytes'])}" if server["limit_bytes"] else ""
    return f"server {readable_bytes(server['used_bytes'])}{limit}"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, numbers: Iterable[str] = (),
    words: Iterable[str] = (), spare: Iterable[str] = (),
) -> Table:  # fmt: skip
    """Return a table without the columns of ``spare``.

    In a narrow terminal, columns of ``words`` wrap over several lines, and are never cut off.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    kept = [head not in set(spare) for head in heads]
    for head in compress(heads, kept):
        is_number, is_wrapped = head in set(numbers), head in set(words)
        table.add_column(
            head, justify="right" if is_number else "left", no_wrap=not is_wrapped, overflow="fold", vertical="top"
        )
    for row in rows:
        table.add_row(*compress(row, kept))
    return table


def _epochs(record: dict[str, Any], bar: int, is_slim: bool) -> RenderableType:
    """Return a table of the newest epochs, with a bar for the samples that are made."""
    heads = ("epoch", "state", "made", "", "samples", "bad", "read by")
    rows: list[list[RenderableType]] = []
    epochs = record["epochs"]
    if len(epochs) > EPOCHS_SHOWN:
        rows.append(["...", f"{len(epochs) - EPOCHS_SHOWN} more", "", "", "", "", ""])
    for epoch in epochs[-EPOCHS_SHOWN:]:
        planned, made = epoch["planned"], epoch["committed"]
        whole = max(1, planned or made)
        part = f"{100 * made // whole}%" if planned else f"{made}" if is_slim else ""
        read = ", ".join(f"{name} {100 * count // max(1, made)}%" for name, count in epoch["read"].items())
        rows.append([
            str(epoch["epoch"]), epoch["state"], ProgressBar(total=whole, completed=made, width=bar), part,
            f"{made} of {'?' if planned is None else planned}", str(epoch["bad"]), read,
        ])  # fmt: skip
    spare = ("made", "samples") if is_slim else ()
    return _table(heads, rows, numbers=("epoch", "bad"), words=("read by",), spare=spare)


def _groups(groups: list[dict[str, Any]], is_slim: bool) -> RenderableType:
    heads = ("out", "lag\nentries", "lag\nsamples", "lag\ns", "pending", "given\nagain", "bad")
    rows: list[list[RenderableType]] = []
    for group in groups:
        note = "" if group["holds"] else "left: holds no data"
        if not group["members"] and group["holds"]:
            note = "declared, nobody reads" if group["declared"] else "nobody reads"
        rows.append([
            group["name"], rate(group["out"]["samples_per_s"]), str(group["lag_entries"]), str(group["lag_samples"]),
            f"{group['lag_s']:.1f}", str(group["pending_entries"]), str(group["redelivered_entries"]),
            str(group["bad_entries"]), Text(note, style="yellow"),
        ])  # fmt: skip
    spare = ("lag\nentries", "given\nagain") if is_slim else ()
    return _table(("group", *heads, ""), rows, numbers=heads, words=("group", ""), spare=spare)


def _members(groups: list[dict[str, Any]], is_slim: bool) -> RenderableType:
    heads = ("last\nseen", "pending", "would take", "waits")
    rows: list[list[RenderableType]] = []
    for group in groups:
        for member in group["members"]:
            handed_back = member["name"].startswith("~")
            if handed_back and not member["pending_entries"]:
                continue
            seen = "" if handed_back else "gone" if member["seen_s"] is None else f"{member['seen_s']:.0f} s"
            waits = "" if member["waits"] is None else f"{100 * member['waits']:.0f}%"
            rows.append([
                group["name"], "(handed back)" if handed_back else member["name"], seen,
                str(member["pending_entries"]), "" if member["rate"] is None else rate(member["rate"]), waits,
                Text("silent" if member["is_silent"] else "", style="red"),
            ])  # fmt: skip
    spare = ("would take",) if is_slim else ()
    return _table(("group", "member", *heads, ""), rows, numbers=heads, words=("group", "member"), spare=spare)


def _workers(hosts: list[dict[str, Any]], silent: list[dict[str, Any]]) -> RenderableType:
    heads = ("workers", "rate", "busy", "wait\nfor room", "idle")
    rows: list[list[RenderableType]] = [
        [
            host["host"], str(host["workers"]), rate(host["samples_per_s"]),
            *(f"{100 * host[kind]:.0f}%" for kind in ("busy", "room", "idle")),
        ]
        for host in hosts
    ]  # fmt: skip
    for host in silent:
        told = Text(f"{host['host']}: silent for {host['seen_s']:.0f} s", style="red")
        rows.append([told, str(host["workers"]), "", "", "", ""])
    return _table(("host", *heads), rows, numbers=heads, words=("host",))


def rate(value: float | None) -> str:
    """Return samples a second as text."""
    return "?" if value is None else f"{value:,.0f}/s" if value >= 10 or not value else f"{value:.1f}/s"


def size_rate(value: float | None) -> str:
    """Return bytes a second as text."""
    return "?" if value is None else f"{value / 1e6:,.1f} MB/s"
