"""Tests for the nox session `engines(engine-megatron+rollout-vllm)`, which has both; elsewhere they are left out."""

import os
import warnings
from importlib.util import find_spec

both_are_here = find_spec("megatron") is not None and "OFFBEAT_PARTNER_PYTHON" in os.environ
collect_ignore_glob = [] if both_are_here else ["test_*.py"]

if both_are_here:
    from offbeat_engine_megatron._megatron import load_megatron

    warnings.filterwarnings("ignore", module="megatron")
    load_megatron()  # here, once: ranks are forked from this process
