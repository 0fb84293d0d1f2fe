"""A run's log is opened and closed as one, and its end compares it with its beginning."""

from pathlib import Path

import pytest

from offbeat_run import (
    CheckpointConfig,
    Generation,
    LogConfig,
    RunFolder,
    RunLog,
    print_conclusion,
    read_generations,
    read_metrics,
    read_timeline,
)
from offbeat_types import RunFolderError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def generation(step: int) -> Generation:
    return Generation(step=step, kind="train", version=step, prompt="2+2?", completion="4", reward=1.0)


def test_everything_is_written_and_cut_where_the_run_resumes(run: RunFolder) -> None:
    with RunLog(run, LogConfig(), 3, None) as log:
        log.message("hello")
        for step in (1, 2):
            with log.measure("trainer-0", "update"):
                log.write(step, {"train/loss": 1.0 / step})
            log.write_generations([generation(step)])
    with RunLog(run, LogConfig(), 3, 1) as log:
        log.write(2, {"train/loss": 7.0})
        with pytest.raises(ZeroDivisionError), log.measure("trainer-0", "fails"):
            print(1 // 0)
    assert [(line.step, line.values["train/loss"]) for line in read_metrics(run.metrics)] == [(1, 1.0), (2, 7.0)]
    assert [each.step for each in read_generations(run, "train")] == [1]
    assert [event["name"] for event in read_timeline(run.timeline) if event["ph"] == "X"] == [
        "update",
        "update",
        "fails",
    ]
    assert len(list(run.tensorboard.iterdir())) >= 1


def test_what_is_turned_off_is_not_written(run: RunFolder) -> None:
    with RunLog(run, LogConfig(tensorboard=False, timeline=False), 1, None) as log, log.measure("trainer-0", "update"):
        log.write(1, {"train/loss": 1.0})
    assert not run.timeline.exists()
    assert list(run.tensorboard.iterdir()) == []


def test_the_end_of_a_run_is_compared_with_its_beginning(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_text(run.config, "")
    with RunLog(run, LogConfig(), 2, None) as log:
        for step, loss in ((0, 4.0), (1, 1.5), (2, 2.0)):
            log.write(step, {"eval/loss": loss})
            log.write(step, {"train/loss": 9.0})
            with run.checkpoints.write(step, score=-loss):
                pass
    print_conclusion(run, {"eval/loss": "held-out loss"})
    said = capsys.readouterr().out
    assert "held-out loss" in said
    assert "-2.000" in said
    assert (
        f"checkpoint: {run.checkpoints.path}/step-000002\nbest checkpoint: {run.checkpoints.path}/step-000001" in said
    )
    assert run.report.is_file()


def test_the_checkpoint_of_a_run_is_the_best_or_else_the_latest(run: RunFolder) -> None:
    with pytest.raises(RunFolderError, match="holds no whole checkpoint"):
        run.checkpoints.chosen()
    for step in (1, 2):
        with run.checkpoints.write(step):
            pass
    assert run.checkpoints.chosen().step == 2
    run.checkpoints.set_score(1, 0.5)
    assert run.checkpoints.chosen().step == 1


def test_room_is_asked_for_all_checkpoints_at_once() -> None:
    full, plain = CheckpointConfig(keep=2), CheckpointConfig(keep=2, save_optimizer=False)
    assert full.room_bytes(1000, is_lora=False) == 4 * 12_000 + 2**26
    assert full.room_bytes(1000, is_lora=True) == plain.room_bytes(1000, is_lora=False) == 4 * 4_000 + 2**26
