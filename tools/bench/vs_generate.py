"""Generation with log-probabilities: rollout-torch beside transformers `generate()` and vLLM, by turns.

    python tools/bench/vs_generate.py MODEL_FOLDER [--batch 1 8 32] [--group 8] [--group-prompt 1024] [--new 64]
        [--threads 2] [--repeats 3] [--dtype bfloat16] [--temperature 1.0] [--json]

Each lives in a process of its own, as it does in a run: OpenMP's threads wait less patiently in a process that has more
of them than there are processors. All get the same prompts, new ones at every turn, sample without an end-of-sequence
token, and return the log-probability of every token. A peer that is not installed is left out. The rows:

- `batch B`: B prompts of 48 tokens, one sample each.
- `group N`: N samples of one long prompt.
- `top_p 0.95`: the largest batch, beside itself without top_p.

Printed: the median tokens/s of each, and for each peer the median of the turns' ratios, ours over the peer's. Random
weights have nearly flat logits: give a low --temperature, such as 0.3, to have a top_p that keeps few tokens.
"""

import asyncio
import importlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.harness import parser_of, show, take_turns

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams
from offbeat_rollout_torch import TorchRolloutEngine

PROMPT_TOKENS = 48
TOP_P = 0.95
WARM_UP_TOKENS = 4
TURN_TIMEOUT_S = 600
OURS, WITHOUT = "rollout_torch", "without top_p"


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one turn: `num_samples` of `num_new` tokens for each of `prompts`, [P, T] int32."""

    prompts: np.ndarray[Any, np.dtype[np.int32]]
    num_samples: int = 1
    num_new: int
    temperature: float
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Purpose of an engine."""

    folder: Path
    dtype: str
    threads: int
    max_model_len: int


Generate = Callable[[Work], int]
"""Does a turn's work, and counts log-probabilities."""


def ours(setup: Setup) -> Generate:
    """Generate with rollout-torch."""
    loop = asyncio.new_event_loop()
    config = RolloutEngineConfig(
        model_path=str(setup.folder),
        num_threads=setup.threads,
        device="cpu",
        dtype=setup.dtype,
        max_model_len=setup.max_model_len,
    )
    engine = loop.run_until_complete(TorchRolloutEngine.create(config))

    async def generate(work: Work) -> int:
        params = SamplingParams(
            max_tokens=work.num_new, temperature=work.temperature, top_p=work.top_p, ignore_eos=True
        )
        requests = [
            GenerateRequest(request_id=str(i), prompt_ids=prompt, num_samples=work.num_samples, params=params)
            for i, prompt in enumerate(work.prompts)
        ]
        done = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(completion.logprobs) for group in done for completion in group)

    return lambda work: loop.run_until_complete(generate(work))


def transformers_generate(setup: Setup) -> Generate:
    """Generate with transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=getattr(torch, setup.dtype))
    model.eval()

    @torch.inference_mode()
    def generate(work: Work) -> int:
        torch.set_num_threads(setup.threads)
        ids = torch.from_numpy(work.prompts).long()
        lengths = {"max_new_tokens": work.num_new, "min_new_tokens": work.num_new}
        drawn = {"do_sample": True, "top_k": 0, "top_p": work.top_p, "temperature": work.temperature}
        asked = {"return_dict_in_generate": True, "output_logits": True, "num_return_sequences": work.num_samples}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **drawn, **lengths, **asked)
        # Token by token: all [batch, new, vocabulary] log-probabilities at once would need gigabytes.
        chosen = [
            (logits.float() / work.temperature).log_softmax(-1).gather(-1, ids_B[:, None])
            for logits, ids_B in zip(out.logits, out.sequences[:, ids.shape[1] :].unbind(1), strict=True)
        ]
        return sum(column.numel() for column in chosen)

    return generate


def vllm_generate(setup: Setup) -> Generate:
    """Generate with vLLM in this process."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
    }
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    vllm: Any = importlib.import_module("vllm")

    engine: Any = vllm.LLM(
        str(setup.folder),
        dtype=setup.dtype,
        max_model_len=setup.max_model_len,
        max_num_seqs=64,
        logprobs_mode="processed_logprobs",
    )

    def generate(work: Work) -> int:
        params = vllm.SamplingParams(
            n=work.num_samples,
            max_tokens=work.num_new,
            temperature=work.temperature,
            top_p=work.top_p,
            ignore_eos=True,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in work.prompts]
        done = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(completion.logprobs) for request in done for completion in request.outputs)

    return generate


