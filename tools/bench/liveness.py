"""Cost of the liveness monitor: all_reduce with and without it, alternating in one run, and a training step.

    python tools/bench/liveness.py [--ranks 2 4] [--rounds 30] [--step] [--json]

Each round times a block of calls without the monitor and one with it, in an order that changes from round to round,
on every rank at once. A block gives the median of its calls, a figure is the median over the rounds on rank 0, and the
ratio is the median of the rounds' ratios, so much of what the machine does beside cancels out. `--step` does the same
with a training step of offbeat-engine-torch on a small Qwen3. `monitor` is the processor time of processes that meet
now and then and sleep, with the monitor less without.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import parser_of, show
from fault_runs import FaultRun, run_faults

PART: Final = "BENCH_LIVENESS"
ROUNDS: Final = "BENCH_ROUNDS"
MODEL: Final = "BENCH_MODEL"
SIZES_BYTES: Final = {4: 200, 64 * 1024: 100, 16 * 2**20: 4}
SETTLE_S: Final = 0.3
SLEEP_S: Final = 1.0
LIMIT_S: Final = 900.0
MANY_THREADS: Final = 1000


class Patches:
    """Methods of torch that the monitor has wrapped. They stay wrapped, and the runs "without" must not use them."""

    NAMES: Final = {"Work": ("wait",), "Store": ("get", "wait", "multi_get"), "ProcessGroup": ("send", "recv")}

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        self._places = [
            (getattr(distributed_c10d, owner), name) for owner, names in self.NAMES.items() for name in names
        ]
        self._own = [getattr(owner, name) for owner, name in self._places]
        self._made = list(self._own)

    def take_out(self) -> None:
        """Restore torch's own methods."""
        self._made = [getattr(owner, name) for owner, name in self._places]
        self._put(self._own)

    def put_back(self) -> None:
        """Restore the monitor's methods."""
        self._put(self._made)

    def _put(self, methods: Sequence[Any]) -> None:
        for (owner, name), method in zip(self._places, methods, strict=True):
            setattr(owner, name, method)


def alternate(block: Callable[[], float], rounds: int) -> dict[str, float]:
    """Run a block without and with the monitor, by turns.

    Args:
        block: returns seconds for one unit of work.
        rounds: pairs.

    Returns:
        Medians `without_us` and `with_us`, and the median `ratio` of the pairs.
    """
    import torch.distributed as dist

    import offbeat_liveness as liveness

    block()
    patches = Patches()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for watched in (False, True) if number % 2 == 0 else (True, False):
            if watched:
                patches.put_back()
            monitor = liveness.watch(stall_after_s=60) if watched else None
            time.sleep(SETTLE_S)  # addresses are exchanged once, in the first moments
            dist.barrier()
            seconds[watched].append(block())
            if monitor:
                monitor.close()
                patches.take_out()
    ratios = [there / absent for absent, there in zip(seconds[False], seconds[True], strict=True)]
    return {
        "without_us": statistics.median(seconds[False]) * 1e6,
        "with_us": statistics.median(seconds[True]) * 1e6,
        "ratio": statistics.median(ratios),
    }


def time_all_reduce(rounds: int) -> list[dict[str, float]]:
    """Return one row for each size of tensor."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rows = []
    for num_bytes, calls in SIZES_BYTES.items():
        tensor = torch.zeros(num_bytes // 4)

        def block(tensor: torch.Tensor = tensor, calls: int = calls) -> float:
            seconds = []
            for _ in range(calls):
                start = time.perf_counter()
                dist.all_reduce(tensor)
                seconds.append(time.perf_counter() - start)
            return statistics.median(seconds)

        rows.append({"bytes": num_bytes, **alternate(block, rounds)})
    return rows


def time_training_step(rounds: int) -> list[dict[str, float]]:
    """Return one row: forward_backward and step of the trainer on all ranks."""
    import numpy as np
    import torch.distributed as dist
    from bench.train_step import policy_gradient

    from offbeat_core import TrainEngineConfig, TrainSequence
    from offbeat_engine_torch import TorchTrainEngine
    from offbeat_mesh import Mesh, join_world

    dist.init_process_group("gloo")
    join_world(device="cpu")
    config = TrainEngineConfig(model_path=os.environ[MODEL], device="cpu")
    engine = TorchTrainEngine.create(config, Mesh(dp=dist.get_world_size()))
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            ids=rng.integers(0, 300, 128).astype(np.int32),
            loss_mask=np.arange(128) >= 32,
            extras={"advantage": np.full(128, rng.normal(), np.float32)},
        )
        for _ in range(8)
    ]

    def block() -> float:
        start = time.perf_counter()
        engine.forward_backward(sequences, policy_gradient)
        engine.step()
        return time.perf_counter() - start

    return [alternate(block, rounds)]


def time_monitor(rounds: int) -> list[dict[str, float]]:
    """Return the processor time of the monitor while nothing happens, as a share of one core."""
    import torch.distributed as dist

    import offbeat_liveness as liveness

    dist.init_process_group("gloo")
    rows = []
    over = threading.Event()
    for stall_after_s, num_threads in ((60.0, 1), (2.0, 1), (60.0, MANY_THREADS)):
        while threading.active_count() < num_threads:
            threading.Thread(target=over.wait, daemon=True).start()
        shares = {}
        for watched in (False, True):
            monitor = liveness.watch(stall_after_s=stall_after_s) if watched else None
            time.sleep(SETTLE_S)
            start = time.process_time()
            for _ in range(rounds):  # in step with each other, so that no rank looks stuck
                dist.barrier()
                time.sleep(SLEEP_S)
            shares[watched] = (time.process_time() - start) / (rounds * SLEEP_S)
            if monitor:
                monitor.close()
        rows.append({"stall_after_s": stall_after_s, "threads": num_threads, "share": shares[True] - shares[False]})
    return rows


PARTS: Final = {"all_reduce": time_all_reduce, "step": time_training_step, "monitor": time_monitor}


def measure(part: str, size: int, rounds: int, model: str = "") -> list[dict[str, float]]:
    """Run one part on `size` ranks; what rank 0 found."""
    environment = ((PART, part), (ROUNDS, str(rounds)), (MODEL, model))
    program = FaultRun(script=Path(__file__), size=size, limit_s=LIMIT_S, environment=environment)
    [(_, seen)] = run_faults([program])
    if set(seen.exit_codes.values()) != {0}:
        raise SystemExit(f"{part} on {size} ranks failed: {seen.exit_codes}\n{seen.outputs[0]}")
    found: list[dict[str, float]] = json.loads(seen.outputs[0].strip().splitlines()[-1])
    return found


def make_model() -> str:
    """Return a small Qwen3, large enough for a step of a tenth of a second."""
    from offbeat_testing import tiny_model

    folder = Path(tempfile.mkdtemp(prefix="bench-liveness-"))
    return str(tiny_model(folder, hidden_size=256, num_layers=4))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=30)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--step", action="store_true", help="measure a training step too")
    options = parser.parse_args(arguments)
    results = {"monitor": measure("monitor", 2, min(options.rounds, 10))}
    results["all_reduce"] = [
        {"ranks": size, **row} for size in options.ranks for row in measure("all_reduce", size, options.rounds)
    ]
    if options.step:
        results["training step"] = [{"ranks": 2, **row} for row in measure("step", 2, options.rounds, make_model())]
    for title, rows in results.items():
        show(rows, as_json=options.json, title=title)


if __name__ == "__main__":
    if PART in os.environ:
        print(json.dumps(PARTS[os.environ[PART]](int(os.environ[ROUNDS]))))
    else:
        main()
