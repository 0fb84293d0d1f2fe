"""Signs of life: a command says what it is doing, and how far an update is."""

import re
from pathlib import Path

import pytest

from offbeat_testing import RunningCommand, log_every_stage
from sft_app import _cli


@pytest.fixture(autouse=True)
def _every_stage_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log_every_stage(monkeypatch)


def said_by(*words: object) -> list[str]:
    with RunningCommand(_cli.main, *words) as process:
        assert process.wait() == 0, process.output
        return process.output.splitlines()


def assert_in_order(lines: list[str], *patterns: str) -> None:
    """Require lines that begin so, in this order."""
    rest = iter(lines)
    for pattern in patterns:
        assert any(re.match(pattern, line) for line in rest), f"{pattern} is not in order in\n" + "\n".join(lines)


def test_a_run_says_what_it_does_and_how_far_an_update_is(config: Path, tmp_path: Path) -> None:
    lines = said_by("train", config, "--out", tmp_path / "run", "--engine.max_updates=3")
    assert lines[0] == "loading PyTorch ..."
    assert_in_order(
        lines,
        "reading the configuration .*sft.toml",
        "checking the model: /",
        "reading the data: /",
        "loading the model: /",
        "validating: 4 sequences after update 0",
        r"update 1 of 3: \d of 8 sequences",
        r"update 3 of 3: \d of 8 sequences",
        "saving the checkpoint: after update 3",
        "writing the report",
    )


def test_ranks_say_how_far_they_are_and_write_their_logs(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--engine.num_ranks=2", "--cluster.trainer_threads=1", "--engine.max_updates=2", "--data.eval_size=0"]
    lines = said_by("train", config, "--out", run, "--eval.every_updates=0", *words)
    assert_in_order(lines, "starting 2 ranks, each with the model: /", "update 1 of 2", "update 2 of 2")
    for rank in range(2):
        log = (run / "logs" / f"trainer-{rank}.log").read_text()
        assert_in_order(
            [line[20:] for line in log.splitlines()],
            r"started: process \d+ on \S+, device cpu, 1 threads",
            r"loaded \S+ as float32 in [\d.]+ s",
            "ready",
            "ended",
        )
