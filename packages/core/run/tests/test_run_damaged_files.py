"""A damaged file of a run folder ends a command with a reason, or is read without what is damaged."""

import os
import shutil
import time

import pytest

from offbeat_core import ConfigError, OffbeatError, RunFolderError
from offbeat_run import Generation, LogConfig, RunFolder, RunLog, label_of, model_card, read_timeline, write_comparison
from offbeat_run._folder import lines
from offbeat_run._folder.lines import JsonlFile
from offbeat_run._report.page import write_report
from offbeat_run._validation.folder import read_eval_note
from offbeat_run._validation.items import ItemAnswers, SampledAnswer

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
    """Return the error of a reader that refuses the run when it is resumed and ends; empty where all of it is read."""
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


def make_pipe(path):
    os.mkfifo(path)


def make_link(path):
    path.symlink_to("nowhere")


def make_large(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


OTHERS = {"a folder": os.mkdir, "a pipe": make_pipe, "a link to nothing": make_link, "a huge file": make_large}
in_time = pytest.mark.timeout(120)


def replace(run, name, kind):
    path = run.path / name
    path.unlink()
    OTHERS[kind](path)


@in_time
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_no_traceback_and_no_wait_in_a_resume(run, name, kind, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    replace(run, name, kind)
    message = refusal(run)
    if name.endswith(("jsonl", "timeline.json")) and kind != "a huge file":
        assert f"{name}: must be a file and is {kind}" in message


@in_time
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_a_report_names_what_is_no_file(run, name, kind, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    replace(run, name, kind)
    if name == "config.toml" and kind != "a huge file":
        with pytest.raises(RunFolderError, match="not a run folder"):
            RunFolder.open(run.path, write=False)
        return
    page = write_report(RunFolder.open(run.path, write=False)).read_text()
    message = "a line of more than" if kind == "a huge file" else f"must be a file and is {kind}"
    assert (message in page) == name.endswith(("jsonl", "timeline.json"))


@in_time
@pytest.mark.parametrize("kind", OTHERS)
def test_a_manifest_that_is_no_file_is_a_damaged_checkpoint(run, kind):
    replace(run, "checkpoints/step-000002/checkpoint.json", kind)
    lines = []
    found = run.checkpoints.read_latest(lambda folder: folder.name, lines.append)
    assert found is not None
    assert found[1] == "step-000001"
    assert "step-000002 is damaged (checkpoint.json cannot be read: " in lines[0]


def test_a_configuration_that_nests_without_end_costs_the_heading_alone(run):
    run.settled.write_text("a = " + "[" * 100_000)
    assert "an alarm" in write_report(run).read_text()


def test_a_last_line_of_any_length_is_cut_off_in_one_pass(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(1 << 28))
    start_s = time.monotonic()
    JsonlFile(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'
    assert time.monotonic() - start_s < 60


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(run):
    shutil.copytree(run.checkpoints.path / "step-000001", run.checkpoints.path / "step-000003")
    assert [each.step for each in run.checkpoints.all()] == [1, 2]
    lines = []
    found = run.checkpoints.read_latest(lambda folder: folder.name, lines.append)
    assert found is not None
    assert (found[0].step, found[1]) == (2, "step-000002")
    assert "step-000003 is damaged (checkpoint.json is that of step-000001) and passed over" in lines[0]


def test_evaluations_without_marks_have_no_set_in_common(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.json").write_text('{"about": {}}')
    with pytest.raises(ConfigError, match="in common"):
        write_comparison(tmp_path / "a", tmp_path / "b", tmp_path / "page.html")


@in_time
@pytest.mark.parametrize("kind", OTHERS)
def test_a_note_of_an_evaluation_that_is_no_file_is_named(tmp_path, kind):
    OTHERS[kind](tmp_path / "eval.json")
    with pytest.raises(RunFolderError, match=r"no eval\.json that can be read"):
        read_eval_note(tmp_path)
