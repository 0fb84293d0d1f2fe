"""Rank 0 asks an engine in another process for samples; the others wait in the broadcast that brings them."""

import os
import subprocess
import sys
import urllib.request

import torch.distributed as dist

ENGINE = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(float(sys.argv[1]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"forty-two")

    def log_message(self, *args):
        pass


server = HTTPServer(("127.0.0.1", 0), Engine)
print(server.server_port, flush=True)
server.handle_request()
"""

dist.init_process_group("gloo")
rank = dist.get_rank()
sample = [""]
if rank == 0:
    command = [sys.executable, "-S", "-c", ENGINE, os.environ["PAUSE_S"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        port = int(engine.stdout.readline())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/generate") as answer:
            sample = [answer.read().decode()]
dist.broadcast_object_list(sample, src=0)
assert sample == ["forty-two"]
print(f"rank {rank}: done")
