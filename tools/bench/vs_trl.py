"""GRPO samples/s of offbeat beside TRL's GRPOTrainer: same model, prompts, batch and CPUs, one after the other.

    python tools/bench/vs_trl.py MODEL_FOLDER [--steps 2] [--json FILE]

Both train all weights in float32 on 8 prompts x 8 samples a step, at most 48 new tokens at temperature 1, learning
rate 1e-5, no KL term, one optimizer step per 64 samples, on short sums through the model's chat template. offbeat is
the real application, `grpo-async-app train`; TRL gets a process and an environment of its own, made once and kept.

Timed from the end of the first step to the end of the last measured one. offbeat generates ahead, so its run goes on
for two more updates that are not timed: otherwise the last ones would train on samples made before the clock ran.
Both are bound to the same `--threads` CPUs.
"""

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 1
DRAIN_STEPS = 2
"""Updates of offbeat after the last measured one, so that generation is as busy in it as in the first."""
PEER_PACKAGES = ("trl==1.16.*", "transformers>=5,<6", "datasets", "accelerate")
PEER_PROGRAM = Path(__file__).with_name("peer_trl.py")
RUN_TIMEOUT_S = 3 * 3600
LEARNING_RATE = 1e-5

OFFBEAT_TOML = """\
[model]
path = "{model}"
[data]
path = "{data}"
max_prompt_tokens = {max_prompt_tokens}
shuffle = false
[reward]
name = "number_match"
[rollout]
samples_per_prompt = {samples}
max_tokens = {max_tokens}
max_model_len = {max_model_len}
max_running = {max_running}
[engine]
learning_rate = {learning_rate}
[algorithm]
correction_form = "bypass"
[async]
mini_batch_size = {prompts}
staleness_threshold = 1
partial_rollout = true
[cluster]
trainer_threads = {trainer_threads}
rollout_threads = {rollout_threads}
[checkpoint]
every = 0
keep = 1
save_optimizer = false
[log]
tensorboard = false
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: when it ended (Unix seconds), and the mean completion length and reward of its samples."""

    end_s: float
    tokens: float
    reward: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Samples per second of one side, seconds per step, mean completion length in tokens, mean reward."""

    samples_per_s: float
    step_s: float
    tokens: float
    reward: float


def measure(steps: list[Step], num_measured: int, samples_per_step: int) -> Speed:
    """Speed over the steps after the warm-up."""
    if len(steps) < WARM_UP_STEPS + num_measured:
        raise SystemExit(f"{WARM_UP_STEPS + num_measured} steps were asked for, {len(steps)} were made")
    measured = steps[WARM_UP_STEPS : WARM_UP_STEPS + num_measured]
    seconds = measured[-1].end_s - steps[WARM_UP_STEPS - 1].end_s
    return Speed(
        samples_per_s=num_measured * samples_per_step / seconds,
        step_s=seconds / num_measured,
        tokens=sum(step.tokens for step in measured) / num_measured,
        reward=sum(step.reward for step in measured) / num_measured,
    )


def write_sums(path: Path, num_rows: int) -> None:
    """Write short arithmetic questions as chat messages, with their answers."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            one, other = draw.randint(1, 99), draw.randint(1, 99)
            prompt = [{"role": "user", "content": f"What is {one} + {other}?"}]
            file.write(json.dumps({"prompt": prompt, "answer": str(one + other)}) + "\n")


def num_rows(args: argparse.Namespace) -> int:
    """Questions that the longer of the two runs takes."""
    updates: int = WARM_UP_STEPS + args.steps + DRAIN_STEPS
    return updates * int(args.prompts)


def run_offbeat(args: argparse.Namespace, data: Path, folder: Path) -> list[Step]:
    """Train with the application and read the metrics of its run folder."""
    updates = WARM_UP_STEPS + args.steps + DRAIN_STEPS
    text = OFFBEAT_TOML.format(
        **vars(args),
        data=data,
        max_prompt_tokens=args.max_model_len - args.max_tokens,
        max_running=args.prompts * args.samples,
        learning_rate=LEARNING_RATE,
    )
    (folder / "offbeat.toml").write_text(text)
    run = folder / "run"
    command = [sys.executable, "-m", "grpo_async_app", "train", str(folder / "offbeat.toml"), "--out", str(run)]
    _run("offbeat", [*command, "--engine.max_updates", str(updates)], args.threads)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        Step(end_s=row["time_s"], tokens=row["train/response_tokens"], reward=row["train/reward"])
        for row in rows
        if "perf/update_s" in row
    ]


