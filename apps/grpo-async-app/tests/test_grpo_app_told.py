"""A run reports what its user would otherwise find out late: validations, completions cut off, how it stands."""

import json
import re
import shutil
from pathlib import Path

import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._run.log.cut_off_alarm import CutOffAlarm
from offbeat_core import load_config
from offbeat_run import RunFolder, read_alarms
from offbeat_testing import CommandLine, RunningCommand

NO_WORD = "every_updates = 2\n"
"""The line about validation in the configuration of the tests."""


def settings(config: Path, *words: str) -> GrpoConfig:
    return load_config(config, GrpoConfig, words)


def test_what_is_held_out_is_validated_where_nothing_is_said(config: Path, command: CommandLine) -> None:
    config.write_text(config.read_text().replace(NO_WORD, ""))
    assert settings(config).validates_every == 50
    assert settings(config, "--data.eval_size=0").validates_every == 0
    assert settings(config, "--data.eval_size=0", "--data.eval_path=more.jsonl").validates_every == 50
    assert settings(config, "--reward.name=").validates_every == 0, "no reward judges"
    assert settings(config, "--eval.every_updates=0").validates_every == 0
    assert settings(config, "--eval.every_updates=7").validates_every == 7
    planned = " ".join(command("plan", config).out.split())
    assert "before training, every 50 updates and at the end, held-out: 4 prompts" in planned
    refused = command("plan", config, "--data.eval_size=0", "--eval.stop_at_accuracy=0.5")
    assert refused.code == 2
    assert "eval.stop_at_accuracy = 0.5 has no effect without validations" in refused.err


def planned_prompt(command: CommandLine, config: Path, *words: object) -> str:
    planned = command("plan", config, "--json", *words)
    assert planned.code == 0, planned.err
    [row] = [row["text"] for row in json.loads(planned.out)["rows"] if row["what"] == "a prompt"]
    return str(row)


def test_a_plan_shows_a_prompt_as_the_model_gets_it_and_where_its_template_is_from(
    config: Path, command: CommandLine, model: Path, tmp_path: Path
) -> None:
    rendered = r"<|im_start|>user\nwhat is 0 and one?<|im_end|>\n<|im_start|>assistant\n"
    template = (model / "chat_template.jinja").read_text()
    for_all = "rendered with the chat template of"
    assert planned_prompt(command, config) == f"{for_all} chat_template.jinja: {rendered}"
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template*"))
    raw = "as it is, without a chat template: what is 0 and one?"
    assert planned_prompt(command, config, "--model.path", bare) == raw
    assert planned_prompt(command, config, "--data.chat_template=off") == raw
    settings_file = bare / "tokenizer_config.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), "chat_template": template}))
    assert planned_prompt(command, config, "--model.path", bare) == f"{for_all} tokenizer_config.json: {rendered}"


def test_a_long_prompt_is_cut_in_the_middle_and_no_command_for_the_terminal(
    config: Path, command: CommandLine, tmp_path: Path
) -> None:
    texts = ["begin \x1b]0;owned\x07" + "long " * (150 + number) + "end" for number in range(4)]
    rows = [json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts]
    (tmp_path / "long.jsonl").write_text("".join(rows))
    words = ["--data.path", tmp_path / "long.jsonl", "--data.eval_size=0", "--eval.every_updates=0"]
    words += ["--data.max_prompt_tokens=2000", "--rollout.max_model_len=2048"]
    said = planned_prompt(command, config, *words)
    assert "begin" in said
    assert "long end<|im_end|>" in said
    assert len(said) < 750
    planned = command("plan", config, *words)
    assert "\\x1b]0;owned" in planned.out
    assert "\x1b]0" not in planned.out


