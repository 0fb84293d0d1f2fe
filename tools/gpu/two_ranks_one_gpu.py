"""Two ranks of a trainer on one device: FSDP2's steps, gathered and saved weights, beside one rank.

The backend of GPUs refuses a second rank on a device, so the ranks speak over the CPU's, which takes tensors of a GPU
too. What is tested is the order of streams and copies of a trainer cut over ranks. Losses, gradient norms,
log-probabilities and updates are those of one rank within 2e-4, and what is saved is what is gathered, bit for bit.
"""

import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.cuda_ipc import next_of, process
from gpu.piece import CheckError, Figures, Place, main, require, require_close
from gpu.trainer_against_cpu import FLOAT32_BOUND, make_sequences, policy_gradient, relative
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from offbeat_core import TrainEngineConfig
from offbeat_device import open_device
from offbeat_engine_torch import TorchTrainEngine
from offbeat_mesh import Mesh, join_world
from offbeat_testing import tiny_model

SIZE = 2
DEADLINE_S = 90.0


def train(folder: Path, device: str, tiny: bool, mesh: Mesh | None, into: Path) -> dict[str, Any]:
    """Train two steps and save the weights; return metrics, log-probabilities, and whether what is saved is gathered.

    Adam's epsilon is large, so that an update is proportional to its gradient.
    """
    torch.set_float32_matmul_precision("highest")
    config = TrainEngineConfig(
        model_path=str(folder), device=device, learning_rate=1.0, adam_eps=1.0, weight_decay=0.0, max_grad_norm=1e9
    )
    engine = TorchTrainEngine.create(config, mesh)
    sequences = make_sequences(2 if tiny else 8, 4, 12 if tiny else 200)
    losses, norms = [], []
    start_s = time.perf_counter()
    for _ in range(2):
        losses.append(engine.forward_backward(sequences, policy_gradient)["loss"].value)
        norms.append(engine.step()["grad_norm"].value)
    steps_s = time.perf_counter() - start_s
    logprobs = np.concatenate(engine.logprobs(sequences)).tolist()
    engine.save_weights(into)
    gathered = {name: tensor.cpu() for name, tensor in engine.weights()}
    saved = read(into)
    same = gathered.keys() == saved.keys() and all(torch.equal(gathered[name], saved[name]) for name in saved)
    return {"losses": losses, "norms": norms, "logprobs": logprobs, "saved": same, "steps_s": steps_s}


def read(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a model folder."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def be_rank(pipe: Connection, rank: int, folder: Path, device: str, tiny: bool, into: Path) -> None:
    """Join the other rank on the same device, train, and send what `train` returns, or why it did not."""
    own = open_device(device)
    own.collective_backend = open_device("cpu").collective_backend
    store = FileStore(str(into.parent / "store"), SIZE)
    try:
        with join_world(rank=rank, size=SIZE, store=store, device=own, deadline_s=DEADLINE_S):
            pipe.send(train(folder, device, tiny, Mesh(dp=SIZE), into))
    except Exception as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def trained(pipe: Connection) -> dict[str, Any]:
    """Return what a rank sends of its training."""
    found = next_of(pipe)
    if not isinstance(found, dict):
        raise CheckError(str(found))
    return found


def run(place: Place) -> Figures:
    """Train on two ranks, then on one, and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = tiny_model(Path(temporary) / "model", "qwen3", hidden_size=place.pick(64, 512))
        there, here = Path(temporary) / "two", Path(temporary) / "one"
        args = (folder, place.name, place.tiny, there)
        with process(place, be_rank, 0, *args) as first, process(place, be_rank, 1, *args) as second:
            two, other = (trained(pipe) for pipe in (first, second))
        one = train(folder, place.name, place.tiny, None, here)
        before, updated, wanted = read(folder), read(there), read(here)
    apart = max(float((updated[name] - wanted[name]).abs().max()) for name in wanted)
    largest = max(float((wanted[name] - before[name]).abs().max()) for name in wanted)
    errors = {
        "loss": relative(two["losses"], one["losses"]),
        "gradient_norm": relative(two["norms"], one["norms"]),
        "logprobs_nats": float(np.abs(np.subtract(two["logprobs"], one["logprobs"])).max()),
        "update": apart / largest,
    }
    figures = {**errors, "steps_s_of_two": two["steps_s"], "steps_s_of_one": one["steps_s"]}
    place.note(figures)
    for what, error in errors.items():
        require_close(what, error, FLOAT32_BOUND)
    for rank, found in enumerate((two, other)):
        require(found["saved"], f"rank {rank} has saved other weights than it has gathered")
        require(found["losses"] == two["losses"], f"the ranks report other losses: {found['losses']}, {two['losses']}")
    return figures


if __name__ == "__main__":
    main(run)
