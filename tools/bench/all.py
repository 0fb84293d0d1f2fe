"""Every row of the table of speeds, one benchmark after the other, in at most an hour; writes docs/performance.md.

    uv run python tools/bench/all.py [--model FOLDER] [--only NAME ...] [--out FILE]

Without a folder the model is SmolLM2-135M-Instruct, made by tools/make_smollm2.py. It and the environments of vLLM and
TRL are made with uv once and kept in the cache. Run it on a machine that does nothing else. With --only, the other
parts of the page stay as they were. So do those in bfloat16 on a processor whose products are slower in bfloat16 than
in float32 (one without AVX512-BF16 or AMX, where they would take hours), unless --only names them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from bench.harness import Row, cache_folder, peer_python, table

ROOT: Final = Path(__file__).parents[2]
BENCH: Final = Path(__file__).parent
BENCH_TIMEOUT_S: Final = 2400
WITH_VLLM: Final = (
    f"--editable={ROOT}/packages/engines/rollout-vllm[engine-cpu]",
    f"--editable={ROOT}/packages/engines/rollout-torch",
)
BEGINS: Final = "<!-- {0} -->"
BY_HAND: Final = "reasons"
"""The part of the page that no benchmark writes: why bounds are missed."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A row of the first table: one number of a benchmark, and what it should be.

    Args:
        what: its name in the table.
        of: picks the number from the benchmark's rows; raises StopIteration where there is no such row.
        at_least: bound, in the number's unit; `is_most`: it is an upper bound.
        aim: what to reach, as text.
    """

    what: str
    of: Callable[[Sequence[Row]], float]
    at_least: float
    aim: str = ""
    is_most: bool = False

    def is_met(self, value: float) -> bool:
        """Return whether a number is on the right side of the bound."""
        return value <= self.at_least if self.is_most else value >= self.at_least


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark: its script, its arguments, and the figures that are read from its rows.

    Args:
        beside_vllm: it runs in the environment with vLLM.
        in_bfloat16: its products are.
    """

    title: str
    words: tuple[str, ...]
    measures: tuple[Measure, ...] = ()
    takes_model: bool = True
    beside_vllm: bool = False
    in_bfloat16: bool = False


def number(field: str, **where: object) -> Callable[[Sequence[Row]], float]:
    """Return the field of the first row that has these values."""
    return lambda rows: float(next(row[field] for row in rows if all(row.get(k) == v for k, v in where.items())))


GRPO, SFT, MEMORY = "GRPO, samples/s", "SFT, tokens/s", "GRPO step of 4,096 tokens, MiB"


def generation(dtype: str) -> Bench:
    """Return the measures beside vLLM and transformers."""
    batches = [
        Measure(
            what=f"batch {batch}, beside vLLM",
            of=number("ratio to vllm", work=f"batch {batch}"),
            at_least=1.1,
            aim="1.3",
        )
        for batch in (1, 8, 32)
    ]
    group = Measure(
        what="a group of 8, prompt of 1,024, beside transformers",
        of=number("ratio to generate", work="group 8"),
        at_least=3.0,
        aim="prefix read once",
    )
    beside_vllm = Measure(what="the same, beside vLLM", of=number("ratio to vllm", work="group 8"), at_least=1.2)
    top_p = Measure(
        what="top_p 0.95 at batch 32, speed beside itself without",
        of=number("ratio to without top_p", work="top_p 0.95"),
        at_least=1 / 1.1,
    )
    return Bench(
        title=f"Generation with log-probabilities, {dtype}",
        words=("vs_generate.py", "--dtype", dtype, "--temperature", "0.3"),
        beside_vllm=True,
        in_bfloat16=dtype == "bfloat16",
        measures=(*batches, group, beside_vllm, top_p),
    )


def training(dtype: str) -> Bench:
    """Return the step alone; its bound is for bfloat16."""
    bound = Measure(
        what="bfloat16, s",
        of=number("forward_backward_s", dtype="bfloat16"),
        at_least=5.0,
        aim="60 % of the floor",
        is_most=True,
    )
    lengths = ("--only-shared", "--prompt-tokens", "48", "--completion-tokens", "41")
    return Bench(
        title=f"Forward and backward of 64 samples, shared prompts, {dtype}",
        words=("train_step.py", *lengths, "--dtypes", dtype),
        in_bfloat16=dtype == "bfloat16",
        measures=(bound,) if dtype == "bfloat16" else (),
    )


def beside_trl(dtype: str, *, grpo_at_least: float, aim: str) -> Bench:
    """Return the measures of whole runs, and of the memory of a step."""
    return Bench(
        title=f"Beside TRL 1.16, {dtype}",
        words=("vs_trl.py", "--dtypes", dtype),
        in_bfloat16=dtype == "bfloat16",
        measures=(
            Measure(what="GRPO", of=number("ratio", what=GRPO), at_least=grpo_at_least, aim=aim),
            Measure(what="SFT", of=number("ratio", what=SFT), at_least=1.5),
            Measure(what="memory of a GRPO step", of=number("ratio", what=MEMORY), at_least=0.5, is_most=True),
        ),
    )