def test_a_run_with_held_out_rows_is_validated_before_and_at_its_end_and_says_how_often_it_was_cut_off(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    config.write_text(config.read_text().replace(NO_WORD, ""))
    run, words = tmp_path / "run", ["--rollout.samples_per_prompt=8", "--rollout.max_tokens=2"]
    output = run_to_its_end(forked_main, "train", config, "--out", run, *words)
    assert list(values_of(run, "eval/accuracy")) == [0, 5]
    assert "held-out prompts (4 items)" in output
    (alarm,) = [each.text for each in read_alarms(RunFolder.open(run, write=False))]
    assert re.match(r"\d+% of the completions of updates 1 to \d were cut off at rollout.max_tokens = 2 ", alarm)
    assert alarm in output
    assert alarm in (run / "report.html").read_text()


def test_a_run_without_held_out_rows_has_no_table_of_them(forked_main: Main, config: Path, tmp_path: Path) -> None:
    words = ["--data.eval_size=0", "--eval.every_updates=0"]
    output = run_to_its_end(forked_main, "train", config, "--out", tmp_path / "run", *words)
    assert "held-out prompts" not in output
    assert "before" not in output
    assert "cut off at" not in output, "so few samples show nothing"
    lines = output.splitlines()
    (last,) = (at for at, line in enumerate(lines) if re.match(r"updates 6   time ", line))
    assert "rollout idle" in " ".join(lines[last : last + 3])
    assert "rollout idle" not in lines[last - 1], "the update after which there is nothing left to sample"


def test_a_run_that_is_interrupted_and_resumed_says_so(
    forked_main: Main, config: Path, command: CommandLine, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", ["--data.epochs=40", "--eval.every_updates=0", "--checkpoint.every=1"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 3, "three updates", deadline_s=120)
        process.press_ctrl_c()
        assert process.wait(60) == 130, process.output
    assert command("report", run).code == 0
    assert '<span class="badge">interrupted</span>' in (run / "report.html").read_text()
    updates = max(values_of(run, "train/reward")) + 3
    run_to_its_end(forked_main, "resume", run, f"--engine.max_updates={updates}")
    page = (run / "report.html").read_text()
    assert '<span class="badge">finished</span> <span>interrupted once, resumed once</span>' in page
    assert page.count("grpo-async-app</span>") == 2, "both commands"
    ended = command("resume", run)
    assert ended.code == 0
    assert f"nothing is left to train: {updates} of {updates} updates are done" in ended.out
    assert "starting" not in ended.out, "no role for that"


@pytest.mark.parametrize(("share", "is_said"), [(0.25, False), (0.26, True)])
def test_the_alarm_about_cut_off_completions_follows_its_bound(config: Path, share: float, is_said: bool) -> None:
    alarm = CutOffAlarm(settings(config))
    assert bool(alarm.look(1, share, 64)) == is_said
    assert not alarm.look(2, share, 64), "said once"


def test_the_alarm_about_cut_off_completions_waits_for_enough_of_them(config: Path) -> None:
    alarm = CutOffAlarm(settings(config))
    assert [bool(alarm.look(update, 0.6, 16)) for update in range(1, 6)] == [False, False, False, True, False]
    late = CutOffAlarm(settings(config))
    said = [late.look(update, 0.0 if update < 20 else 1.0, 64) for update in range(1, 40)]
    (text,) = filter(None, said)
    assert text.startswith("38% of the completions of updates 15 to 22 were cut off at rollout.max_tokens = 8 ")


def test_an_alarm_that_an_earlier_process_gave_is_not_repeated(config: Path) -> None:
    first = CutOffAlarm(settings(config)).look(1, 0.9, 64)
    assert not CutOffAlarm(settings(config), [first]).look(2, 0.9, 64)
    assert CutOffAlarm(settings(config), ["mismatch alarm"]).look(2, 0.9, 64)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--environment.name=calculator"], "environment.max_tokens"),
        (["--agent.is_outside=true", "--reward.name="], "the tokens that agents ask for"),
    ],
)
def test_the_alarm_names_the_limit_that_cuts_off(config: Path, words: list[str], limit: str) -> None:
    assert limit in CutOffAlarm(settings(config, *words)).look(1, 1.0, 64)
