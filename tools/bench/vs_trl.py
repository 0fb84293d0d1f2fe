"""offbeat beside TRL 1.16: GRPO samples/s, SFT tokens/s, and memory of one GRPO step. Same model, data and CPUs.

    python tools/bench/vs_trl.py MODEL_FOLDER [--only grpo sft memory] [--dtypes float32 bfloat16] [--steps 2] [--json]

- grpo: 8 prompts x 8 samples a step, at most 48 new tokens at temperature 1, one optimizer step per 64 samples, no KL
  term. offbeat is the real application, with its defaults but for what the comparison fixes. It generates ahead, so it
  runs two updates more than are timed: the last ones would train on samples made before the clock ran.
- sft: 32 sequences of 32 to 512 tokens a step, a loss on every token; TRL pads batches of 8.
- memory: forward and backward of 8 sequences of 512 tokens in one micro-batch: the peak above what the process held.

With bfloat16 the main weights stay float32 on both sides (TRL: autocast). TRL gets processes and an environment of its
own, made once with uv and kept. Both sides are bound to the same `--threads` CPUs. The first step is not timed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import Row, parser_of, peer_python, show

WARM_UP_STEPS: Final = 1
DRAIN_STEPS: Final = 2
PEER_PACKAGES: Final = ("trl==1.16.*", "transformers>=5,<6", "datasets", "accelerate")
PEER_PROGRAM: Final = Path(__file__).with_name("peer_trl.py")
RUN_TIMEOUT_S: Final = 3600
LEARNING_RATE: Final = 1e-5
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 48
SFT_SEQUENCES, SFT_LENGTHS, SFT_BATCH = 32, (32, 512), 8
MEMORY_SEQUENCES, MEMORY_TOKENS, MEMORY_PROMPT = 8, 512, 64  # TRL takes more than 10 GB

OFFBEAT_TOML: Final = """\
[model]
path = "{model}"
[data]
path = "{data}"
max_prompt_tokens = 208
shuffle = false
[reward]
name = "number_match"
[rollout]
dtype = "{dtype}"
samples_per_prompt = 8
max_tokens = 48
max_model_len = 256
[engine]
dtype = "{dtype}"
learning_rate = 1e-5
[async]
mini_batch_size = 8
staleness_threshold = 1
partial_rollout = true
[checkpoint]
every = 0
keep = 1
save_optimizer = false
[log]
tensorboard = false
"""


def write_sums(path: Path, num_rows: int) -> None:
    """Write short arithmetic questions as chat messages, with their answers."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            one, other = draw.randint(1, 99), draw.randint(1, 99)
            prompt = [{"role": "user", "content": f"What is {one} + {other}?"}]
            file.write(json.dumps({"prompt": prompt, "answer": str(one + other)}) + "\n")


