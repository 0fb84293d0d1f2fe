"""Runs of grpo-async-app to their end, and what their folders then hold."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat_run import Checkpoint, RunFolder, read_metrics
from offbeat_testing import CommandLine, RunningCommand

Main = Callable[[], object]


def run_to_its_end(main: Main, *words: object, deadline_s: float = 120) -> str:
    """What it has printed."""
    with RunningCommand(main, *words) as process:
        assert process.wait(deadline_s) == 0, process.output
        return process.output


def trained_prompts(run: Path) -> Counter[str]:
    """How often each prompt was trained on."""
    with (run / "generations" / "train.jsonl").open("rb") as lines:  # what a model says may hold line ends of Unicode
        return Counter(json.loads(line)["prompt"] for line in lines)


def values_of(run: Path, metric: str) -> dict[int, float]:
    """Return the values by update, each update once; none before the run has a folder."""
    path = run / "metrics.jsonl"
    lines = [line for line in read_metrics(path) if metric in line.values] if path.exists() else []
    values = {line.step: float(line.values[metric]) for line in lines}  # type: ignore[arg-type]
    assert len(values) == len(lines), f"{metric} of an update is there twice"
    return values


def latest_checkpoint(run: Path) -> Checkpoint:
    found = RunFolder.open(run, write=False).checkpoints.latest()
    assert found is not None
    return found


def statistics_of(run: Path) -> dict[str, int]:
    """Of the policy, in the latest checkpoint."""
    state = json.loads((latest_checkpoint(run).path / "loop" / "state.json").read_text())
    found: dict[str, int] = state["policy"]["statistics"]
    return found


Places = dict[str, Any]
"""The parsed output of `where --json`."""


def where(command: CommandLine, run: Path) -> Places:
    ended = command("where", run, "--json")
    assert ended.code == 0, ended.err
    found: Places = json.loads(ended.out)
    return found


def where_once(
    process: RunningCommand, command: CommandLine, run: Path, seen: Callable[[Places], bool], what: str
) -> Places:
    """Return the output of `where` once it shows roles of a run in progress."""
    last: list[Places] = []

    def look() -> bool:
        if (run / "places.json").exists():
            last[:] = [where(command, run)]
        return bool(last) and seen(last[0])

    process.wait_until(look, what, deadline_s=180)
    return last[0]


def role_of(places: Places, name: str) -> dict[str, Any]:
    """One line of the table; an empty one where the role is not in it."""
    empty = {"state": "", "pid": 0, "version": None, "restarts": 0}
    return next((role for role in places["roles"] if role["role"] == name), empty)
