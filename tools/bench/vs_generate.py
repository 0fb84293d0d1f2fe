"""Generation with log-probabilities: rollout-torch beside transformers `generate()`, by turns in one process.

    python tools/bench/vs_generate.py MODEL_FOLDER [--batch 8 32] [--new 64] [--threads 2] [--repeats 3] [--json]

Both get the same prompts (48 tokens each, drawn once), sample at temperature 1 without an end-of-sequence token, and
return the log-probability of every token. Printed: the median tokens/s of each, and the median of the turns' ratios.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.harness import parser_of, show, take_turns

from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_types import GenerateRequest, RolloutEngineConfig, SamplingParams

PROMPT_TOKENS = 48
WARM_UP_TOKENS = 4

Prompts = np.ndarray[Any, np.dtype[np.int32]]
Generate = Callable[[Prompts, int], int]
"""Generates so many tokens for each prompt, and counts log-probabilities."""


def ours(folder: Path, threads: int) -> Generate:
    """With rollout-torch."""
    loop = asyncio.new_event_loop()
    config = RolloutEngineConfig(model_path=str(folder), num_threads=threads, device="cpu", max_model_len=1024)
    engine = loop.run_until_complete(TorchRolloutEngine.create(config))

    async def generate(prompts: Prompts, num_new: int) -> int:
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        requests = [
            GenerateRequest(request_id=str(i), prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)
        ]
        done = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(completion.logprobs) for (completion,) in done)

    return lambda prompts, num_new: loop.run_until_complete(generate(prompts, num_new))


def peer(folder: Path, threads: int) -> Generate:
    """With transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, num_new: int) -> int:
        torch.set_num_threads(threads)
        ids = torch.from_numpy(prompts).long()
        lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new}
        told = {"return_dict_in_generate": True, "output_logits": True}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **lengths, **told)
        # Token by token: all [batch, new, vocabulary] log-probabilities at once would need gigabytes.
        chosen = [
            logits.log_softmax(-1).gather(-1, ids_B[:, None])
            for logits, ids_B in zip(out.logits, out.sequences[:, PROMPT_TOKENS:].unbind(1), strict=True)
        ]
        return sum(column.numel() for column in chosen)

    return generate


def compare(sides: dict[str, Generate], prompts: Prompts, num_new: int, repeats: int) -> dict[str, float]:
    """One row."""

    def tokens_per_s(generate: Generate) -> float:
        start_s = time.perf_counter()
        return generate(prompts, num_new) / (time.perf_counter() - start_s)

    for generate in sides.values():
        generate(prompts, WARM_UP_TOKENS)
    turns = take_turns({name: lambda side=side: tokens_per_s(side) for name, side in sides.items()}, repeats)  # type: ignore[misc]
    ratio = statistics.median(one / other for one, other in zip(*turns.values(), strict=True))
    return {"batch": len(prompts), **{name: statistics.median(each) for name, each in turns.items()}, "ratio": ratio}


def main(arguments: list[str] | None = None) -> None:
    """Compare and print."""
    parser = parser_of(__doc__, new=64, threads=2, repeats=3)
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    args = parser.parse_args(arguments)
    vocabulary = json.loads((args.folder / "config.json").read_text())["vocab_size"]
    sides = {"rollout_torch": ours(args.folder, args.threads), "generate": peer(args.folder, args.threads)}
    rows = []
    for batch in args.batch:
        prompts = np.random.default_rng(batch).integers(3, vocabulary, (batch, PROMPT_TOKENS), dtype=np.int32)
        rows.append(compare(sides, prompts, args.new, args.repeats))
    show(rows, as_json=args.json, title=f"tokens/s, float32, {args.threads} threads, {args.new} new tokens")


if __name__ == "__main__":
    main()
