"""Runs that a program starts: its own function scores, its events come in order, it ends and goes on as it is asked."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from offbeat import (
    DPO,
    GRPO,
    SFT,
    CheckpointEvent,
    EndedEvent,
    Event,
    MessageEvent,
    MetricsEvent,
    import_config,
    resume,
)
from offbeat._sections import named
from offbeat_core import ConfigError, RunFolderError, load_config, toml_value
from offbeat_run import RunFolder, writer_of

Rows = list[dict[str, str]]
PATIENCE_S = 240.0
"""A run of this size takes 20 s on a machine that does nothing else."""


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"samples_per_promt": 4}}, "rollout.samples_per_promt: unknown key; did you mean"),
        ({"enginee": {"seed": 1}}, "[enginee]: unknown section; did you mean [engine]?"),
        ({"async_": {"mini_batch_size": -1}}, "async.mini_batch_size: must be an integer >= 1"),
        ({"engine": {"max_updates": "many"}}, "engine.max_updates: must be an integer >= 0, in updates"),
        ({"engine": 3}, "engine: must be a table, [engine], got a single value, the integer 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_the_error_of_the_command_when_the_training_is_made(
    sections: dict[str, Any], said: str, tmp_path: Path
) -> None:
    from grpo_async_app import GrpoConfig

    with pytest.raises(ConfigError) as raised:
        GRPO("model", "rows.jsonl", "number_match", **sections)
    assert said in str(raised.value)
    written = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}, **named(sections)}
    file = tmp_path / "file.toml"
    file.write_text("".join(f"{name} = {toml_value(table)}\n" for name, table in written.items()))
    with pytest.raises(ConfigError) as known:
        load_config(file, GrpoConfig)
    assert said in str(known.value)


def test_models_and_data_are_paths_rows_or_sections(rows: Rows) -> None:
    for train, make in ((rows, GRPO), (tuple(rows), SFT), ({"path": rows, "seed": 3}, DPO), (Path("rows.jsonl"), GRPO)):
        make({"path": "model", "trust_remote_code": False}, train, eval_data=rows)
    for wrong in (3, {"path": None}, iter(rows)):
        with pytest.raises(
            ConfigError, match=r"data.path: must be a path, a name of the Hub, a list of dicts or a Data"
        ):
            GRPO("model", wrong)
    with pytest.raises(ConfigError, match="unknown key"):
        DPO("model", rows, preference={"los": "ipo"})


CALLER = """
import sys
from offbeat import GRPO, DPO
model, rows, small = {model!r}, {rows!r}, {small!r}
plan = GRPO(model, rows, lambda prompt, completion: 0.5, **small).plan()
try:
    DPO("/nowhere/model", rows).train()
except Exception as error:
    print(type(error).__module__, type(error).__name__, error)
