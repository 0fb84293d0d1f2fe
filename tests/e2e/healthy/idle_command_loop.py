"""A rank waits at a socket for commands, which it passes on to the others: there are none for a while."""

import os
import socket
import subprocess
import sys

import torch.distributed as dist

CLIENT = """
import socket, sys, time
time.sleep(float(sys.argv[2]))
socket.create_connection(("127.0.0.1", int(sys.argv[1]))).sendall(b"shut down")
"""

dist.init_process_group("gloo")
rank = dist.get_rank()
command = [""]
with socket.create_server(("127.0.0.1", 0)) as listener:
    if rank == 0:
        client = [sys.executable, "-S", "-c", CLIENT, str(listener.getsockname()[1]), os.environ["PAUSE_S"]]
        with subprocess.Popen(client):
            connection, _ = listener.accept()
            command = [connection.recv(100).decode()]
    dist.broadcast_object_list(command, src=0)
assert command == ["shut down"]
print(f"rank {rank}: done")
