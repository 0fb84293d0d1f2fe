"""Time of a real sync: from the trainer role to the embedded rollout engine, each in a process of its own.

    python tools/bench/weightsync_engines.py MODEL_FOLDER [--repeats N]

float32 weights of the torch trainer to a bfloat16 engine, which packs them and proves what it holds; shared memory and
TCP take turns.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from grpo_async_app._roles.rollout import RolloutRole
from grpo_async_app._roles.trainer import TrainerRole
from offbeat_objectives import AlgorithmConfig
from offbeat_types import RolloutEngineConfig, TrainEngineConfig
from offbeat_weightsync import new_address

DEADLINE_S = 120.0


def be_engine(orders: Connection, model: str) -> None:
    """Take a version from an address, when told to."""

    async def serve() -> None:
        role = RolloutRole(backend="torch", config=RolloutEngineConfig(model_path=model, dtype="bfloat16"))
        await role.start()
        orders.send("ready")
        while order := orders.recv():
            await role.pause("wait")
            address, version = order
            await role.receive_weights(address, version, DEADLINE_S, "rollout-0")
            await role.resume()
            orders.send("done")
        await role.close()

    asyncio.run(serve())


def measure(model: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each sync, by the way it went."""
    spawn = multiprocessing.get_context("spawn")
    orders, theirs = spawn.Pipe()
    engine = spawn.Process(target=be_engine, args=(theirs, str(model)))
    engine.start()
    address = new_address()
    trainer = TrainerRole(
        backend="torch",
        config=TrainEngineConfig(model_path=str(model)),
        algorithm=AlgorithmConfig(),
        socket_path=address,
        rollout_dtype="bfloat16",
        bucket_bytes=32 << 20,
    )
    over_tcp = trainer.listen("127.0.0.1")
    orders.recv()
    seconds: dict[str, list[float]] = {"shared memory": [], "tcp": []}
    for version in range(2 * repeats):
        way = list(seconds)[version % 2]
        orders.send((over_tcp if way == "tcp" else address, version))
        start = time.perf_counter()
        trainer.send_weights(version, DEADLINE_S, over_tcp if way == "tcp" else "")
        seconds[way].append(time.perf_counter() - start)
        orders.recv()
    orders.send(None)
    engine.join(60)
    trainer.close()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time of a real weight sync between the embedded engines.")
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--repeats", type=int, default=8)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} before")
    for way, seconds in measure(arguments.model, arguments.repeats).items():
        warm = seconds[1:]
        print(f"{way}: median {statistics.median(warm) * 1e3:.0f} ms, fastest {min(warm) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
