"""Draw the diagrams of the documents: ``python docs/img/diagrams.py``. A test compares the files with what this draws.

Lengths are in pixels. Each picture has a white background, so that it reads the same on light and dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
INK, FAINT, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
BLUE, ORANGE, GREEN, GREY, RED = "#d6e6f7", "#fde4c8", "#d9efdc", "#eef1f4", "#f7d6d6"
"""Fills that differ in lightness, too, for colour-blind eyes."""


class Drawing:
    """An SVG that is built from boxes, labels and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="14">\n<title>{escape(title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n'
        )
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 14, anchor: str = "middle", bold: bool = False
    ) -> None:
        """Write one line whose baseline is at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight} fill="{INK}">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, *lines: str, fill: str = GREY) -> None:
        """Draw a box with lines of text in its middle; the first one is bold if there are several."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{INK}"/>'
        )
        top = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            small = number > 0
            self.text(
                x + width / 2, top + 18 * number, line, size=12 if small else 14, bold=len(lines) > 1 and not small
            )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through the points, with a tip at its end."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"{dash}/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a faint line."""
        self._parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{FAINT}" stroke-dasharray="3 4"/>')

    def svg(self) -> str:
        """Return the file's text."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


def architecture() -> Drawing:
    """Draw the way from files to trainers."""
    drawing = Drawing(
        880, 250, "Workers prepare samples and write them to Redis Streams, and groups of trainers read them."
    )
    for x, head in ((90, "your data"), (285, "worker processes"), (510, "Redis Streams"), (760, "trainers")):
        drawing.text(x, 28, head, bold=True)
    drawing.box(20, 90, 140, 76, "photos/", "folders, archives,", "your own datasets")
    for number in range(3):
        drawing.box(215, 52 + 56 * number, 140, 42, "decode, augment" if number < 2 else "more, on any host", fill=BLUE)
        drawing.arrow((160, 128), (190, 128), (190, 73 + 56 * number), (213, 73 + 56 * number))
        drawing.arrow((355, 73 + 56 * number), (385, 73 + 56 * number), (385, 128), (408, 128))
    for number in range(3):
        drawing.box(410 + 68 * number, 98, 64, 60, f"epoch {number}", fill=ORANGE)
    drawing.text(510, 84, "one stream, a byte budget", size=12)
    drawing.box(670, 52, 180, 62, "group resnet", "two members share them", fill=GREEN)
    drawing.box(670, 142, 180, 62, "group vit", "one member reads all", fill=GREEN)
    drawing.arrow((614, 128), (640, 128), (640, 83), (668, 83))
    drawing.arrow((614, 128), (640, 128), (640, 173), (668, 173))
    drawing.arrow((760, 204), (760, 228), (510, 228), (510, 162), dashed=True)
    drawing.text(640, 222, "acknowledged, sample by sample", size=12)
    return drawing


def groups() -> Drawing:
    """Draw one stream and what two groups have read at three times."""
    drawing = Drawing(
        880, 330, "One stream with two groups at three times: each group reads each epoch at its own pace."
    )
    for number, (head, written, fast, slow) in enumerate(
        (("10:00", 6, 4, 2), ("10:05", 9, 9, 4), ("10:10", 12, 12, 8))
    ):
        top = 40 + 95 * number
        drawing.text(20, top + 26, head, anchor="start", bold=True)
        for block in range(12):
            fill = PAPER if block >= written else GREY if block < min(fast, slow) else ORANGE
            drawing.box(90 + 48 * block, top, 44, 34, str(block) if block < written else "", fill=fill)
        drawing.arrow((90 + 48 * fast - 2, top + 62), (90 + 48 * fast - 2, top + 37))
        drawing.arrow((90 + 48 * slow - 2, top + 62), (90 + 48 * slow - 2, top + 37))
        drawing.text(90 + 48 * fast + 4, top + 60, "resnet", size=12, anchor="start")
        drawing.text(90 + 48 * slow + 4, top + 60, "vit", size=12, anchor="start")
    drawing.text(90 + 48 * 3, 26, "epoch 0", size=12)
    drawing.text(90 + 48 * 9, 26, "epoch 1", size=12)
    drawing.line(90 + 48 * 6 - 2, 16, 90 + 48 * 6 - 2, 316)
    drawing.box(690, 66, 20, 16, fill=ORANGE)
    drawing.text(720, 79, "kept for a group", size=12, anchor="start")
    drawing.box(690, 92, 20, 16, fill=GREY)
    drawing.text(720, 105, "every group is done", size=12, anchor="start")
    drawing.box(690, 118, 20, 16, fill=PAPER)
    drawing.text(720, 131, "not written yet", size=12, anchor="start")
    for number, words in enumerate(("A grey block stays while", "the retention policy", "keeps its epoch.")):
        drawing.text(690, 166 + 18 * number, words, size=12, anchor="start")
    return drawing


