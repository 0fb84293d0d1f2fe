"""Torch's profiler for all threads: an engine computes in a thread of its own."""

import torch
from torch._C._profiler import _ExperimentalConfig


def profile_threads(*activities: torch.profiler.ProfilerActivity) -> torch.profiler.profile:
    """A profiler, not started.

    Source: torch 2.13.0, torch/_C/_profiler.pyi, `_ExperimentalConfig`, `profile_all_threads`.
    """
    return torch.profiler.profile(
        activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
    )
