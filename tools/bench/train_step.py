"""Seconds of one training step of offbeat-engine-torch: shared and unshared prompts, float32 and bfloat16.

    python tools/bench/train_step.py MODEL_FOLDER [--threads 2] [--prompts 8] [--samples 8] [--steps 2] [--profile]

A step is `forward_backward` over prompts x samples sequences with a policy-gradient loss, then `step`; the best of all
counts. `cpu_s` is processor time of `forward_backward` over all threads, on a busy machine the steadier figure, and
`all_cpu_s` that of each step. `floor_s` is what its matrix products would take at `gflops`, the rate of one large
product in the same format, measured in processor time after each step: three products for each weight and token, and
attention not counted. By layout of ranks: tools/bench/megatron_step.py.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.harness import Row, parser_of, show

from offbeat_core import LossTokens, Metrics, TrainEngineConfig, TrainSequence, load_backend


def sequence_of(ids: "np.ndarray[Any, Any]", num_prompt: int, advantage: float) -> TrainSequence:
    """Make a sequence of [T] tokens; the first `num_prompt` are the prompt."""
    extras = {"advantage": np.full(len(ids), advantage, np.float32)}
    return TrainSequence(ids=ids.astype(np.int32), loss_mask=np.arange(len(ids)) >= num_prompt, extras=extras)


def make_sequences(args: argparse.Namespace, vocabulary: int) -> list[TrainSequence]:
    """Make groups of `samples` completions of one random prompt; completion lengths vary evenly about their mean."""
    rng = np.random.default_rng(0)
    shortest = max(1, args.completion_tokens * 2 // 5)
    sequences = []
    for _ in range(args.prompts):
        prompt = rng.integers(0, vocabulary, args.prompt_tokens)
        for _ in range(args.samples):
            length = int(rng.integers(shortest, 2 * args.completion_tokens - shortest + 1))
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, length)])
            sequences.append(sequence_of(ids, len(prompt), rng.normal()))
    return sequences


def policy_gradient(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    """Return the plainest policy loss."""
    return -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens, {}


def matrix_rate(dtype: str) -> float:
    """Measure GFLOP/s of processor time, over all threads, of a product of the size of a micro-batch."""
    left, right = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((2048, 1536), (1536, 1536)))
    start = time.process_time()
    torch.mm(left, right)
    return float(2 * left.numel() * right.shape[1] / (time.process_time() - start) / 1e9)


def count_flops(engine: Any, packed: float, sequences: list[TrainSequence]) -> float:
    """Count the operations of the blocks' products for each packed token, and of the head's for each loss token."""
    matrices = {name: tensor for name, tensor in engine.weights() if tensor.ndim == 2}
    blocks = sum(tensor.numel() for name, tensor in matrices.items() if ".layers." in name)
    head = max(tensor.numel() for tensor in matrices.values() if len(tensor) == engine.vocabulary_size)
    return float(6 * (packed * blocks + head * sum(int(sequence.loss_mask.sum()) for sequence in sequences)))


def measure(args: argparse.Namespace, dtype: str, *, share_prompts: bool) -> Row:
    """Return one row."""
    options = {"share_prompts": share_prompts, "head_dtype": "float32"}
    config = TrainEngineConfig(
        model_path=args.model,
        num_threads=args.threads,
        options=options,
        dtype=dtype,
        max_tokens_per_microbatch=args.budget,
    )
    engine = load_backend("offbeat.engine", "torch").create(config)
    sequences = make_sequences(args, engine.vocabulary_size)
    seconds, packed, gflops = [], 0.0, 0.0
    for _ in range(args.steps):
        start, start_processor = time.perf_counter(), time.process_time()
        packed = engine.forward_backward(sequences, policy_gradient)["packed_tokens"].value
        middle, middle_processor = time.perf_counter(), time.process_time()
        engine.step()
        seconds.append((middle - start, time.perf_counter() - middle, middle_processor - start_processor))
        gflops = max(gflops, *(matrix_rate(dtype) for _ in range(3)))
    floor_s = count_flops(engine, packed, sequences) / gflops / 1e9
    if args.profile:
        with torch.profiler.profile() as profile:
            engine.forward_backward(sequences, policy_gradient)
            engine.step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
    engine.close()
    work_s, step_s, cpu_s = map(min, zip(*seconds, strict=True))
    speed = {"samples_per_s": len(sequences) / (work_s + step_s), "packed": packed, "tokens_per_s": packed / work_s}
    what = {"dtype": dtype, "prompts": "shared" if share_prompts else "unshared"}
    floor = {"gflops": gflops, "floor_s": floor_s, "above_floor": cpu_s / floor_s}
    raw = {"all_cpu_s": " ".join(f"{each[2]:.2f}" for each in seconds)}
    return {**what, "forward_backward_s": work_s, "step_s": step_s, "cpu_s": cpu_s, **floor, **speed, **raw}


def main() -> None:
    """Print a table."""
    numbers = {"threads": 2, "prompts": 8, "samples": 8, "prompt_tokens": 60, "completion_tokens": 30, "steps": 2}
    parser = parser_of(__doc__, **numbers, budget=8192)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only-shared", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    choices = (True,) if args.only_shared else (False, True)
    rows = [measure(args, dtype, share_prompts=shared) for dtype in args.dtypes for shared in choices]
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
