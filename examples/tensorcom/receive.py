"""A server of tensorcom into a stream: `python receive.py 'zsub://127.0.0.1:788{0..3}' --stream train --samples 10000`.

One epoch holds the number of samples that `--samples` names. A subscriber sees only what is published while it is
connected.
"""

from __future__ import annotations

import argparse

import tensorcom

import penstock

NAMES = ("x", "y")


def main() -> None:
    """Write samples until the epoch has enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+", help="of tensorcom, with braces for several")
    parser.add_argument("--stream", default="train")
    parser.add_argument("--samples", type=int, required=True, help="of the epoch")
    args = parser.parse_args()
    left = args.samples
    connection = tensorcom.Connection(args.urls)
    with penstock.Writer(args.stream) as writer, writer.epoch() as epoch:
        for arrays in connection:
            for row in list(zip(*arrays, strict=True))[:left]:
                epoch.write(dict(zip(NAMES, row, strict=True)))
                left -= 1
            if not left:
                break
    print(f"{args.samples} samples received")


if __name__ == "__main__":
    main()
