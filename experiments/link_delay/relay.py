"""Relay the bytes of TCP connections with a fixed delay, like a long cable between two machines.

python relay.py HOST:PORT TO_HOST:TO_PORT SECONDS
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

CHUNK_BYTES = 65_536


async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Write what is read `seconds` later and in order, until the connection ends."""
    now = asyncio.get_running_loop().time
    coming: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        data = b"-"
        while data:
            due, data = await coming.get()
            await asyncio.sleep(due - now())
            writer.write(data)
        writer.close()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        data = b"-"
        while data:
            try:
                data = await reader.read(CHUNK_BYTES)
            except ConnectionError:
                data = b""
            coming.put_nowait((now() + seconds, data))


async def relay(
    host: str, port: int, seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Connect to the other side for one connection, and relay both directions."""
    try:
        far_reader, far_writer = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hand_on(reader, far_writer, seconds))
        tasks.create_task(hand_on(far_reader, writer, seconds))


async def main(near: str, far: str, seconds: float) -> None:
    """Listen until a signal ends the process."""
    (host, port), (to_host, to_port) = near.split(":"), far.split(":")
    server = await asyncio.start_server(partial(relay, to_host, int(to_port), seconds), host, int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
