"""A relay of TCP connections that delays all bytes, as a long way to the server does.

Start it with ``python -m chaos.relay PORT HOST:PORT DELAY_MS``. It prints a line when it listens.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from chaos.process import prepare

PIECE_BYTES = 1 << 16
MOST_PIECES = 64
"""The pieces under way in one direction of a connection."""


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Carry the bytes of one direction, each after the delay, until it ends."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_PIECES)
    clock = asyncio.get_running_loop().time

    async def receive() -> None:
        piece = b"-"
        while piece:
            with suppress(ConnectionError):
                piece = b""
                piece = await reader.read(PIECE_BYTES)
            await under_way.put((clock() + delay_s, piece))

    async def send() -> None:
        is_open = True
        while True:
            due_s, piece = await under_way.get()
            await asyncio.sleep(due_s - clock())
            if not piece:
                break
            with suppress(ConnectionError):
                if is_open:
                    writer.write(piece)
                    is_open = False
                    await writer.drain()
                    is_open = True
        writer.close()

    await asyncio.gather(receive(), send())


async def serve(port: int, host: str, target: int, delay_s: float) -> None:
    """Relay each connection to the target."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, far_writer, delay_s), carry(far_reader, writer, delay_s))

    server = await asyncio.start_server(relay, "0.0.0.0", port)  # noqa: S104  of its namespace only
    print("listening", flush=True)
    await server.serve_forever()


def main(port: str, target: str, delay_ms: str) -> None:
    """Relay until it is killed."""
    prepare()
    host, _, number = target.rpartition(":")
    asyncio.run(serve(int(port), host, int(number), float(delay_ms) / 1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