def run_trl(args: argparse.Namespace, data: Path, folder: Path) -> list[Step]:
    """Train with TRL and read what its program noted."""
    job = {
        "model": str(args.model),
        "data": str(data),
        "out": str(folder / "trl.json"),
        "steps": WARM_UP_STEPS + args.steps,
        "prompts": args.prompts,
        "samples": args.samples,
        "microbatch": min(args.peer_microbatch, args.prompts * args.samples),
        "max_tokens": args.max_tokens,
        "learning_rate": LEARNING_RATE,
        "threads": args.threads,
    }
    _run("TRL", [peer_python(), str(PEER_PROGRAM), json.dumps(job)], args.threads)
    return [Step(**row) for row in json.loads((folder / "trl.json").read_text())]


def peer_environment() -> Path:
    """Folder of TRL's environment, kept between runs; it holds a file `complete` once everything is installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "offbeat" / "bench" / "trl-1.16"


def peer_python() -> str:
    """The Python of TRL's environment; made with uv on first use, with the torch that runs here."""
    torch = "torch==" + importlib.metadata.version("torch").partition("+")[0]
    environment = peer_environment()
    python, complete = environment / "bin" / "python", environment / "complete"
    if complete.exists() and complete.read_text() == torch:
        return str(python)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from find_links import find_links

    links = [word for link in find_links() for word in ("--find-links", link)]
    subprocess.run(["uv", "venv", "-q", "--clear", "--python", sys.executable, str(environment)], check=True)
    install = ["uv", "pip", "install", "-q", "--python", str(python), *links, torch, *PEER_PACKAGES]
    subprocess.run(install, check=True, timeout=1800)
    complete.write_text(torch)  # last: an environment that was interrupted is made again
    return str(python)


def _run(name: str, command: list[str], threads: int) -> None:
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run both and return the figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "sums.jsonl"
        write_sums(data, num_rows(args))
        figures: dict[str, Any] = {"load_before": {}}
        speeds = {}
        for name, run in (("offbeat", run_offbeat), ("trl", run_trl)):
            figures["load_before"][name] = os.getloadavg()[0]
            speeds[name] = measure(run(args, data, folder), args.steps, args.prompts * args.samples)
            print(describe(name, speeds[name], figures["load_before"][name]), flush=True)
    figures |= {name: asdict(speed) for name, speed in speeds.items()}
    figures["ratio"] = speeds["offbeat"].samples_per_s / speeds["trl"].samples_per_s
    return figures


def describe(name: str, speed: Speed, load: float) -> str:
    """One side in a line."""
    return (
        f"{name:8} {speed.samples_per_s:6.2f} samples/s, {speed.step_s:6.1f} s a step, completions of "
        f"{speed.tokens:.1f} tokens, reward {speed.reward:.2f} (load {load:.1f} before)"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_FOLDER")
    numbers = {"steps": 2, "threads": 2, "prompts": 8, "samples": 8, "max-tokens": 48, "max-model-len": 256}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trainer-threads", type=int, default=0, help="of offbeat; 0: half of --threads")
    parser.add_argument("--rollout-threads", type=int, default=0, help="of offbeat; 0: the others")
    parser.add_argument("--peer-microbatch", type=int, default=16, help="samples in one pass of TRL's trainer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(arguments)
    # Trainer and rollout work at the same time: more threads than CPUs would spin at each other's barriers.
    args.trainer_threads = args.trainer_threads or max(1, args.threads // 2)
    args.rollout_threads = args.rollout_threads or max(1, args.threads - args.trainer_threads)
    return args


def main(arguments: list[str] | None = None) -> None:
    """Compare and print."""
    args = parse(arguments)
    if hasattr(os, "sched_setaffinity"):  # inherited by every process of both sides
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    figures = compare(args)
    print(f"offbeat / TRL: {figures['ratio']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
