import torch
import torch.distributed as dist


class Timers:
    def __init__(self, names):
        self.names = sorted(names)
        self.timers = {}

    def summarise(self):
        seconds = torch.tensor([self.timers.get(name, 0.0) for name in self.names])
        dist.all_reduce(seconds)
