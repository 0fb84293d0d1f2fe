"""Two worlds of torch; the trainers wait for a message of the engines at a socket, and the engines take their time."""

import os
import socket
import time

import torch
import torch.distributed as dist

global_rank, half = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
is_engine, rank = global_rank >= half, global_rank % half
shared = dist.TCPStore(*address, is_master=False)
store = dist.PrefixStore("engine" if is_engine else "trainer", dist.TCPStore(*address, is_master=False))
dist.init_process_group("gloo", store=store, rank=rank, world_size=half)
if rank == 0 and not is_engine:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        shared.set("trainer-port", str(listener.getsockname()[1]))
        connection, _ = listener.accept()
        assert connection.recv(100) == b"samples"
elif rank == 0:
    connection = socket.create_connection(("127.0.0.1", int(shared.get("trainer-port"))))
    time.sleep(float(os.environ["PAUSE_S"]))
    connection.sendall(b"samples")
dist.all_reduce(torch.ones(1))
print(f"rank {global_rank}: done")
