"""A whole GRPO run of Qwen3-0.6B's shape, trainer and engine in turns on one device, and what parking costs.

8 prompts x 8 samples of 128 new tokens, parked as the application chooses and with sleep_level = 2. Then each role
alone, in a process of its own: the speed of parking and waking, and the memory that it keeps asleep, its context of
the device included. It passes with 80 samples a second by default, 20 GB/s each way, 1 GiB kept by a role, and a batch
after a sleep that takes no more than 0.5 s longer than before it.
"""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.cuda_ipc import next_of, process
from gpu.decoding_speed import open_engine, seconds_of
from gpu.piece import Figures, Place, main, reach
from gpu.shapes import make_model
from gpu.trainer_against_cpu import make_sequences, policy_gradient
from gpu.whole_run import GIB, train

from offbeat_core import TrainEngineConfig
from offbeat_device import open_device
from offbeat_engine_torch import TorchTrainEngine

RUNS: dict[str, dict[str, object]] = {"by default": {}, "level 2": {"sleep_level": 2}}
LIMIT_S = 150.0
AT_LEAST = {"samples_per_s, by default": 80.0, "trainer_parking_gb_per_s": 20.0, "trainer_waking_gb_per_s": 20.0}
AT_MOST = {"trainer_keeps_gib": 1.0, "engine_keeps_gib": 1.0, "engine_late_s": 0.5}


def timed(place: Place, work: Callable[[], Any]) -> float:
    """Return the seconds of one call, until the device is done."""
    start_s = time.perf_counter()
    work()
    place.device.synchronize()
    return time.perf_counter() - start_s


def be_trainer(pipe: Connection, device: str, folder: Path, tiny: bool) -> None:
    """Train one step, park and wake twice, send the figures of the second time, and sleep until killed.

    The first time pins the memory that values wait in.
    """
    place = Place(device=open_device(device), tiny=tiny)
    config = TrainEngineConfig(model_path=str(folder), device=device, dtype="bfloat16")
    engine = TorchTrainEngine.create(config)
    engine.forward_backward(make_sequences(2, 4, place.pick(8, 64)), policy_gradient)
    engine.step()
    figures: dict[str, float] = {}
    for _ in range(2):
        awake = place.device.memory().allocated_bytes
        parking_s = timed(place, lambda: engine.sleep(2))
        freed = awake - place.device.memory().allocated_bytes
        waking_s = timed(place, engine.wake)
        figures = {
            "trainer_parked_gib": freed / GIB,
            "trainer_parking_gb_per_s": freed / parking_s / 1e9,
            "trainer_waking_gb_per_s": freed / waking_s / 1e9,
        }
    engine.sleep(2)
    pipe.send(figures)
    signal.pause()


def be_engine(pipe: Connection, device: str, folder: Path, tiny: bool) -> None:
    """Sample, send how long the engine takes to sleep and to wake at both levels, and sleep until killed."""
    place = Place(device=open_device(device), tiny=tiny)
    pipe.send(asyncio.run(_sleep_and_wake(place, folder)))
    signal.pause()


async def _sleep_and_wake(place: Place, folder: Path) -> dict[str, float]:
    engine = await open_engine(place, folder)
    batch = place.pick(2, 64), 8, place.pick(4, 64)
    for _ in range(3):  # the second time steps are recorded
        before_s = await seconds_of(engine, *batch)
    figures: dict[str, float] = {}
    for level in (1, 2):
        await engine.pause("wait")
        start_s = time.perf_counter()
        await engine.sleep(level)
        asleep_s = time.perf_counter()
        await engine.wake()
        place.device.synchronize()
        figures |= {
            f"engine_parking_s, level {level}": asleep_s - start_s,
            f"engine_waking_s, level {level}": time.perf_counter() - asleep_s,
        }
        if level == 1:  # its weights are still there
            await engine.resume()
            figures["engine_late_s"] = await seconds_of(engine, *batch) - before_s
    await engine.sleep(2)
    return figures


def park(place: Place, folder: Path, name: str, role: Callable[..., None]) -> dict[str, float]:
    """Return what a role alone on the device says of its parking, and the memory that it keeps asleep."""
    before = place.used_bytes()
    with process(place, role, place.name, folder, place.tiny) as pipe:
        figures = next_of(pipe)
        assert isinstance(figures, dict)
        return {**figures, f"{name}_keeps_gib": (place.used_bytes() - before) / GIB}


def run(place: Place) -> Figures:
    """Run in turns with both ways of parking, then park each role alone."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model", tiny=place.tiny, device=place.device.torch_device)
        place.device.release_unused()
        for name, role in {"trainer": be_trainer, "engine": be_engine}.items():
            figures |= park(place, model, name, role)
            place.note(figures)
        for name, settings in list(RUNS.items())[: place.pick(1, len(RUNS))]:
            figures |= train(folder, model, place, name, LIMIT_S, colocate=True, **settings)
    return reach(place, figures, AT_LEAST, AT_MOST)


if __name__ == "__main__":
    main(run)
