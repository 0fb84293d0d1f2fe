"""Everything that forked ranks need is imported once, before the first fork."""

import sys
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import offbeat_liveness  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))  # for liveness_launch