print([name for name in ("torch", "ray", "transformers") if name in sys.modules])
print(plan)
"""


def test_a_program_that_plans_and_fails_has_no_torch_and_gets_the_commands_error(
    model: Path, rows: Rows, small: dict[str, Any], tmp_path: Path
) -> None:
    code = CALLER.format(model=str(model), rows=rows, small=small)
    command, environment = [sys.executable, "-c", code], {**os.environ, "FORCE_COLOR": "1"}  # as a kernel of Jupyter
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "offbeat_core._errors ModelError model.path: no such folder: /nowhere/model" in done.stdout
    assert "\n[]\n" in done.stdout
    assert "offbeat.caller:lambda_: called as function(prompt, completion)" in " ".join(done.stdout.split())
    assert "it gave a made-up completion 0.5" in " ".join(done.stdout.split())
    assert [each.name for each in tmp_path.rglob("*")] == ["runs"], "a run that was refused leaves no rows"


def test_a_closure_scores_and_its_run_is_followed_from_here(
    model: Path, rows: Rows, small: dict[str, Any], tmp_path: Path
) -> None:
    given, thread = dict[float, str](), threading.current_thread()

    def score(prompt: Any, completion: str, answer: str | None = None, **_: Any) -> float:
        assert threading.current_thread() is not thread
        assert answer == rows[prompt.index]["answer"]
        given[worth := len(given) / 8] = completion
        return worth

    run = GRPO(model, rows, score, **small).start(tmp_path / "run")
    events = list(run)
    run.wait(PATIENCE_S)
    steps = [event.step for event in events if isinstance(event, MetricsEvent)]
    assert sorted(set(steps)) == [1, 2, 3]
    assert steps == sorted(steps)
    saved = [event for event in events if isinstance(event, CheckpointEvent)]
    assert [event.step for event in saved] == [1, 2, 3]
    for event in saved:
        before = events[: events.index(event)]
        assert any(isinstance(each, MetricsEvent) and each.step == event.step for each in before)
    assert events[-1] == EndedEvent(0)
    assert any(isinstance(event, MessageEvent) and event.text.startswith("run folder: ") for event in events)
    lines = [json.loads(line) for line in (run.folder / "generations" / "train.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 2, 3}
    for line in lines:
        assert line["completion"] == given[line["reward"]]
    assert run.metrics["train/reward"] == run.metrics["reward/offbeat.caller:score"] > 0
    assert (run.code, run.report.is_file()) == (0, True)
    assert "<iframe srcdoc=" in run._repr_html_()
    assert run.checkpoint == saved[-1].path

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run.checkpoint)


@pytest.mark.nightly
@pytest.mark.timeout(480)  # three starts of a run, and functions that hang
def test_what_raises_or_hangs_is_counted_and_a_run_that_is_stopped_goes_on(
    model: Path, rows: Rows, small: dict[str, Any], tmp_path: Path
) -> None:
    released, seen = threading.Event(), dict[int, list[str]]()

    def score(prompt: Any, completion: str) -> float:
        """Hang on the first completion of a prompt, and raise on the second."""
        known = seen.setdefault(prompt.index, [])
        if completion not in known:
            known.append(completion)
        if known.index(completion) == 0:
            released.wait(PATIENCE_S)
        elif not released.is_set():
            raise ValueError("what nothing judges")
        return 1.0

    reward = {"name": score, "timeout_s": 1.0, "on_error": "zero", "max_error_share": 1.0, "num_processes": 2}
    small["async_"]["mini_batch_size"] = 2
    small["engine"]["max_updates"] = 6
    small["checkpoint"]["every"] = 0
    with GRPO(model, rows, reward, **small).start(tmp_path / "run") as run:
        first = next(event for event in run if isinstance(event, MetricsEvent))
        asked_for = run.save(PATIENCE_S)
        run.stop(PATIENCE_S)
    assert run.code == 130
    assert run.checkpoint is not None
    assert asked_for in {each.path for each in run._files.checkpoints.all()}
    assert first.values["reward/timed_out"] == 0.5
    assert "ValueError on prompt" in (run.folder / "logs" / "reward_errors.log").read_text()
    assert "in score" in (run.folder / "logs" / "reward_errors.log").read_text()
    saved = run._files.checkpoints.latest()
    assert saved is not None
    assert first.step <= saved.step < 6
    released.set()
    with pytest.raises(ConfigError, match="the program gives other as reward"):
        resume(run.folder, reward=lambda_named("other")).wait(PATIENCE_S)
    again = resume(run.folder, reward=score, engine={"max_updates": saved.step + 1}, checkpoint={"every": 1})
    events = list(again)
    again.wait(PATIENCE_S)
    assert [event.step for event in events if isinstance(event, CheckpointEvent)] == [saved.step + 1]
    assert {event.step for event in events if isinstance(event, MetricsEvent)} == {saved.step + 1}
    assert again.metrics["reward/timed_out"] == 0


SCRIPT = """
import sys
from offbeat import GRPO
run = GRPO({model!r}, {rows!r}, lambda prompt, completion: float(len(completion)), **{small!r}).{how}("run")
for event in run:
    if type(event).__name__ == "MetricsEvent":
        print("updates", event.step)
        break
