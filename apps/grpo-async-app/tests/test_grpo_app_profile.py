"""Traces of a real run: which roles, which updates, and what is in them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import ConfigError, load_config
from offbeat_testing import RunningCommand

Main = Callable[[], object]


def names_in(path: Path) -> set[str]:
    return {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}


@pytest.mark.nightly
def test_trainer_and_engines_trace_the_updates_asked_for(forked_main: Main, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--profile.steps=1:3", '--profile.roles=["trainer", "rollout-0"]', "--rollout.num_engines=2"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words, "--eval.every_updates=0") as process:
        assert process.wait() == 0, process.output
    found = {path.name for path in (run / "profile").iterdir()}
    assert found == {f"{role}-{step}.json" for role in ("trainer-0", "rollout-0") for step in (1, 2)}
    for step in (1, 2):
        assert {f"update {step}", "aten::mm"} <= names_in(run / "profile" / f"trainer-0-{step}.json")
    sampled = names_in(run / "profile" / "rollout-0-1.json") | names_in(run / "profile" / "rollout-0-2.json")
    assert "aten::softmax" in sampled, "the thread in which the engine samples is not seen"
    report = (run / "report.html").read_text()
    assert all(f"profile/{name}" in report for name in found)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--profile.steps=500:501"], "begins after the last of 5 updates"),
        (["--profile.steps=0:1", '--profile.roles=["scorer"]'], "no role 'scorer' to trace"),
        (["--profile.steps=2:1"], "FIRST below LAST"),
    ],
)
def test_what_would_trace_nothing_is_refused(config: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_run(load_config(config, GrpoConfig, words))
