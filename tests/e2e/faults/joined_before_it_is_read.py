"""Rank 0 joins its worker before it takes the result, which is more than the pipe of the queue holds."""

import multiprocessing

import torch.distributed as dist

context = multiprocessing.get_context("fork")


def tokenize(results) -> None:
    """A large result."""
    results.put("x" * 1_000_000)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    results = context.Queue()
    worker = context.Process(target=tokenize, args=(results,), name="tokenizer")
    worker.start()
    worker.join()  # missing
dist.barrier()  # waits
