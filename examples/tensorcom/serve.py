"""A stream as a server of tensorcom: `python serve.py zpub://127.0.0.1:7880 --stream train`.

Programs with `tensorcom.Connection` read it unchanged. A batch is acknowledged once it was given to ZeroMQ, which may
lose it. With `zpush` it waits until a trainer takes it.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorcom

import penstock

NAMES = ("x", "y")
WIDE = {"float64": np.float32, "int64": np.int32, "uint64": np.int32}
"""tensorcom sends no numbers of 64 bits unless asked to."""
LINGER_MS = 10_000
"""tensorcom itself drops what is not sent yet when it is closed."""


def main() -> None:
    """Send the batches of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of tensorcom")
    parser.add_argument("--stream", default="train")
    parser.add_argument("--group", default="tensorcom")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    connection = tensorcom.Connection(args.url)
    connection.socket.linger = LINGER_MS
    with penstock.Loader(args.stream, group=args.group, batch_size=args.batch_size) as loader:
        for _ in range(args.epochs):
            for batch in loader:
                arrays = (batch[name] for name in NAMES)
                connection.send([array.astype(WIDE.get(array.dtype.name, array.dtype)) for array in arrays])
    connection.socket.close()
    connection.context.term()  # returns when everything is sent


if __name__ == "__main__":
    main()