BENCHES: Final = {
    "generation": generation("bfloat16"),
    "generation_float32": generation("float32"),
    "training": training("bfloat16"),
    "training_float32": training("float32"),
    "trl": beside_trl("bfloat16", grpo_at_least=4.0, aim="6"),
    "trl_float32": beside_trl("float32", grpo_at_least=3.0, aim="4"),
    "weights": Bench(title="Weight sync, 135M", words=("weightsync.py", "--size", "smollm2-135m"), takes_model=False),
    "changes": Bench(title="What optimizer steps change in bfloat16", words=("weight_changes.py",)),
    "quickstart": Bench(
        title="The quickstart",
        words=("quickstart.py", "--seeds", "0"),
        takes_model=False,
        measures=(Measure(what="to 0.9 held out, s", of=number("to_0.9_s"), at_least=100.0, aim="60", is_most=True),),
    ),
}


def bfloat16_speed() -> float:
    """Return the speed of a product of a layer's size in bfloat16 over that in float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(lambda left=left, right=right: left @ right, number=3, repeat=5))  # type: ignore[misc]
    return float(seconds[torch.float32] / seconds[torch.bfloat16])


def run(bench: Bench, model: Path) -> tuple[list[Row], float]:
    """Run it; return its rows, and the seconds it took."""
    script, *words = bench.words
    python = peer_python("vllm-0.32", *WITH_VLLM) if bench.beside_vllm else sys.executable
    command = [python, str(BENCH / script), *([str(model)] if bench.takes_model else []), *words, "--json"]
    started_s = time.monotonic()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=BENCH_TIMEOUT_S)
    start = done.stdout.find("[\n")
    if done.returncode or start < 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
    rows, _ = json.JSONDecoder().raw_decode(done.stdout[start:])
    return rows, time.monotonic() - started_s


def section(name: str, bench: Bench, rows: Sequence[Row], seconds: float) -> str:
    """Return a benchmark's part of the page."""
    words = " ".join([*bench.words[:1], *(["MODEL"] if bench.takes_model else []), *bench.words[1:]])
    lines = [f"## {bench.title}", "", f"`python tools/bench/{words}`: {seconds / 60:.1f} min, {when()}.", ""]
    if found := [(measure, value_of(measure, rows)) for measure in bench.measures]:
        lines += [*table([judge(measure, value) for measure, value in found]), ""]
    return "\n".join([BEGINS.format(name), *lines, *table(rows), ""])


def value_of(measure: Measure, rows: Sequence[Row]) -> float | None:
    """Return the number, None where the benchmark did not measure it."""
    try:
        return measure.of(rows)
    except (StopIteration, KeyError, ValueError):  # no such row, no such side in it, or an empty cell
        return None


def judge(measure: Measure, value: float | None) -> Row:
    """Return a row of a section's first table."""
    bound = f"{'at most' if measure.is_most else 'at least'} {measure.at_least:.3g}"
    verdict = "not measured" if value is None else "met" if measure.is_met(value) else "missed"
    seen = "" if value is None else f"{value:.3g}"
    return {"measure": measure.what, "seen": seen, "wanted": bound, "aim": measure.aim, "verdict": verdict}


def when() -> str:
    """Return day, processor and load as text."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} x {model}, load average {os.getloadavg()[0]:.1f}"


def read_sections(page: Path) -> dict[str, str]:
    """Return the parts of the current page by name."""
    text = page.read_text() if page.exists() else ""
    parts = [part.partition(" -->\n") for part in text.split("<!-- ")[1:]]
    return {name: f"{BEGINS.format(name)}\n{rest}" for name, _, rest in parts}


def write_page(page: Path, sections: dict[str, str]) -> None:
    """Write all parts, in the order of the benchmarks, and what is written by hand."""
    intro = (
        "# Speed\n\nThis page lists the results of `python tools/bench/all.py`, measured side by side with other "
        "libraries. The model\nis SmolLM2-135M on two threads unless stated otherwise. Each section shows its command, "
        "the bounds and the raw rows.\nThe last section explains why bounds are missed.\n\n"
    )
    kept = (*BENCHES, BY_HAND)
    page.write_text(intro + "\n".join(sections[name].rstrip() + "\n" for name in kept if name in sections))


def find_model(folder: Path | None) -> Path:
    """Return the folder that was given, or SmolLM2-135M made once, with the maker's needs in a folder apart."""
    if folder is not None:
        return folder
    cache = cache_folder() / "smollm2-135m"
    if not (cache / "config.json").exists():
        with tempfile.TemporaryDirectory() as needed:
            install = ["uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", needed]
            subprocess.run([*install, "gguf", "accelerate"], check=True)
            path = os.pathsep.join([needed, *filter(None, [os.environ.get("PYTHONPATH")])])
            making = [sys.executable, str(BENCH.parent / "make_smollm2.py"), str(cache)]
            subprocess.run(making, check=True, env=os.environ | {"PYTHONPATH": path})
    return cache


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and write the page; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(BENCHES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args(list(arguments) if arguments is not None else None)
    model, sections, missed = find_model(args.model), read_sections(args.out), list[str]()
    speed = bfloat16_speed()
    for name in args.only or BENCHES:
        bench = BENCHES[name]
        if bench.in_bfloat16 and speed < 1 and not args.only:
            print(f"{name} is left out: here products in bfloat16 have {speed:.2f} of the speed of float32", flush=True)
            continue
        rows, seconds = run(bench, model)
        sections[name] = section(name, bench, rows, seconds)
        write_page(args.out, sections)  # after each: an interrupted hour leaves what it has measured
        values: list[tuple[Measure, Any]] = [(measure, value_of(measure, rows)) for measure in bench.measures]
        missed += [f"{name}: {measure.what}" for measure, value in values if value is None or not measure.is_met(value)]
        print(sections[name], flush=True)
    print("missed: " + "; ".join(missed) if missed else "every bound is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
