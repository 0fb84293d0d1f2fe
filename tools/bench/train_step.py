"""Seconds of one training step of offbeat-engine-torch: shared and unshared prompts, float32 and bfloat16.

    python tools/bench/train_step.py MODEL_FOLDER [--threads 2] [--prompts 8] [--samples 8] [--steps 2] [--profile]
    python tools/bench/train_step.py MODEL_FOLDER --ranks 1 2 [--tp 1]

With `--ranks` the same update runs on each number of processes in turn, with the threads shared out among them; the
seconds are the slowest rank's, the memory is the largest rank's, resident, at its peak since its start and during a
step.

`cpu s` is processor time over all threads: on a busy machine the steadier figure.
A step is `forward_backward` over prompts x samples sequences with a policy-gradient loss, then `step`.
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from offbeat_engine_torch import TorchTrainEngine
from offbeat_mesh import Mesh, join_world
from offbeat_types import LossTokens, Metrics, TrainEngineConfig, TrainSequence


def make_sequences(args: argparse.Namespace, vocabulary: int) -> list[TrainSequence]:
    """Groups of `samples` completions of one random prompt; completion lengths spread evenly about their mean."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(args.prompts):
        prompt = rng.integers(0, vocabulary, args.prompt_tokens)
        for _ in range(args.samples):
            mean = args.completion_tokens
            length = int(rng.integers(max(1, mean * 2 // 5), 2 * mean - max(1, mean * 2 // 5) + 1))
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, length)]).astype(np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            advantage = np.full(len(ids), rng.normal(), np.float32)
            sequences.append(TrainSequence(ids=ids, loss_mask=mask, extras={"advantage": advantage}))
    return sequences


def policy_gradient(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    """The plainest policy loss."""
    return -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens, {}


def measure(args: argparse.Namespace, **changes: Any) -> tuple[float, float, float, float]:
    """Best seconds of `forward_backward`, of `step`, of processor time for both, and packed tokens."""
    shared = changes.pop("share_prompts")
    options = {"share_prompts": shared, "head_dtype": changes.pop("head_dtype", "float32")}
    config = TrainEngineConfig(model_path=args.model, num_threads=args.threads, options=options, **changes)
    engine = TorchTrainEngine.create(config)
    sequences = make_sequences(args, engine.vocabulary_size)
    forward_backward, step, processor, packed = [], [], [], 0.0
    for _ in range(args.steps):
        start, start_processor = time.perf_counter(), time.process_time()
        packed = engine.forward_backward(sequences, policy_gradient)["packed_tokens"].value
        middle = time.perf_counter()
        engine.step()
        forward_backward.append(middle - start)
        step.append(time.perf_counter() - middle)
        processor.append(time.process_time() - start_processor)
    if args.profile:
        with torch.profiler.profile() as profile:
            engine.forward_backward(sequences, policy_gradient)
            engine.step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
    engine.close()
    return min(forward_backward), min(step), min(processor), packed


def measure_rank(rank: int, size: int, store: str, args: argparse.Namespace, results: Any) -> None:
    """One process of `size`: put the seconds of its best step, packed tokens and memory into `results`."""
    torch.set_num_threads(max(1, args.threads // size))
    with join_world(rank=rank, size=size, store=FileStore(store, size), device="cpu"):
        mesh = Mesh(dp=size // args.tp if size > 1 else 1, tp=args.tp if size > 1 else 1)
        config = TrainEngineConfig(
            model_path=args.model, dtype=args.dtypes[0], max_tokens_per_microbatch=args.budget, device="cpu"
        )
        engine = TorchTrainEngine.create(config, mesh if size > 1 else None)
        sequences = make_sequences(args, engine.vocabulary_size)
        seconds, packed = [], 0.0
        loaded = mesh.device.memory().peak_bytes
        for _ in range(args.steps):
            mesh.device.reset_peak_memory()
            start = time.perf_counter()
            packed = engine.forward_backward(sequences, policy_gradient)["packed_tokens"].value
            engine.step()
            seconds.append(time.perf_counter() - start)
        results.put(
            (min(seconds), packed, mesh.device.memory().allocated_bytes, loaded, mesh.device.memory().peak_bytes)
        )
        engine.close()


def compare_ranks(args: argparse.Namespace) -> None:
    """Print one line for each number of processes."""
    columns = ("step s", "tokens/s", "packed", "MB now", "MB load", "MB step")
    print(f"{'ranks':6}", *(f"{column:>10}" for column in columns))
    context = multiprocessing.get_context("spawn")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results, store = context.Queue(), str(Path(folder) / "store")
            members = [
                context.Process(target=measure_rank, args=(rank, size, store, args, results)) for rank in range(size)
            ]
            for member in members:
                member.start()
            found = [results.get(timeout=1800) for _ in members]
            for member in members:
                member.join()
        seconds, packed, *memory = (max(figures) for figures in zip(*found, strict=True))
        figures = (seconds, packed / seconds, packed, *(figure / 2**20 for figure in memory))
        print(f"{size:<6}", *(f"{figure:10.2f}" for figure in figures), flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("threads", 2), ("prompts", 8), ("samples", 8), ("prompt-tokens", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--completion-tokens", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only-shared", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[])
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    if args.ranks:
        compare_ranks(args)
        return
    columns = ("fwd+bwd s", "step s", "cpu s", "samples/s", "packed", "tokens/s")
    print(f"{'dtype':10} {'prompts':9}", *(f"{column:>10}" for column in columns))
    for dtype in args.dtypes:
        for shared in (True,) if args.only_shared else (False, True):
            work, step, processor, packed = measure(
                args, dtype=dtype, share_prompts=shared, max_tokens_per_microbatch=args.budget
            )
            samples, label = args.prompts * args.samples / (work + step), "shared" if shared else "unshared"
            figures = (work, step, processor, samples, packed, packed / work)
            print(f"{dtype:10} {label:9}", *(f"{figure:10.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
