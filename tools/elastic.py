"""Tokens per second of a run whose rollout engines join and leave, with engines that wait as for an accelerator.

    python tools/elastic.py [--engines 1 2 3 1] [--seconds 20] [--write]

Each engine answers one request after the other and takes half a second for each without using the processor, so that
the figures are those of the run and not of a machine with few cores. Nothing may be issued again, no prompt be trained
twice, and an engine more must bring tokens. `--write` puts the table into docs/reliability.md.
"""

import argparse
import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Final

from reliability import put_text
from role_faults import Job, last_value, role_pids, updates

from offbeat_run import read_metrics
from offbeat_testing import RunningCommand

ENGINE: Final = '''
import asyncio

from offbeat_rollout_torch import TorchRolloutEngine


class WaitingEngine(TorchRolloutEngine):
    """Answers one request after the other, half a second each."""

    async def generate(self, request):
        self.__dict__.setdefault("gate", asyncio.Lock())
        async with self.gate:
            await asyncio.sleep(0.5)
        return await super().generate(request)
'''
ENTRY_POINTS: Final = "[offbeat.rollout]\nwaiting = waiting_engine:WaitingEngine\n"
METADATA: Final = "Metadata-Version: 2.1\nName: waiting-engine\nVersion: 0\n"
PATIENCE_S: Final = 240.0
MARK: Final = "<!-- written by tools/elastic.py -->"
WORDS: Final = (
    "--rollout.backend=waiting",
    "--rollout.num_engines=1",
    "--async.staleness_threshold=2",
    "--eval.every_updates=0",
)


def make_job(folder: Path, num_epochs: int) -> Job:
    """A job, and beside it a package with the engine."""
    job = Job.make(folder, num_epochs, score_s=0.0)
    (folder / "waiting_engine.py").write_text(ENGINE)
    metadata = folder / "waiting_engine-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return job


def scale(job: Job, process: RunningCommand, number: int) -> None:
    """Ask for so many engines, and wait until there are as many."""
    with RunningCommand("grpo_async_app", "scale", job.run, "--engines", number) as asking:
        if asking.wait():
            raise SystemExit(asking.output)
    process.wait_until(lambda: _num_engines(process) == number, f"{number} engines", PATIENCE_S)
    done = len(updates(job.run))
    process.wait_until(lambda: len(updates(job.run)) > done + 1, "they sample", PATIENCE_S)


def _num_engines(process: RunningCommand) -> int:
    return sum(role.startswith("rollout") for role in role_pids(process))


def tokens_per_s(job: Job, seconds: float) -> float:
    """Tokens trained on per second of the next stretch of time: from its first update to its last."""
    begin_s = time.time()
    time.sleep(seconds)
    lines = [line for line in read_metrics(job.run / "metrics.jsonl") if "train/response_tokens" in line.values]
    inside = [line for line in lines if line.time_s >= begin_s]
    # 4 groups of 2 samples each; the first update ends the time before.
    lengths = [length for line in inside[1:] if isinstance(length := line.values["train/response_tokens"], float)]
    return 8 * sum(lengths) / max(inside[-1].time_s - inside[0].time_s, 1e-9) if len(inside) > 1 else 0.0


def measure(job: Job, counts: list[int], seconds: float) -> list[tuple[int, float]]:
    """Tokens per second of one run with so many engines, one number of them after the other; its end is awaited."""
    figures = []
    with job.train(*WORDS) as process:
        process.wait_until(lambda: len(updates(job.run)) > 1, "the run has begun", PATIENCE_S)
        for number in counts:
            if number != _num_engines(process):
                scale(job, process, number)
            figures.append((number, tokens_per_s(job, seconds)))
            print(f"{number} engines: {figures[-1][1]:.1f} tokens/s", flush=True)
        if process.wait(10 * PATIENCE_S):
            raise SystemExit(process.output)
    return figures


def what_is_wrong(job: Job, figures: list[tuple[int, float]]) -> list[str]:
    """What the run has lost, and engines that brought nothing."""
    wrong = job.complaints()
    if reissued := int(last_value(job.run, "groups/reissued")):
        wrong.append(f"{reissued} prompts issued again")
    for (fewer, slower), (more, faster) in pairwise(sorted(figures)):
        if fewer < more and faster <= slower:
            wrong.append(f"{more} engines are no faster than {fewer}: {faster:.1f} against {slower:.1f} tokens/s")
    return wrong


def table(figures: list[tuple[int, float]]) -> str:
    """The figures in Markdown, in the order in which they were measured."""
    rows = [f"| {number} | {tokens:.0f} | {tokens / figures[0][1]:.2f} |" for number, tokens in figures]
    return "\n".join(["| rollout engines | tokens/s | times the first |", "| --- | --- | --- |", *rows])


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 3, 1])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    try:
        job = make_job(folder, num_epochs=max(8, round(asked.seconds * sum(asked.engines) * 0.25)))
        figures = measure(job, asked.engines, asked.seconds)
        wrong = what_is_wrong(job, figures)
    finally:
        shutil.rmtree(folder)
    print("; ".join(wrong) or "no prompt issued again; accounting exact")
    if wrong:
        raise SystemExit(1)
    if asked.write:
        put_text(MARK, table(figures))


if __name__ == "__main__":
    main()
