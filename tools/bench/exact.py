"""Price of exact numerics: seconds of a training step and of sampling, native and exact in turns.

    python tools/bench/exact.py MODEL_FOLDER [--dtypes float32 bfloat16] [--threads 1] [--samples 8] [--repeats 3]
        [--prompt-tokens 64] [--completion-tokens 64] [--budget 2048]

Each side samples a group of each of two prompts, and takes a training step over what the exact side has sampled; the
best of all counts, in processor time over all threads, which a busy machine changes less. `price` is exact over native.
`differ` counts tokens whose log-probabilities are not equal, to the bit, in the exact trainer and sampler.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from bench.harness import Row, parser_of, show, take_turns

from offbeat_core import (
    Completion,
    GenerateRequest,
    Metrics,
    RolloutEngineConfig,
    SamplingParams,
    TrainEngineConfig,
    TrainSequence,
    load_backend,
)

NUM_PROMPTS = 2


def sample(engine: Any, requests: list[GenerateRequest], loop: asyncio.AbstractEventLoop) -> list[list[Completion]]:
    """Generate all requests together."""

    async def together() -> list[list[Completion]]:
        return list(await asyncio.gather(*(engine.generate(each) for each in requests)))

    return loop.run_until_complete(together())


def sequences_of(requests: list[GenerateRequest], groups: list[list[Completion]]) -> list[TrainSequence]:
    """Make a sequence of each completion, with what the sampler has found beside it."""
    found = []
    for request, group in zip(requests, groups, strict=True):
        for one in group:
            ids = np.concatenate([request.prompt_ids, one.ids]).astype(np.int32)
            start = len(request.prompt_ids)
            sampled = np.concatenate([np.zeros(start, np.float32), one.logprobs])
            found.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= start, extras={"sampled": sampled}))
    return found


def loss(tokens: Any) -> tuple[Any, Metrics]:
    """Return a loss that every token has a gradient of."""
    return -tokens.logprobs_N.mean(), {}


def processor_seconds(work: Any) -> float:
    """Run the work; return the seconds that all threads took."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(args: Any, dtype: str) -> list[Row]:
    """Return a row of sampling, one of its prompts alone, and one of training."""
    loop, draw = asyncio.new_event_loop(), np.random.default_rng(0)
    shared = {"model_path": args.model, "dtype": dtype, "device": "cpu", "num_threads": args.threads}
    longest = args.prompt_tokens + args.completion_tokens
    samplers, trainers = {}, {}
    for numerics in ("native", "exact"):
        options = {"numerics": numerics}
        rollout = RolloutEngineConfig(**shared, max_model_len=longest, options={**options, "prefix_cache_share": 0.0})
        samplers[numerics] = loop.run_until_complete(load_backend("offbeat.rollout", "torch").create(rollout))
        train = TrainEngineConfig(**shared, max_tokens_per_microbatch=args.budget, options=options)
        trainers[numerics] = load_backend("offbeat.engine", "torch").create(train)
    vocabulary = trainers["exact"].vocabulary_size
    prompts = [draw.integers(0, vocabulary, args.prompt_tokens).astype(np.int32) for _ in range(NUM_PROMPTS)]

    def requests(num_tokens: int) -> list[GenerateRequest]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
        return [
            GenerateRequest(request_id=str(number), prompt_ids=ids, num_samples=args.samples, params=params)
            for number, ids in enumerate(prompts)
        ]

    whole = requests(args.completion_tokens)
    sequences = sequences_of(whole, sample(samplers["exact"], whole, loop))
    scored = trainers["exact"].logprobs(sequences)
    differ = sum(int((found != each.extras["sampled"]).sum()) for found, each in zip(scored, sequences, strict=True))

    def step(numerics: str) -> None:
        trainers[numerics].forward_backward(sequences, loss)
        trainers[numerics].step()

    kinds: dict[str, Any] = {
        "sampling": lambda numerics: sample(samplers[numerics], whole, loop),
        "prompts": lambda numerics: sample(samplers[numerics], requests(1), loop),
        "training": step,
    }
    rows: list[Row] = []
    for kind, work in kinds.items():
        sides = {each: (lambda each=each, work=work: processor_seconds(lambda: work(each))) for each in samplers}
        best = {name: min(seconds) for name, seconds in take_turns(sides, args.repeats).items()}
        price = best["exact"] / best["native"]
        rows.append({"work": kind, "dtype": dtype, **best, "price": price, "differ": differ})
    for engine in samplers.values():
        loop.run_until_complete(engine.close())
    return rows


def main() -> None:
    """Measure and show."""
    parser = parser_of(__doc__, threads=1, samples=8, repeats=3, prompt_tokens=64, completion_tokens=64, budget=2048)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    show([row for dtype in args.dtypes for row in measure(args, dtype)], as_json=args.json)


if __name__ == "__main__":
    main()
