"""Every rank waits for a reward server that no monitor watches."""

import os
import time

import torch.distributed as dist

import offbeat_liveness as liveness

dist.init_process_group("gloo")
with liveness.waiting("reward server", on="reward-server-3"):
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
print(f"rank {dist.get_rank()}: done")
