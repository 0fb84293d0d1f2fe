"""What a run writes down survives a kill, comes back as written, and is cut back on resume; trackers get it too."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import BackendError, Metric, RunFolderError
from offbeat_run import (
    CheckpointConfig,
    Generation,
    ItemAnswers,
    LogConfig,
    MetricsTail,
    RunFolder,
    RunLog,
    check_trackers,
    print_conclusion,
    read_alarms,
    read_answers,
    read_generations,
    read_metrics,
    read_timeline,
)
from offbeat_run._log.run_log import Alarm, GenerationsLog
from offbeat_run._metrics.metrics import MetricsLog, Tracker
from offbeat_run._metrics.trackers import open_trackers


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run")


def scalars(run):
    """What TensorBoard files hold, read by their format's own reader."""
    from tensorboardX.event_file_writer import directory_check
    from tensorboardX.proto.event_pb2 import Event

    directory_check(str(run.tensorboard))
    found = {}
    for path in sorted(run.tensorboard.glob("events*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else sum(value.histo.bucket)
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_metrics_come_back_as_written(run):
    with MetricsLog(run) as log:
        log.write(1, {"a": 0.1, "b": Metric(value=2.0, weight=7.0), "c": np.float32(0.5), "n": 3}, time_s=100.5)
        log.write(2, {"h": [1, 2, 3], "i": np.array([4.0, 5.0]), "nan": math.nan, "inf": -math.inf})
    first, second = read_metrics(run.metrics)
    assert (first.step, first.time_s) == (1, 100.5)
    assert first.values == {"a": 0.1, "b": 2.0, "c": 0.5, "n": 3.0}
    assert second.values["h"] == [1.0, 2.0, 3.0]
    assert second.values["i"] == [4.0, 5.0]
    assert second.values["inf"] == -math.inf
    assert isinstance(second.values["nan"], float)
    assert math.isnan(second.values["nan"])


@settings(max_examples=30)
@given(st.dictionaries(st.text("abc/", min_size=1), st.floats() | st.lists(st.floats(), max_size=3), max_size=4))
def test_any_number_comes_back(tmp_path_factory, values):
    with RunFolder.create(tmp_path_factory.mktemp("run")) as run, MetricsLog(run, tensorboard=False) as log:
        log.write(3, values)
        (line,) = read_metrics(run.metrics)
    assert line.values.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(line.values[name], value)  # takes NaN for equal to NaN


def test_each_line_is_on_the_disk_before_the_next(run):
    log = MetricsLog(run, tensorboard=False)
    log.write(1, {"a": 1.0})
    assert len(read_metrics(run.metrics)) == 1
    log.close()
    log.close()


def test_a_line_torn_by_a_kill_is_left_out_and_then_mended(run):
    run.metrics.write_text('{"step":1,"time_s":1,"a":1}\n{"step":2,"ti')
    assert [line.step for line in read_metrics(run.metrics)] == [1]
    with MetricsLog(run, tensorboard=False) as log:
        log.write(2, {"a": 2.0})
    assert [line.step for line in read_metrics(run.metrics)] == [1, 2]


@pytest.mark.parametrize("before", ["", '{"step":1,"time_s":1,"a":1}\n'], ids=["the first line", "a later line"])
def test_a_torn_line_of_any_length_is_cut_off(run, before):
    """The end of a file is read 65,536 bytes at a time."""
    for length in (65_535, 65_536, 200_000):
        run.metrics.write_text(before + '{"step":2,"a":"' + "x" * (length - 15))
        MetricsLog(run, tensorboard=False).close()
        assert run.metrics.read_text() == before


def test_a_damaged_line_is_named(run):
    run.metrics.write_text('{"step":1,"time_s":1}\nnonsense\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2: not a line of JSON"):
        read_metrics(run.metrics)


def test_lines_are_read_as_they_come_each_once_also_across_a_resume(run):
    def read(tail):
        return [(line.step, line.values["a"]) for line in tail.read()]

    tail = MetricsTail(run.metrics)
    assert read(tail) == []
    with MetricsLog(run, tensorboard=False) as log:
        log.write(1, {"a": 1.0})
        assert read(tail) == [(1, 1.0)]
        log.write(2, {"a": 2.0})
        log.write(3, {"a": 3.0})
    with run.metrics.open("a") as file:
        file.write('{"step":4,"time_s":1')
        file.flush()
        assert read(tail) == [(2, 2.0), (3, 3.0)]
        file.write(',"a":4}\nnonsense\n{"step":5,"time_s":1,"a":5}\n')
    assert read(tail) == [(4, 4.0), (5, 5.0)]
    run.metrics.write_bytes(run.metrics.read_bytes().replace(b"nonsense\n", b""))
    resumed = MetricsTail(run.metrics, resume_step=3)
    assert read(resumed) == [], "what the resume will cut off"
    with MetricsLog(run, tensorboard=False, resume_step=3) as log:
        log.write(4, {"a": 40.0})
        assert read(resumed) == [(4, 40.0)]
        log.write(5, {"a": 50.0})
    assert read(resumed) == [(5, 50.0)]


def test_a_curve_of_tensorboard_goes_on_where_a_killed_run_is_resumed(run):
    killed = MetricsLog(run)
    for step in range(1, 6):
        killed.write(step, {"a": float(step), "h": [step]})
    (events,) = run.tensorboard.iterdir()
    assert scalars(run)["a"][-1] == (5, 5.0)  # without a close: each step is there at once
    events.write_bytes(events.read_bytes()[:-40])  # torn by the kill, and short of a step that metrics.jsonl has
    with MetricsLog(run, resume_step=3) as log:
        log.write(4, {"a": 40.0})
    expected = {"a": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)], "h": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    assert scalars(run) == expected
    MetricsLog(run, resume_step=-1).close()
    assert scalars(run) == {}


def test_tensorboard_gets_scalars_and_histograms_but_nothing_infinite(run):
    with MetricsLog(run) as log:
        log.write(7, {"a": 0.5, "h": [1, 2, 3], "nan": math.nan, "empty": []})
    assert scalars(run) == {"a": [(7, 0.5)], "h": [(7, 6.0)]}


def test_a_missing_file_has_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "none") == []


def generation(step, kind="train", text="4"):
    return Generation(step=step, kind=kind, version=step - 1, prompt="2+2?", completion=text, reward=1.0)


def test_half_a_character_in_a_completion_does_not_end_the_run(run):
    odd = Generation(step=1, kind="train", version=0, prompt="2+2?", completion="a\ud800b", reward=math.nan)
    with GenerationsLog(run) as log:
        log.write([odd, generation(2, "train")])
    lines = run.generations.joinpath("train.jsonl").read_text().splitlines()
    assert '"completion":"a?b","reward":null' in lines[0]
    assert len(lines) == 2


def test_generations_come_back_by_kind_and_are_cut_on_resume(run):
    with GenerationsLog(run) as log:
        log.write([generation(1), generation(2, "validation", "a\nb\u2028</script>"), generation(2)])
    assert read_generations(run, "train") == [generation(1), generation(2)]
    assert read_generations(run, "validation") == [generation(2, "validation", "a\nb\u2028</script>")]
    with GenerationsLog(run, resume_step=1) as log:
        log.write([generation(2, text="again")])
    assert [each.completion for each in read_generations(run, "train")] == ["4", "again"]
    assert read_generations(run, "validation") == []


def test_everything_is_written_and_cut_where_the_run_resumes(run):
    with RunLog(run, LogConfig(), 3, None) as log:
        log.message("hello")
        for step in (1, 2):
            with log.measure("trainer-0", "update"):
                log.write(step, {"train/loss": 1.0 / step})
            log.write_generations([generation(step)])
            log.alarm(step, f"slow at {step}")
            answers = [ItemAnswers(step=step, item=0, prompt="2+2?", answer="4", samples=())]
            log.write_validation(step, {"eval/reward": 0.5}, {"sums": answers})
            run.checkpoints.set_score(step, step / 4)
    with RunLog(run, LogConfig(), 3, 1) as log:
        for step in (1, 2):
            with run.checkpoints.write(step):
                pass
        assert [each.score for each in run.checkpoints.all()] == [0.25, None], "other weights had the second score"
        log.write(2, {"train/loss": 7.0})
        with pytest.raises(ZeroDivisionError), log.measure("trainer-0", "fails"):
            print(1 // 0)
    values = [(line.step, name, value) for line in read_metrics(run.metrics) for name, value in line.values.items()]
    assert values == [(1, "train/loss", 1.0), (1, "eval/reward", 0.5), (2, "train/loss", 7.0)]
    assert [each.step for each in read_generations(run, "train")] == [1]
    assert read_alarms(run) == [Alarm(step=1, text="slow at 1")]
    assert [each.step for each in read_answers(run.validation / "sums.jsonl")] == [1]
    assert [event["name"] for event in read_timeline(run.timeline) if event["ph"] == "X"] == [
        "update",
        "update",
        "fails",
    ]
    assert len(list(run.tensorboard.iterdir())) >= 1


def test_trackers_get_each_completion_once_and_numbers_that_are_finite(run):
    numbers, tables = [], []
    tracker = Tracker(
        lambda values, step: numbers.append((step, values)),
        lambda: None,
        lambda name, step, rows: tables.append((name, step, [row["step"] for row in rows])),
    )
    with GenerationsLog(run, trackers=[tracker]) as log:
        for step in range(1, 66):
            log.write([generation(step)])
        log.write([generation(65, "validation"), generation(65, "validation")])
    validated = ("generations/validation", 65, [65, 65])
    assert tables == [
        ("generations/train", 64, [*range(1, 65)]),
        validated,
        ("generations/train", 65, [65]),
    ], "those trained on in tables of 64"
    with MetricsLog(run, tensorboard=False, trackers=[tracker]) as log:
        log.write(3, {"a": 1.0, "nan": math.nan, "h": [1, 2]})
        log.write(4, {"inf": math.inf})
    assert numbers == [(3, {"a": 1.0})]


@pytest.mark.parametrize(("resume_step", "steps"), [(None, [0, 5]), (-1, [0, 5]), (4, [4, 5])])
def test_the_pace_of_a_resumed_run_is_that_of_its_own_updates(run, resume_step, steps):
    with RunLog(run, LogConfig(tensorboard=False), 10, resume_step) as log:
        log.write(5, {"train/loss": 1.0})
        assert [step for _, step in log._progress._marks] == steps


def test_what_is_turned_off_is_not_written(run):
    with RunLog(run, LogConfig(tensorboard=False, timeline=False), 1, None) as log, log.measure("trainer-0", "update"):
        log.write(1, {"train/loss": 1.0})
    assert not run.timeline.exists()
    assert list(run.tensorboard.iterdir()) == []


def test_the_end_of_a_run_is_compared_with_its_beginning(run, capsys):
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


def test_the_checkpoint_of_a_run_is_the_best_or_else_the_latest(run):
    with pytest.raises(RunFolderError, match="holds no whole checkpoint"):
        run.checkpoints.chosen()
    for step in (1, 2):
        with run.checkpoints.write(step):
            pass
    assert run.checkpoints.chosen().step == 2
    run.checkpoints.set_score(1, 0.5)
    assert run.checkpoints.chosen().step == 1


def test_room_is_asked_for_all_checkpoints_at_once():
    full, plain = CheckpointConfig(keep=2), CheckpointConfig(keep=2, save_optimizer=False)
    assert full.room_bytes(1000, is_lora=False) == 4 * 12_000 + 2**26
    assert full.room_bytes(1000, is_lora=True) == plain.room_bytes(1000, is_lora=False) == 4 * 4_000 + 2**26


TRACKERS = ("wandb", "trackio", "mlflow")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_names_its_install_line(name, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, name, None)  # what Python itself does to forbid an import
    with (
        RunFolder.create(tmp_path / "run") as run,
        pytest.raises(BackendError, match=rf'{name} is not installed \(.*pip install "offbeat-run\[{name}\]"'),
    ):
        open_trackers(LogConfig(trackers=(name,)), run)
    with pytest.raises(BackendError, match=rf'{name} is not installed; .*pip install "offbeat-run\[{name}\]"'):
        check_trackers(LogConfig(trackers=(name,)))


def test_a_tracker_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("def init(**_): raise RuntimeError('no key')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with (
        RunFolder.create(tmp_path / "run") as run,
        pytest.raises(
            BackendError, match=r"wandb did not start: no key; fix the cause, or leave it out of log.trackers"
        ),
    ):
        open_trackers(LogConfig(trackers=("wandb",)), run)
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
