"""What ``penstock monitor`` draws: one panel for each stream, from the records of ``watching.rates``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TextIO

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
NARROW = 100
"""Columns; a terminal has 80 unless somebody made it wider."""
EPOCHS_SHOWN = 6
GOOD = ("balanced", "done")
BAD = ("memory", "folder", "dead member", "absent group", "unacknowledged")

Records = list[dict[str, Any]]


class Screen:
    """One terminal, or whatever stands in for it. NO_COLOR is obeyed."""

    def __init__(self, out: TextIO) -> None:
        from penstock_common.settings import Settings

        self._terminal = Terminal(
            file=out, no_color=Settings.from_environment().no_color or not out.isatty(), highlight=False, markup=False
        )

    def print(self, records: Records) -> None:
        """One screen."""
        self._terminal.print(drawn(records, self._terminal.width))

    def follow(self, looks: Iterator[Records]) -> None:
        """Each look in place of the one before. While the server is away it says so, and the last look stays."""
        with Live(console=self._terminal, auto_refresh=False, screen=False) as live:
            shown: RenderableType = Text("looking")
            while True:
                try:
                    shown = drawn(next(looks), self._terminal.width)
                    live.update(shown, refresh=True)
                except ServerUnavailable as failure:
                    live.update(
                        Group(shown, Text(printable(" ".join(str(failure).split())), style="red")), refresh=True
                    )
                    raise
                except StopIteration:
                    return


def drawn(records: Records, width: int) -> RenderableType:
    """All of it, for so many columns."""
    if not records:
        return Text("no streams yet: start a producer (`penstock produce`, or penstock.Writer)")
    bar = SHORT_BAR if width < NARROW else BAR
    return Group(*[_panel(record, bar) for record in printable_values(records)])


def _panel(record: dict[str, Any], bar: int) -> RenderableType:
    title = Text(f"stream {record['stream']}", style="bold")
    if "error" in record:
        return Panel(Text(record["error"], style="red"), title=title, title_align="left")
    cause = record["bottleneck"]["cause"]
    style = "green" if cause in GOOD else "red" if cause in BAD else "yellow"
    sentence = Text(record["bottleneck"]["text"], style=f"bold {style}")
    parts: list[RenderableType] = [_top(record, bar), sentence]
    if record["bottleneck"]["remedy"]:
        parts.append(Text(f"  {record['bottleneck']['remedy']}", style="dim"))
    if record["epochs"]:
        parts += [Text(), _epochs(record, bar)]
    if record["groups"]:
        parts += [Text(), _groups(record["groups"])]
        if any(group["members"] for group in record["groups"]):
            parts += [Text(), _members(record["groups"])]
    if record["workers"]:
        parts += [Text(), _workers(record["workers"])]
    return Panel(Group(*parts), title=title, title_align="left")


def _top(record: dict[str, Any], bar: int) -> RenderableType:
    used, budget = record["held_bytes"], record["budget_bytes"]
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text("budget"),
        ProgressBar(total=max(1, budget), completed=min(used, budget), width=bar),
        Text(f"{readable_bytes(used)} of {readable_bytes(budget)}"),
        Text(_server(record["server"])),
    )
    into = f"in {rate(record['in']['samples_per_s'])} samples, {size_rate(record['in']['bytes_per_s'])}"
    return Group(row, Text(into))


def _server(server: dict[str, int]) -> str:
    limit = f" of {readable_bytes(server['limit_bytes'])}" if server["limit_bytes"] else ""
    return f"server {readable_bytes(server['used_bytes'])}{limit}"


def _table(*heads: str, numbers: Iterable[str] = (), words: Iterable[str] = ()) -> Table:
    """Columns of ``words`` give way where it is narrow: over several lines, never cut off."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for head in heads:
        is_number, is_wrapped = head in set(numbers), head in set(words)
        table.add_column(
            head, justify="right" if is_number else "left", no_wrap=not is_wrapped, overflow="fold", vertical="top"
        )
    return table


def _epochs(record: dict[str, Any], bar: int) -> RenderableType:
    """The newest ones; a bar for what is made, and one for each group that has not read all of it."""
    table = _table(
        "epoch", "state", "made", "", "samples", "bad", "read by", numbers=("epoch", "bad"), words=("read by",)
    )
    epochs = record["epochs"]
    if len(epochs) > EPOCHS_SHOWN:
        table.add_row("...", f"{len(epochs) - EPOCHS_SHOWN} more", "", "", "", "", "")
    for epoch in epochs[-EPOCHS_SHOWN:]:
        planned, made = epoch["planned"], epoch["committed"]
        whole = max(1, planned or made)
        read = ", ".join(f"{name} {100 * count // max(1, made)}%" for name, count in epoch["read"].items())
        table.add_row(
            str(epoch["epoch"]), epoch["state"],
            ProgressBar(total=whole, completed=made, width=bar), f"{100 * made // whole}%" if planned else "",
            f"{made} of {'?' if planned is None else planned}", str(epoch["bad"]), read,
        )  # fmt: skip
    return table


def _groups(groups: list[dict[str, Any]]) -> RenderableType:
    heads = ("out", "lag\nentries", "lag\nsamples", "lag\ns", "pending", "given\nagain", "bad")
    table = _table("group", *heads, "", numbers=heads, words=("group", ""))
    for group in groups:
        note = "" if group["holds"] else "left: holds no data"
        if not group["members"] and group["holds"]:
            note = "declared, nobody reads" if group["declared"] else "nobody reads"
        table.add_row(
            group["name"], rate(group["out"]["samples_per_s"]), str(group["lag_entries"]), str(group["lag_samples"]),
            f"{group['lag_s']:.1f}", str(group["pending_entries"]), str(group["redelivered_entries"]),
            str(group["bad_entries"]), Text(note, style="yellow"),
        )  # fmt: skip
    return table


def _members(groups: list[dict[str, Any]]) -> RenderableType:
    heads = ("last seen", "pending", "would take", "waits")
    table = _table("group", "member", *heads, "", numbers=heads, words=("group", "member"))
    for group in groups:
        for member in group["members"]:
            handed_back = member["name"].startswith("~")
            if handed_back and not member["pending_entries"]:
                continue
            seen = "" if handed_back else "gone" if member["seen_s"] is None else f"{member['seen_s']:.0f} s"
            waits = "" if member["waits"] is None else f"{100 * member['waits']:.0f}%"
            table.add_row(
                group["name"], "(handed back)" if handed_back else member["name"], seen,
                str(member["pending_entries"]), "" if member["rate"] is None else rate(member["rate"]), waits,
                Text("silent" if member["is_silent"] else "", style="red"),
            )  # fmt: skip
    return table


def _workers(hosts: list[dict[str, Any]]) -> RenderableType:
    heads = ("workers", "rate", "busy", "wait for room", "idle")
    table = _table("host", *heads, numbers=heads, words=("host",))
    for host in hosts:
        shares = [f"{100 * host[kind]:.0f}%" for kind in ("busy", "room", "idle")]
        table.add_row(host["host"], str(host["workers"]), rate(host["samples_per_s"]), *shares)
    return table


def rate(value: float | None) -> str:
    """Samples a second."""
    return "?" if value is None else f"{value:,.0f}/s" if value >= 10 or not value else f"{value:.1f}/s"


def size_rate(value: float | None) -> str:
    """Bytes a second."""
    return "?" if value is None else f"{value / 1e6:,.1f} MB/s"
