import torch.distributed as dist


class Timers:
    def __init__(self):
        self.timers = {}

    def summarise(self):
        for seconds in self.timers.values():
            dist.all_reduce(seconds)
