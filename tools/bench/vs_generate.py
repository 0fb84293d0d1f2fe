"""Generation with log-probabilities: rollout-torch beside transformers `generate()`, in one run.

    python tools/bench/vs_generate.py MODEL_FOLDER [--batch 8 32] [--new 64] [--threads 2] [--repeats 3] [--json]

Both get the same prompts (48 tokens each, drawn once), sample at temperature 1 without an end-of-sequence token, and
return the log-probability of every token. Each side is a process that stays warm; they take turns, so that what else
the machine does falls on both. Printed: the median tokens/s of each, and the median of the turns' ratios.
Where transformers is not importable, its environment is made with uv in a temporary folder.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_TOKENS = 48
WARM_UP_TOKENS = 4
ANSWER_DEADLINE_S = 600.0
"""Of one answer, the first of which also loads the model."""

Prompts = np.ndarray[Any, np.dtype[np.int32]]
Generate = Callable[[Prompts, int], int]


def draw_prompts(folder: Path, batch: int) -> Prompts:
    """[batch, PROMPT_TOKENS] int32, the same for both sides."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(batch).integers(3, vocabulary, (batch, PROMPT_TOKENS), dtype=np.int32)


def ours(folder: Path, threads: int) -> Generate:
    """Return a function that generates with rollout-torch and counts tokens."""
    from offbeat_rollout_torch import TorchRolloutEngine
    from offbeat_types import GenerateRequest, RolloutEngineConfig, SamplingParams

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
    """Return a function that generates with transformers and counts tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()

    def generate(prompts: Prompts, num_new: int) -> int:
        ids = torch.from_numpy(prompts).long()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                return_dict_in_generate=True,
                output_logits=True,
            )
            # Token by token: all [batch, new, vocabulary] log-probabilities at once would need gigabytes.
            chosen = [
                logits.log_softmax(-1).gather(-1, ids_B[:, None])
                for logits, ids_B in zip(out.logits, out.sequences[:, PROMPT_TOKENS:].unbind(1), strict=True)
            ]
        return sum(column.numel() for column in chosen)

    return generate


def serve(side: str, folder: Path, threads: int) -> None:
    """Answer each line "batch new" on stdin with tokens/s on stdout."""
    generate = {"ours": ours, "peer": peer}[side](folder, threads)
    for line in sys.stdin:
        batch, num_new = map(int, line.split())
        prompts = draw_prompts(folder, batch)
        start_s = time.perf_counter()
        num_tokens = generate(prompts, num_new)
        print(json.dumps(num_tokens / (time.perf_counter() - start_s)), flush=True)


class Side:
    """A warm process that generates when told."""

    def __init__(self, python: str, side: str, folder: Path, threads: int) -> None:
        command = [python, __file__, str(folder), "--serve", side, "--threads", str(threads)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        self._name = side
        # Not a pipe: nobody would read it while the process works.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env
        )

    def tokens_per_s(self, batch: int, num_new: int) -> float:
        """Generate once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batch} {num_new}\n")
        self._process.stdin.flush()
        # One line answers one line, so that nothing can be left in the reader's buffer when this looks at the pipe.
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_DEADLINE_S)
        if not ready:
            raise SystemExit(f"{self._name} gave no answer for {ANSWER_DEADLINE_S:g} s:\n{self._last_errors()}")
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._name} died:\n{self._last_errors()}")
        return float(json.loads(answer))

    def _last_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def peer_python(temporary: Path) -> str:
    """Return a Python that has transformers; make one where this has none."""
    if importlib.util.find_spec("transformers") is not None:
        return sys.executable
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from find_links import find_links

    links = [word for link in find_links() for word in ("--find-links", link)]
    python = temporary / "peer" / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", str(temporary / "peer")], check=True, timeout=120)
    packages = ["torch", "transformers>=5", "numpy"]
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *links, *packages], check=True, timeout=1800)
    return str(python)


def compare(folder: Path, batches: list[int], num_new: int, threads: int, repeats: int) -> list[dict[str, float]]:
    """One row per batch size."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        sides = [
            Side(sys.executable, "ours", folder, threads),
            Side(peer_python(Path(temporary)), "peer", folder, threads),
        ]
        try:
            for batch in batches:
                for side in sides:
                    side.tokens_per_s(batch, WARM_UP_TOKENS)
                turns = [[side.tokens_per_s(batch, num_new) for side in sides] for _ in range(repeats)]
                ratio = statistics.median(one / other for one, other in turns)
                medians = [statistics.median(column) for column in zip(*turns, strict=True)]
                rows.append({"batch": batch, "rollout_torch": medians[0], "generate": medians[1], "ratio": ratio})
        finally:
            for side in sides:
                side.close()
    return rows


def main() -> None:
    """Parse arguments, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=("ours", "peer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.folder, args.threads)
        return
    rows = compare(args.folder, args.batch, args.new, args.threads, args.repeats)
    if args.json:
        print(json.dumps({"threads": args.threads, "new_tokens": args.new, "rows": rows}))
        return
    print(f"tokens/s with log-probabilities, float32, {args.threads} threads, {args.new} new tokens")
    print(f"{'batch':>6}{'rollout-torch':>15}{'generate()':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row['batch']:>6}{row['rollout_torch']:>15.1f}{row['generate']:>12.1f}{row['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
