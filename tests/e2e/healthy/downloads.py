"""Rank 0 downloads a model from a server that sends a little at a time; the others wait to read it."""

import os
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch.distributed as dist

NUM_PIECES = 3


class SlowHub(BaseHTTPRequestHandler):
    """Sends a piece and rests longer than a stall."""

    def do_GET(self) -> None:
        """Give a file."""
        self.send_response(200)
        self.end_headers()
        for _ in range(NUM_PIECES):
            time.sleep(float(os.environ["PAUSE_S"]) / NUM_PIECES)
            self.wfile.write(b"x" * 1000)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/model.safetensors") as answer:
        assert len(answer.read()) == 1000 * NUM_PIECES
    server.shutdown()
dist.barrier()
print(f"rank {rank}: done")
