"""No rank is in a call of torch: each waits in a queue for work that another would have to put."""

import queue
from concurrent.futures import Future

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
work: queue.Queue[int] = queue.Queue()
answer: Future[int] = Future()
if dist.get_rank() == 0:
    answer.result()  # waits
else:
    work.get()  # waits
