"""Rank 0 is an event loop that awaits requests; the others wait in a broadcast for the first one."""

import asyncio
import os

import torch.distributed as dist


async def first_request() -> str:
    """What the first client says."""
    requests: asyncio.Queue[str] = asyncio.Queue()

    async def client() -> None:
        await asyncio.sleep(float(os.environ["PAUSE_S"]))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"train\n")
        await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await requests.put((await reader.readline()).decode().strip())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    visitor = asyncio.create_task(client())
    request = await requests.get()
    await visitor
    server.close()
    return request


dist.init_process_group("gloo")
rank = dist.get_rank()
request = [asyncio.run(first_request()) if rank == 0 else ""]
dist.broadcast_object_list(request, src=0)
assert request == ["train"]
print(f"rank {rank}: done")
