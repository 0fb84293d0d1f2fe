"""A damaged file of a run folder ends a command with a reason, or is read without what is damaged."""

import os

import pytest

from offbeat_run import (
    Generation,
    LogConfig,
    RunFolder,
    RunLog,
    label_of,
    model_card,
    read_eval_note,
    read_timeline,
    write_report,
)
from offbeat_run._validation.items import ItemAnswers, SampledAnswer
from offbeat_types import OffbeatError, RunFolderError

FILES = (
    "metrics.jsonl",
    "alarms.jsonl",
    "generations/train.jsonl",
    "generations/validation.jsonl",
    "validation/held-out.jsonl",
    "timeline.json",
    "checkpoints/scores.json",
    "plan.txt",
    "config.toml",
    "settled.toml",
)
LINES = {
    "torn": b'{"step": 1, "tim',
    "zeros": bytes(4096) + b"\n",
    "no UTF-8": b'{"step": "\xff\xfe"}\n',
    "no object": b"5\n",
    "no keys": b"{}\n",
    "a number that is none": b'{"step": "x", "time_s": []}\n',
    "a number of too many digits": b'{"step": ' + b"9" * 5000 + b"}\n",
    "an event without its parts": b'{"ph": "X"},\n{"ph": "M", "tid": []},\n',
    "nested without end": b'{"a":' * 100_000 + b"\n",
}


@pytest.fixture
def run(tmp_path):
    """A run of two updates, with something in every file."""
    with RunFolder.create(tmp_path / "run") as run:
        run.write_text(run.config, "[model]\n")
        run.write_text(run.settled, "[model]\n")
        run.write_plan([("room", "enough")])
        sample = SampledAnswer(reward=1.0, right=True, vote=None, num_tokens=1, stop_reason="eos", versions=())
        answers = ItemAnswers(step=1, item=0, prompt="?", samples=(sample,))
        with RunLog(run, LogConfig(tensorboard=False), 2, None) as log:
            for step in (1, 2):
                log.write_validation(step, {"train/loss": 1.0}, {"held-out": [answers]} if step == 1 else {})
                log.alarm(step, "an alarm")
                log.span("trainer-0", "update", step, step + 0.5)
                for kind in ("train", "validation"):
                    generation = Generation(step=step, kind=kind, version=step, prompt="?", completion="!", reward=1.0)  # type: ignore[arg-type]
                    log.write_generations([generation])
                with run.checkpoints.write(step, score=1.0):
                    pass
        yield run


def damaged(whole, line):
    """The line before, between and behind the lines of a file."""
    return line + whole + line


def refusal(run):
    """The error of whoever refuses to read the run when it is resumed and ends; empty where all of it is read."""
    try:
        with RunLog(run, LogConfig(tensorboard=False), 2, 1) as log:
            log.write(2, {"train/loss": 1.0})
        model_card(run, run.checkpoints.chosen(), "sft-app")
    except OffbeatError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_is_no_traceback_in_a_resume(run, damage):
    for name in FILES:
        file = run.path / name
        whole = file.read_bytes()
        file.write_bytes(damaged(whole, LINES[damage]))
        assert str(file) in (refusal(run) or str(file)), name
        file.write_bytes(whole)


@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_is_no_traceback_in_a_report(run, damage):
    for name in FILES:
        file = run.path / name
        file.write_bytes(damaged(file.read_bytes(), LINES[damage]))
    assert "<html" in write_report(run).read_text()


def test_a_report_is_of_what_can_be_read(run):
    with run.metrics.open("ab") as file:
        file.write(LINES["no keys"] + LINES["torn"])
    page = write_report(run).read_text()
    assert label_of("train/loss") in page
    assert "metrics.jsonl:3: not" in page


def test_a_timeline_is_read_beyond_a_damaged_event(run):
    before = read_timeline(run.timeline)
    first, *rest = run.timeline.read_bytes().splitlines(keepends=True)
    run.timeline.write_bytes(first + LINES["an event without its parts"] + bytes(64) + b"\n" + b"".join(rest))
    assert read_timeline(run.timeline) == before


@pytest.mark.parametrize("text", [b"", b"5", b"[]", b'{"marks": 5}', b"\xff", b'{"\xff": {}}', b"[" * 100_000])
def test_a_note_of_an_evaluation_that_is_damaged_is_named(tmp_path, text):
    (tmp_path / "eval.json").write_bytes(text)
    with pytest.raises(RunFolderError, match=rf"{os.fspath(tmp_path)}: not the folder of an evaluation"):
        read_eval_note(tmp_path)
