"""The demo's closing words: a table of the models, the audit, a look inside; or all of it as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.demo.session import Outcome

if TYPE_CHECKING:
    from penstock.cli.console import Console

GOAL = 0.95
"""Held-out accuracy that both models reach on all digits in three epochs."""


def failures(outcome: Outcome, *, needs_goal: bool) -> list[str]:
    """What is not as it should be, one line each."""
    audit, found = outcome.audit, []
    planned = outcome.folders.train_count * outcome.epochs
    if not audit.is_clean:
        found += audit.findings or [audit.verdict]
    if audit.produced + audit.bad != planned:
        found.append(f"{audit.produced + audit.bad} of {planned} samples were produced")
    for one in outcome.trainers:
        delivered = audit.delivered.get(one.task.group, 0)
        if delivered != audit.produced:
            found.append(f"group {one.task.group!r} acknowledged {delivered} of {audit.produced} samples")
        accuracy = one.results["trained"]["accuracy"]
        if needs_goal and accuracy < GOAL:
            found.append(f"model {one.task.model!r} has a held-out accuracy of {accuracy:.3f}, below {GOAL}")
    return found


def tell(outcome: Outcome, console: Console, wrong: list[str]) -> None:
    """For people."""
    summary, audit = outcome.summary, outcome.audit
    rate = summary.samples / max(summary.seconds, 1e-9)
    pids = ", ".join(map(str, outcome.worker_pids))
    console.line()
    console.line(console.style("What came of it", "bold"))
    console.line(f"  workers (processes {pids}) made {summary.samples:,} samples at {rate:,.0f} a second")
    console.line()
    console.table([_row(one) for one in outcome.trainers], head=_HEAD)
    console.line()
    console.line("  waited: the part of its time that a model spent waiting for its next batch.")
    console.line("  alone: without Penstock, each model's process decoding and augmenting for itself, both at once.")
    console.line()
    console.line(console.style("Audit", "bold") + " (counted from the stream and each group's ledger)")
    console.line(
        f"  produced   {audit.produced:,} samples in {outcome.epochs} epochs" + (f", {audit.bad} bad" * bool(audit.bad))
    )
    for group, count in audit.delivered.items():
        console.line(f"  delivered  {count:,} to group {group!r}, each acknowledged after it was trained on")
    console.line(f"  lost {audit.lost}, duplicate {audit.duplicate}, pending {audit.pending}")
    console.line()
    _tell_look(outcome, console)
    console.line()
    for line in wrong:
        console.line(console.style(f"NOT GOOD: {line}", "red"))
    if not wrong:
        good = console.style(f"All good, in {outcome.seconds:.0f} s.", "green")
        console.line(f"{good} Next, with your own images and your own training script:")
        console.line("  penstock run images DIR -- python train.py")


_HEAD = ("model", "held-out accuracy", "samples/s", "waited", "alone: samples/s", "alone: waited")


def _row(trainer: Any) -> tuple[object, ...]:
    trained, alone = trainer.results["trained"], trainer.results["compared"]
    return (
        trainer.task.model,
        f"{trained['accuracy']:.3f}",
        round(trained["rate"]),
        f"{trained['waited']:.0%}",
        round(alone["rate"]),
        f"{alone['waited']:.0%}",
    )


def _tell_look(outcome: Outcome, console: Console) -> None:
    console.line(
        console.style("Look inside", "bold") + " while it runs, from any shell: who reads, what is pending, how far"
    )
    console.line(f"  $ {outcome.look_command}")
    if outcome.look_output is None:
        console.line("  (there is no redis-cli here to show what it prints)")
        return
    for line in outcome.look_output.splitlines():
        console.line(f"  {line}")
    console.line("  (_last is Penstock's own bookmark, the others are the two models)")


def as_json(outcome: Outcome, wrong: list[str]) -> dict[str, Any]:
    """For programs."""
    audit = outcome.audit
    return {
        "ok": not wrong,
        "failures": wrong,
        "trainer": outcome.trainer,
        "seconds": round(outcome.seconds, 1),
        "samples": outcome.folders.train_count,
        "held_out": outcome.folders.held_out_count,
        "epochs": outcome.epochs,
        "worker_pids": list(outcome.worker_pids),
        "trainer_pids": [one.pid for one in outcome.trainers],
        "produced_per_s": round(outcome.summary.samples / max(outcome.summary.seconds, 1e-9), 1),
        "models": {one.task.model: {"group": one.task.group, **_numbers(one)} for one in outcome.trainers},
        "audit": {
            "produced": audit.produced,
            "bad": audit.bad,
            "delivered": audit.delivered,
            "lost": audit.lost,
            "duplicate": audit.duplicate,
            "pending": audit.pending,
            "clean": audit.is_clean,
        },
        "look_inside": {"command": outcome.look_command, "output": outcome.look_output},
    }


def _numbers(trainer: Any) -> dict[str, float]:
    trained, alone = trainer.results["trained"], trainer.results["compared"]
    return {
        "accuracy": round(trained["accuracy"], 4),
        "samples_per_s": round(trained["rate"], 1),
        "waited": round(trained["waited"], 3),
        "alone_samples_per_s": round(alone["rate"], 1),
        "alone_waited": round(alone["waited"], 3),
    }