def compare(sides: Mapping[str, tuple[Generate, Work]], vocabulary: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return tokens/s of each side by name, and our ratio to each other one; every turn has its own prompts."""
    turn = dict.fromkeys(sides, 0)

    def tokens_per_s(name: str) -> float:
        turn[name] += 1
        generate, work = sides[name]
        prompts = np.random.default_rng(turn[name]).integers(3, vocabulary, work.prompts.shape, dtype=np.int32)
        start_s = time.perf_counter()
        return generate(replace(work, prompts=prompts)) / (time.perf_counter() - start_s)

    for generate, work in sides.values():
        generate(replace(work, num_new=WARM_UP_TOKENS))
    turns = take_turns({name: lambda name=name: tokens_per_s(name) for name in sides}, repeats)  # type: ignore[misc]
    ratios = {
        name: statistics.median(one / other for one, other in zip(turns[OURS], theirs, strict=True))
        for name, theirs in turns.items()
        if name != OURS
    }
    return {"tokens/s": {name: statistics.median(each) for name, each in turns.items()}, "ratio": ratios}


def works_of(args: Any) -> dict[str, Work]:
    """Return the rows that every engine has a part in, by name."""

    def work(num_prompts: int, num_tokens: int, num_samples: int = 1) -> Work:
        prompts = np.full((num_prompts, num_tokens), 3, np.int32)
        return Work(prompts=prompts, num_samples=num_samples, num_new=args.new, temperature=args.temperature)

    batches = {f"batch {batch}": work(batch, PROMPT_TOKENS) for batch in args.batch}
    return {**batches, f"group {args.group}": work(1, args.group_prompt, args.group)}


def serve(connection: Any, build: Callable[[Setup], Generate], setup: Setup) -> None:
    """Do the work of turns in this process until None arrives."""
    generate = build(setup)
    while (work := connection.recv()) is not None:
        connection.send(generate(work))


class Worker:
    """A process that generates."""

    def __init__(self, build: Callable[[Setup], Generate], setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, build, setup), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, work: Work) -> int:
        """Send it a turn's work; return the number of its log-probabilities."""
        self._connection.send(work)
        if not self._connection.poll(TURN_TIMEOUT_S):
            raise SystemExit(f"{self._process.name} has generated nothing for {TURN_TIMEOUT_S} s")
        return int(self._connection.recv())

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join(TURN_TIMEOUT_S)


def engines_of(args: Any) -> dict[str, Worker]:
    """Return our engine, and the installed peers."""
    longest = max(PROMPT_TOKENS, args.group_prompt) + args.new
    setup = Setup(folder=args.folder, dtype=args.dtype, threads=args.threads, max_model_len=longest)
    peers = {"generate": ("transformers", transformers_generate), "vllm": ("vllm", vllm_generate)}
    there = {name: build for name, (module, build) in peers.items() if importlib.util.find_spec(module) is not None}
    return {name: Worker(build, setup) for name, build in {OURS: ours, **there}.items()}


def main(arguments: list[str] | None = None) -> None:
    """Compare and print."""
    parser = parser_of(__doc__, new=64, threads=2, repeats=3, group=8, group_prompt=1024)
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args(arguments)
    vocabulary = json.loads((args.folder / "config.json").read_text())["vocab_size"]
    engines, works = engines_of(args), works_of(args)
    found = {
        title: compare({name: (engine, work) for name, engine in engines.items()}, vocabulary, args.repeats)
        for title, work in works.items()
    }
    plain = works[f"batch {max(args.batch)}"]
    with_and_without = {OURS: (engines[OURS], replace(plain, top_p=TOP_P)), WITHOUT: (engines[OURS], plain)}
    found[f"top_p {TOP_P}"] = compare(with_and_without, vocabulary, args.repeats)
    for engine in engines.values():
        engine.close()
    names = [*engines, WITHOUT]
    rows = [
        {
            "work": title,
            **{name: each["tokens/s"].get(name, "") for name in names},
            **{f"ratio to {name}": each["ratio"].get(name, "") for name in names if name != OURS},
        }
        for title, each in found.items()
    ]
    show(rows, as_json=args.json, title=f"tokens/s, {args.dtype}, {args.threads} threads, {args.new} new tokens")


if __name__ == "__main__":
    main()
