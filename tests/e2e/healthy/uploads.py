"""Rank 0 uploads a checkpoint to a server that takes it slowly."""

import http.client
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch.distributed as dist

NUM_PIECES = 8
PIECE = bytes(1 << 20)


class SlowBucket(BaseHTTPRequestHandler):
    """Reads a piece, rests, reads the next."""

    def do_PUT(self) -> None:
        """Take an object."""
        for _ in range(NUM_PIECES):
            self.rfile.read(len(PIECE))
            time.sleep(float(os.environ["PAUSE_S"]) / NUM_PIECES)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowBucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("PUT", "/step-100", body=PIECE * NUM_PIECES)
    assert connection.getresponse().status == 200
    server.shutdown()
dist.barrier()
print(f"rank {rank}: done")
