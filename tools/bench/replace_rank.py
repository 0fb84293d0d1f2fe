"""Seconds in which a rank of a trainer that has died is replaced, by phase, and what the copies for that cost.

    python tools/bench/replace_rank.py [--ranks 2] [--layers 30] [--repeats 2] [--work DIR] [--json]

The model has the shape of SmolLM2-135M with random weights. Ranks are `TrainerRole`s of grpo-async-app in processes
forked from this one, so imports are not part of it: a spare has done them. Each round makes an update, kills the last
rank in the middle of the next one, and replaces it as the driver does, then makes that update. Rows are phases of the
ranks that stayed (the slowest) and of the new one, each without the phases within it: by the clock, which counts
waiting for other ranks, and in processor time. The last rows are updates with copies and without.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.harness import Row, cache_folder, parser_of, show

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles import trainer
from grpo_async_app._roles.groups import SampledGroup
from offbeat_core import Completion, Trajectory, load_config
from offbeat_engine_torch import _engine, _policy
from offbeat_engine_torch._compiled import CompiledLayers
from offbeat_engine_torch._family_check import FamilyCheck
from offbeat_engine_torch._state.copies import PackedState, PeerCopies
from offbeat_mesh import Rendezvous, open_rendezvous
from offbeat_testing import small_grpo_run, tiny_model

LOOPBACK = "127.0.0.1"
PHASES = (
    ("rejoin, the rest", trainer.TrainerRole, "rejoin"),
    ("meeting anew", trainer.TrainerRole, "_join"),
    ("making the engine, the rest", _engine.TorchTrainEngine, "recover"),
    ("closing the engine", _engine.TorchTrainEngine, "close"),
    ("outline of the model", _policy, "_outline"),
    ("cutting it", _policy, "shard_model"),
    ("reading weights", _policy, "read_weights"),
    ("check of the family", FamilyCheck, "run"),
    ("compiling", CompiledLayers, "start"),
    ("optimizer", _engine, "make_optimizer"),
    ("copies sent", PeerCopies, "recover"),
    ("weights taken", PackedState, "fill"),
    ("moments taken", PackedState, "restore"),
    ("update", trainer.TrainerRole, "update"),
    ("copies packed", _engine, "pack_state"),
    ("copies kept", PeerCopies, "keep"),
)
WORDS = (
    "--engine.options.peer_copies=true",
    "--algorithm.advantage=grpo",
    "--async.require_batches=1",
    "--engine.max_tokens_per_microbatch=1024",
)


class Phases:
    """Seconds and processor seconds of each phase, without those within it."""

    def __init__(self) -> None:
        self.seconds, self.cpu_s = defaultdict[str, float](float), defaultdict[str, float](float)
        self._inner = [(0.0, 0.0)]

    def watch(self, name: str, owner: Any, method: str) -> None:
        """Count the time of a method of a class, or of a function of a module."""
        held = vars(owner)[method]
        call = held.__func__ if isinstance(held, classmethod | staticmethod) else held

        @wraps(call)
        def timed(*args: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return call(*args, **named)
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            self._inner.append((0.0, 0.0))
            try:
                return call(*args, **named)
            finally:
                whole, whole_cpu = time.monotonic() - began_s, time.process_time() - began_cpu_s
                inner, inner_cpu = self._inner.pop()
                self.seconds[name] += whole - inner
                self.cpu_s[name] += whole_cpu - inner_cpu
                outer, outer_cpu = self._inner[-1]
                self._inner[-1] = outer + whole, outer_cpu + whole_cpu

        setattr(owner, method, type(held)(timed) if isinstance(held, classmethod | staticmethod) else timed)

    def take(self) -> dict[str, tuple[float, float]]:
        """Return what was counted since the last time."""
        found = {name: (seconds, self.cpu_s[name]) for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.cpu_s.clear()
        return found


def make_groups(args: argparse.Namespace, number: int) -> list[SampledGroup]:
    """Make the samples of an update: tokens at random, rewards that differ."""
    rng = np.random.default_rng(number)

    def trajectory() -> Trajectory:
        ids = rng.integers(3, 300, args.tokens).tolist()
        turn = Completion.join(ids, [-3.0] * len(ids), [(0, len(ids))], "eos", "x")
        return Trajectory(turns=(turn,), ended="done")

    return [
        SampledGroup(
            group_id=index,
            item=index,
            prompt_ids=np.arange(3, 20, dtype=np.int32),
            trajectories=[trajectory() for _ in range(args.samples)],
            rewards=[float(each % 2) for each in range(args.samples)],
            parts=[{}] * args.samples,
        )
        for index in range(args.prompts)
    ]


class Rank:
    """A rank in a process of its own, called by a pipe; a second one interrupts it."""

    def __init__(self, config: GrpoConfig, model: Path, folder: Path) -> None:
        self.calls, calls = multiprocessing.Pipe()
        self.interrupts, interrupts = multiprocessing.Pipe()
        made = multiprocessing.get_context("fork").Process(
            target=_serve, args=(config, model, folder, calls, interrupts), daemon=True
        )
        made.start()
        self.process = made

    def call(self, method: str, *args: Any) -> None:
        """Have it do something; `answer` waits for the end."""
        self.calls.send((method, args))

    def answer(self) -> Any:
        """Return what it has measured; RuntimeError where it has failed."""
        found, problem = self.calls.recv()
        if problem:
            raise RuntimeError(problem)
        return found


def _serve(config: GrpoConfig, model: Path, folder: Path, calls: Connection, interrupts: Connection) -> None:
    torch.set_num_threads(1)
    log = os.open(folder / f"rank-{os.getpid()}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    phases, role, copies = Phases(), cast(Any, None), cast(Any, None)
    for name, owner, method in PHASES:
        phases.watch(name, owner, method)
    settings: dict[str, Any] = {"config": config, "model_path": str(model), "num_updates": 100, "num_threads": 1}

    def interrupt() -> None:
        while True:
            interrupts.recv()
            asyncio.run(role.interrupt())
            interrupts.send(None)

    threading.Thread(target=interrupt, daemon=True).start()
    while True:
        method, args = calls.recv()
        phases.take()
        try:
            if method == "start":
                role = trainer.TrainerRole(**settings, socket_paths=[""] * config.engine.num_ranks, **args[0])
            elif method == "with copies":
                role._copies = copies or role._copies
            elif method == "without copies":
                role._copies.held.wait()
                role._copies, copies = None, role._copies
            else:
                getattr(role, method)(*args)
            calls.send((phases.take(), ""))
        except Exception as error:  # noqa: BLE001 - the boundary: the benchmark ends with it, or has interrupted it
            calls.send((None, f"{type(error).__name__}: {error}"))


def all_do(ranks: list[Rank], method: str, *args: Any) -> tuple[float, list[dict[str, tuple[float, float]]]]:
    """Call a method of all ranks at once; the seconds until the last has answered, and their phases."""
    began_s = time.monotonic()
    for rank in ranks:
        rank.call(method, *args)
    found = [rank.answer() for rank in ranks]
    return time.monotonic() - began_s, found


def replace(ranks: list[Rank], spare: Rank, number: int, groups: list[SampledGroup], dies_after_s: float) -> Row:
    """Kill the last rank in an update, and put the spare into its place; the seconds of each step."""
    for rank in ranks:
        rank.call("update", groups, 1, number)
    time.sleep(dies_after_s)
    dead = ranks[-1]
    assert dead.process.pid is not None
    os.kill(dead.process.pid, signal.SIGKILL)
    dead.process.join()
    began_s = time.monotonic()
    for rank in ranks[:-1]:
        rank.interrupts.send(None)
    for rank in ranks[:-1]:
        rank.interrupts.recv()
        assert rank.calls.recv()[1], "it has ended an update with a dead rank"
    interrupted_s = time.monotonic()
    ranks[-1] = spare
    store, places = open_rendezvous(LOOPBACK, len(ranks))
    for rank, place in zip(ranks, places, strict=True):
        rank.call("rejoin", place, [""] * len(ranks))
    found = [rank.answer() for rank in ranks]
    whole_s = time.monotonic() - began_s
    update_s, _ = all_do(ranks, "update", groups, 1, number)
    del store
    return {"interrupt": interrupted_s - began_s, "all": whole_s, "update": update_s, "phases": found}


def rows_of(rounds: list[Row]) -> list[Row]:
    """Return a row for each phase: means over the rounds."""
    rows: list[Row] = [
        {"phase": "all, from the death on", "stayed_s": np.mean([each["all"] for each in rounds])},
        {"phase": "interrupting those that stay", "stayed_s": np.mean([each["interrupt"] for each in rounds])},
    ]
    cpu_s, columns = [0.0, 0.0], ("stayed_s", "stayed_cpu_s", "new_s", "new_cpu_s")
    for name in dict.fromkeys(name for name, *_ in PHASES):
        stayed = [max((rank.get(name, (0, 0)) for rank in each["phases"][:-1]), default=(0, 0)) for each in rounds]
        new = [each["phases"][-1].get(name, (0.0, 0.0)) for each in rounds]
        means = [float(np.mean(column)) for pairs in (stayed, new) for column in zip(*pairs, strict=True)]
        cpu_s = [cpu_s[0] + means[1], cpu_s[1] + means[3]]
        if any(means):
            rows.append({"phase": name, **dict(zip(columns, means, strict=True))})
    rows.append({"phase": "sum of processor time", "stayed_cpu_s": cpu_s[0], "new_cpu_s": cpu_s[1]})
    rows.append({"phase": "update after it, with copies", "stayed_s": np.mean([each["update"] for each in rounds])})
    return rows


def measure_updates(ranks: list[Rank], args: argparse.Namespace, number: int) -> list[Row]:
    """Time updates with copies and without, in turns: a row of each, and their ratio.

    Of two updates with copies the second counts: it computes while the first one's copies are sent.
    """
    found: dict[str, list[tuple[float, float]]] = {"with copies": [], "without copies": []}
    for _ in range(args.updates):
        for what, times in found.items():
            all_do(ranks, what)
            for _ in range(1 + (what == "with copies")):
                wall_s, phases = all_do(ranks, "update", make_groups(args, number), 1, number)
                number += 1
            times.append((wall_s, sum(cpu_s for each in phases for _, cpu_s in each.values()) / len(ranks)))
    rows: list[Row] = []
    for what, times in found.items():
        wall_s, cpu_s = (float(np.median(column)) for column in zip(*times, strict=True))
        rows.append({"phase": f"update {what}, median", "stayed_s": wall_s, "stayed_cpu_s": cpu_s})
    ratios = {key: float(rows[0][key]) / float(rows[1][key]) for key in ("stayed_s", "stayed_cpu_s")}
    return [*rows, {"phase": "ratio of the two", **ratios}]


def model_folder(num_layers: int) -> Path:
    """Return a model of the shape of SmolLM2-135M, where it has 30 layers."""
    folder = cache_folder() / f"llama-576-{num_layers}"
    if not (folder / "model.safetensors").exists():
        tiny_model(
            folder,
            "llama",
            vocab_size=49152,
            hidden_size=576,
            num_layers=num_layers,
            num_heads=9,
            num_kv_heads=3,
            spread=0.02,
            config={"intermediate_size": 1536},
        )
    return folder


def main() -> None:
    """Print a table."""
    numbers = {"ranks": 2, "layers": 30, "repeats": 2, "updates": 3, "prompts": 2, "samples": 4, "tokens": 60}
    parser = parser_of(__doc__, **numbers)
    args = parser.parse_args()
    model = model_folder(args.layers)
    with tempfile.TemporaryDirectory() as name:
        path = small_grpo_run(Path(name), model)
        config = load_config(path, GrpoConfig, [*WORDS, f"--engine.num_ranks={args.ranks}"])
        rows = measure(args, config, model, Path(name))
    show(rows, as_json=args.json)


def measure(args: argparse.Namespace, config: GrpoConfig, model: Path, folder: Path) -> list[Row]:
    """Return all rows."""
    everyone = [Rank(config, model, folder) for _ in range(args.ranks + args.repeats)]  # this process has no thread yet
    ranks, spares = everyone[: args.ranks], everyone[args.ranks :]
    store, places = open_rendezvous(LOOPBACK, args.ranks)
    try:
        _start(ranks, places)
        for spare in spares:
            spare.call("start", {"is_spare": True})
            spare.answer()
        rounds, number = [], 0
        for spare in spares:
            update_s, _ = all_do(ranks, "update", make_groups(args, number), 1, number)
            number += 1
            rounds.append(replace(ranks, spare, number, make_groups(args, number), update_s / 3))
            number += 1
        return [*rows_of(rounds), *measure_updates(ranks, args, number)]
    finally:
        del store
        for rank in everyone:
            rank.process.kill()


def _start(ranks: list[Rank], places: list[Rendezvous]) -> None:
    for rank, place in zip(ranks, places, strict=True):
        rank.call("start", {"rendezvous": place})
    for rank in ranks:
        rank.answer()


if __name__ == "__main__":
    main()