"""


@pytest.mark.nightly
@pytest.mark.timeout(480)
@pytest.mark.parametrize("how", ["train", "start"])
def test_a_program_that_is_interrupted_or_ends_leaves_a_run_that_was_saved(
    how: str, model: Path, rows: Rows, small: dict[str, Any], tmp_path: Path
) -> None:
    small["engine"]["max_updates"] = 100_000
    code = SCRIPT.format(model=str(model), rows={"path": rows, "epochs": 0}, small=small, how=how)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        assert any(line.startswith("updates") for line in lines)
        if how == "train":
            program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=PATIENCE_S)
    assert errors.endswith("KeyboardInterrupt\n") == (how == "train"), errors
    assert program.returncode == (-signal.SIGINT if how == "train" else 0)
    if how == "train":
        assert "resume with: grpo-async-app resume" in output
    saved = RunFolder.open(tmp_path / "run", write=False).checkpoints.latest()
    assert saved is not None
    assert writer_of(tmp_path / "run") is None


def lambda_named(name: str) -> Any:
    def other(prompt: Any, completion: str) -> float:
        return 0.0

    other.__name__ = name
    return other


class Table:
    """As much of a `datasets.Dataset` as is asked for."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def to_parquet(self, path: str) -> None:
        parquet.write_table(pyarrow.Table.from_pylist(self._rows), path)


def test_preferences_of_a_few_rows_are_learned(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
    engine = {"device": "cpu", "batch_size": 3, "max_updates": 2}
    events = list[Event]()
    training = DPO(model, Table(rows[:6]), eval_data=rows[6:], engine=engine)
    run = training.train(tmp_path / "run", on_event=events.append)
    assert "updates 2/2" in capfd.readouterr().out
    assert events[-1] == EndedEvent(0)
    assert [event.step for event in events if isinstance(event, CheckpointEvent)] == [2]
    assert {each.name for each in (tmp_path / "run-data").iterdir()} == {"train.parquet", "held-out.jsonl"}
    assert run.metrics["rewards/margins"] != 0
    assert (run.code, run.checkpoint) == (0, tmp_path / "run" / "checkpoints" / "step-000002")
    assert "rewards/accuracies" in run.evaluate()
    with pytest.raises(RunFolderError, match=r"no run is active here; its latest checkpoint is .*step-000002"):
        run.save()


def test_a_run_that_goes_on_saves_when_it_is_asked_and_one_that_is_killed_can_be_resumed(
    model: Path, tmp_path: Path
) -> None:
    data = {"path": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)], "epochs": 10_000}
    settings = {"engine": {"device": "cpu", "batch_size": 2}, "checkpoint": {"every": 0}}
    run = SFT(model, data, **settings).start(tmp_path / "run")
    assert any(isinstance(event, MetricsEvent) and event.step == 2 for event in run)
    saved = run.save(PATIENCE_S)
    assert run.code is None
    step = int(saved.name.removeprefix("step-"))
    assert step > 2
    assert any(isinstance(event, MetricsEvent) and event.step > step for event in run), "it goes on"
    run.kill()
    assert (run.code, run.checkpoint) == (-signal.SIGKILL, saved)
    again = resume(run.folder, engine={"max_updates": step + 1}, checkpoint={"every": 1})
    again.wait(PATIENCE_S)
    assert again.checkpoint is not None
    assert again.checkpoint.name == f"step-{step + 1:06}"


def test_options_of_another_framework_become_a_file_and_mistakes_its_errors(tmp_path: Path) -> None:
    script = tmp_path / "dpo.yaml"
    script.write_text("model_name_or_path: Qwen/Qwen3-0.6B\nbeta: 0.25\n")
    assert "beta = 0.25" in import_config("trl-dpo", script)
    script.write_text("model_name_or_path: Qwen/Qwen3-0.6B\nlearning_rate: 3.0e-5\n")
    assert "import trl` from" in (text := import_config("trl-sft", script))
    assert "learning_rate = 3e-05" in text
    with pytest.raises(ConfigError, match="No such file"):
        import_config("verl", tmp_path / "none.sh")
    assert [each.name for each in tmp_path.iterdir()] == ["dpo.yaml"]
