"""The thread that should feed the main thread raises, and the error is not reported."""

import queue
import threading

import torch
import torch.distributed as dist


def feed() -> None:
    """Read the data set."""
    raise ValueError("line 17 of train.jsonl is no JSON")


dist.init_process_group("gloo")
batches: queue.Queue[torch.Tensor] = queue.Queue()
threading.Thread(target=feed, name="feeder").start()
dist.all_reduce(batches.get())  # waits
