"""Rank 0 asks an engine that took the request and never answers; the others wait for the samples."""

import socket
import urllib.request

import torch.distributed as dist

dist.init_process_group("gloo")
samples = [""]
if dist.get_rank() == 0:
    engine = socket.create_server(("127.0.0.1", 0))
    samples = [urllib.request.urlopen(f"http://127.0.0.1:{engine.getsockname()[1]}/generate").read()]  # missing
dist.broadcast_object_list(samples, src=0)  # waits