def make_job(args: argparse.Namespace, kind: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Return the job that both sides get."""
    steps = WARM_UP_STEPS + args.steps
    job = {"kind": kind, "dtype": dtype, "model": str(args.model), "threads": args.threads, "steps": steps}
    job |= {"learning_rate": LEARNING_RATE, "folder": str(folder)}
    if kind == "grpo":
        write_sums(folder / "sums.jsonl", (steps + DRAIN_STEPS) * PROMPTS)
        return job | {"prompts": PROMPTS, "samples": SAMPLES, "max_tokens": NEW_TOKENS}
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    lengths = [draw.randint(*SFT_LENGTHS) for _ in range(steps * SFT_SEQUENCES)]
    if kind == "memory":
        lengths = [MEMORY_TOKENS] * MEMORY_SEQUENCES
    rows = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    (folder / "ids.json").write_text(json.dumps(rows))
    return job | {"sequences": SFT_SEQUENCES, "batch": SFT_BATCH, "prompt": MEMORY_PROMPT}


def samples_per_s(end_s: list[float], num_samples: int) -> float:
    """Return samples/s over the steps after the warm-up, from the time at which each step ended."""
    return (len(end_s) - WARM_UP_STEPS) * num_samples / (end_s[-1] - end_s[WARM_UP_STEPS - 1])


def tokens_per_s(end_s: list[float], folder: Path) -> float:
    """Return the same as `samples_per_s` for tokens: those of each step are the next in the file."""
    lengths = [len(ids) for ids in json.loads((folder / "ids.json").read_text())]
    return sum(lengths[WARM_UP_STEPS * SFT_SEQUENCES :]) / (end_s[-1] - end_s[WARM_UP_STEPS - 1])


def figure(kind: str, found: list[float], folder: Path) -> float:
    """Return the number of one side, from what it noted: ends of steps in seconds, or the peak in bytes."""
    if kind == "memory":
        return found[0] / 2**20
    return samples_per_s(found, PROMPTS * SAMPLES) if kind == "grpo" else tokens_per_s(found, folder)


def run_offbeat(job: dict[str, Any]) -> list[float]:
    """Run our side of a job, in a process of its own."""
    folder = Path(job["folder"])
    if job["kind"] != "grpo":
        _run("offbeat", [sys.executable, __file__, job["model"], "--job", json.dumps(job)], job["threads"])
        return list(json.loads((folder / "offbeat.json").read_text()))
    (folder / "job.toml").write_text(OFFBEAT_TOML.format(**job, data=folder / "sums.jsonl"))
    run = folder / "run"
    command = [sys.executable, "-m", "grpo_async_app", "train", str(folder / "job.toml"), "--out", str(run)]
    _run("offbeat", [*command, "--engine.max_updates", str(job["steps"] + DRAIN_STEPS)], job["threads"])
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["time_s"] for row in rows if "perf/update_s" in row][: job["steps"]]


def run_trl(job: dict[str, Any]) -> list[float]:
    """Run TRL's side of a job."""
    _run("TRL", [peer_python("trl-1.16", *PEER_PACKAGES), str(PEER_PROGRAM), json.dumps(job)], job["threads"])
    return list(json.loads((Path(job["folder"]) / "trl.json").read_text()))


def train_here(job: dict[str, Any]) -> None:
    """Run SFT, or one GRPO step for its memory, on the engine alone."""
    import numpy as np

    from offbeat_core import TrainEngineConfig, TrainSequence, load_backend
    from offbeat_objectives import AlgorithmConfig, build_loss, sft_loss

    config = TrainEngineConfig(model_path=job["model"], dtype=job["dtype"], num_threads=job["threads"], device="cpu")
    engine = load_backend("offbeat.engine", "torch").create(config)
    first = job["prompt"] if job["kind"] == "memory" else 1
    sequences = []
    for ids in json.loads((Path(job["folder"]) / "ids.json").read_text()):
        extras = {"advantages": np.full(len(ids), 0.5, np.float32)}
        mask = np.arange(len(ids)) >= first
        sequences.append(TrainSequence(ids=np.array(ids, np.int32), loss_mask=mask, extras=extras))
    found: list[float] = []
    if job["kind"] == "memory":
        loss = build_loss(AlgorithmConfig(), single_step=True)
        for _ in range(2):
            held = begin_peak()
            engine.forward_backward(sequences, loss)
            found = [peak() - held]
            engine.step()
    else:
        for start in range(0, len(sequences), job["sequences"]):
            engine.forward_backward(sequences[start : start + job["sequences"]], sft_loss)
            engine.step()
            found.append(time.time())
    (Path(job["folder"]) / "offbeat.json").write_text(json.dumps(found))


def begin_peak() -> float:
    """Reset the highest memory use of this process; return the bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> float:
    """Return the highest memory use since `begin_peak`, bytes."""
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _run(name: str, command: list[str], threads: int) -> None:
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


UNITS: Final = {"grpo": "GRPO, samples/s", "sft": "SFT, tokens/s", "memory": "GRPO step of 4,096 tokens, MiB"}
SIDES: Final[dict[str, Callable[[dict[str, Any]], list[float]]]] = {"offbeat": run_offbeat, "trl": run_trl}


def compare(args: argparse.Namespace, kind: str, dtype: str) -> Row:
    """Return one row: medians over the rounds, and the median of the rounds' ratios."""
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(args.repeats):
        for name, run in SIDES.items():
            with tempfile.TemporaryDirectory() as temporary:
                job = make_job(args, kind, dtype, Path(temporary))
                found[name].append(figure(kind, run(job), Path(temporary)))
    ratio = statistics.median(ours / other for ours, other in zip(found["offbeat"], found["trl"], strict=True))
    return {"what": UNITS[kind], "dtype": dtype, **{k: statistics.median(v) for k, v in found.items()}, "ratio": ratio}


def main() -> None:
    """Compare and print."""
    parser = parser_of(__doc__, steps=2, threads=2, repeats=1)
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--only", nargs="+", default=list(UNITS), choices=list(UNITS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        train_here(args.job)
        return
    if hasattr(os, "sched_setaffinity"):  # inherited by every process of both sides
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    rows = [compare(args, kind, dtype) for kind in args.only for dtype in args.dtypes]
    show(rows, as_json=args.json, title=f"offbeat and TRL 1.16, {args.threads} threads")


if __name__ == "__main__":
    main()