def orders() -> Drawing:
    """Draw which member receives which block in shared and in canonical order."""
    drawing = Drawing(
        880, 270, "Shared order: any member takes the next block. Canonical order: each position has its rank."
    )
    for x, head, words in (
        (20, "shared order (default)", "A member takes the next free block. A fast one takes more."),
        (460, "canonical order", "Each position belongs to one rank. All have as many steps."),
    ):
        drawing.text(x, 28, head, anchor="start", bold=True)
        drawing.text(x, 48, words, size=12, anchor="start")
    owners = {20: (0, 0, 1, 0, 0, 1, 0, 0), 460: (0, 1, 0, 1, 0, 1, 0, 1)}
    for left, whose in owners.items():
        for block, owner in enumerate(whose):
            drawing.box(left + 50 * block, 70, 46, 34, str(block), fill=(BLUE, ORANGE)[owner])
        names = ("member a (fast)", "member b (slow)") if left == 20 else ("rank 0", "rank 1")
        for owner, name in enumerate(names):
            x = left + 200 * owner
            drawing.box(x, 150, 190, 40, name, fill=(BLUE, ORANGE)[owner])
            drawing.arrow((x + 95, 106), (x + 95, 148))
            mine = ", ".join(str(block) for block, of in enumerate(whose) if of == owner)
            drawing.text(x + 95, 212, f"reads {mine}", size=12)
    drawing.text(20, 248, "After a crash, another member takes the leases over.", size=12, anchor="start")
    drawing.text(460, 248, "After a crash, the rank resumes at its exact next batch.", size=12, anchor="start")
    return drawing


def crash() -> Drawing:
    """Draw which batches come again after a kill, by policy."""
    drawing = Drawing(
        880,
        270,
        "After a kill in batch 6: on_next repeats batch 6, manual and on_checkpoint repeat what was not acknowledged.",
    )
    for batch in range(9):
        drawing.text(230 + 56 * batch + 26, 30, f"batch {batch}", size=12)
    rows = (
        ("on_next", "the loop asks for the next batch", 6),
        ("manual", "acknowledge() up to batch 3", 4),
        ("on_checkpoint", "the last checkpoint was after batch 2", 3),
    )
    for number, (policy, words, first) in enumerate(rows):
        top = 46 + 62 * number
        drawing.text(20, top + 16, policy, anchor="start", bold=True)
        drawing.text(20, top + 34, words, size=11, anchor="start")
        for batch in range(9):
            fill = GREY if batch < first else RED if batch <= 6 else PAPER
            drawing.box(230 + 56 * batch, top, 52, 38, "again" if fill == RED else "", fill=fill)
    x = 230 + 56 * 6 + 30
    drawing.arrow((x, 252), (x, 226))
    drawing.text(x + 10, 252, "kill -9 in the step of batch 6", size=12, anchor="start")
    drawing.box(750, 46, 20, 16, fill=GREY)
    drawing.text(778, 59, "acknowledged", size=12, anchor="start")
    drawing.box(750, 72, 20, 16, fill=RED)
    drawing.text(778, 85, "comes again", size=12, anchor="start")
    drawing.box(750, 98, 20, 16, fill=PAPER)
    drawing.text(778, 111, "not read yet", size=12, anchor="start")
    return drawing


def modes() -> Drawing:
    """Draw the questions that choose a way of reading."""
    drawing = Drawing(
        880, 300, "Which way of reading fits: Loader in shared order, Loader in canonical order, or Replay."
    )
    drawing.box(20, 30, 240, 60, "Is it a training?", "Nothing may be lost in a crash.")
    drawing.box(20, 180, 240, 60, "Replay", "a second reading, no group", fill=GREEN)
    drawing.arrow((140, 90), (140, 178))
    drawing.text(150, 138, "no: validate, compare, debug", size=12, anchor="start")
    drawing.box(340, 30, 240, 60, "Is the order fixed?", "It repeats, and ranks have equal steps.")
    drawing.arrow((260, 60), (338, 60))
    drawing.text(298, 50, "yes", size=12)
    drawing.box(340, 180, 240, 60, "Loader", "shared order, the default", fill=BLUE)
    drawing.arrow((460, 90), (460, 178))
    drawing.text(470, 138, "no: the fastest way", size=12, anchor="start")
    drawing.box(640, 30, 220, 60, "order=Canonical(...)", "Loader, canonical order", fill=ORANGE)
    drawing.arrow((580, 60), (638, 60))
    drawing.text(608, 50, "yes", size=12)
    drawing.text(640, 120, "DDP, exact resume, DataLoader", size=12, anchor="start")
    drawing.text(640, 138, "worker processes", size=12, anchor="start")
    drawing.text(
        20,
        278,
        "Each model is a group of its own. The processes of one model are the members of its group.",
        size=12,
        anchor="start",
    )
    return drawing


DRAWINGS = {
    "architecture.svg": architecture,
    "groups.svg": groups,
    "orders.svg": orders,
    "crash.svg": crash,
    "modes.svg": modes,
}


def main() -> None:
    """Write every picture to the folder of this file."""
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
