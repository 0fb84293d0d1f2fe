"""Rank 1 asks rank 0's server, whose answer needs the main thread, which waits for rank 1 in a collective."""

import queue
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist

answers: queue.Queue[bytes] = queue.Queue()


class Server(BaseHTTPRequestHandler):
    """Answers with what the main thread has made."""

    def do_GET(self) -> None:
        """Give the metrics."""
        text = answers.get()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)


dist.init_process_group("gloo")
rank, place = dist.get_rank(), [0]
if rank == 0:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = [server.server_port]
dist.broadcast_object_list(place, src=0)
if rank == 1:
    urllib.request.urlopen(f"http://127.0.0.1:{place[0]}/metrics").read()  # missing
dist.all_reduce(torch.ones(1))  # waits
answers.put(b"loss 1.0")
