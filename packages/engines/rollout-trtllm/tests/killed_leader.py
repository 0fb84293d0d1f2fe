"""The leader of the last replica is killed while it hands weights over; every other rank says what it came to."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from trtllm_peers import HostHandles

from offbeat_core import PeerFailedError
from offbeat_mesh import Mesh, join_world
from offbeat_rollout_trtllm import EngineControl, ReplicaWeights
from offbeat_weightsync import BucketPlan, describe_tensors

addresses = os.environ["ENGINES"].split(",")
folder = Path(os.environ["HANDLES"])
world = join_world(device="cpu", deadline_s=15)
mesh = Mesh(dp=len(addresses), tp=world.size // len(addresses))
replica = mesh.group_except("dp")
weights = [(f"layers.{index}.weight", torch.full((16,), float(index))) for index in range(4)]
plan = BucketPlan.build(describe_tensors(weights), 64)


def tensors():
    for index, pair in enumerate(weights):
        if index == 2 and replica.rank == 0 and mesh.coordinates["dp"] == len(addresses) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


engine = EngineControl(addresses[mesh.coordinates["dp"]], deadline_s=10)
sync = ReplicaWeights(mesh, plan, engine, HostHandles(folder, replica.rank), has_vision=True, deadline_s=15)
try:
    said = f"serves version {sync.send(tensors(), version=1).version}"
except PeerFailedError as error:
    said = f"raised for {error.peer}"
print(f"rank {mesh.rank} {said}", flush=True)
# Rank 0 passes the news on: it stays until the others know.
(folder / f"done-{mesh.rank}").touch()
until_s = time.monotonic() + 15
while len(list(folder.glob("done-*"))) < world.size - 1 and time.monotonic() < until_s:
    time.sleep(0.02)
os._exit(0)
