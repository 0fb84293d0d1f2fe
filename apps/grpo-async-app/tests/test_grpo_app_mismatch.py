"""The mismatch of trainer and rollout engines in real runs: always written, and seen when an engine reports others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.rollout import RolloutRole
from grpo_async_app._run.log.mismatch_alarm import ALARM_METRIC, MismatchAlarm
from grpo_async_app._run.log.run_logger import RunLogger
from offbeat_core import Completion, Floats, GenerateRequest, Metric, load_config
from offbeat_objectives import AlgorithmConfig
from offbeat_run import MetricsLine, RunFolder, read_alarms, read_metrics

FIGURES = ("kl", "abs_p99_nats", "abs_max_nats", "ess_share")
ON_POLICY = ("--async.staleness_threshold=0", "--async.partial_rollout=false", "--rollout.seed=7")
MOVES = ("--algorithm.entropy_coefficient=1", "--engine.learning_rate=1e-3")
"""Gives every update a gradient: a model with random weights earns no reward."""
SHORT = ("--eval.every_updates=0", "--checkpoint.every=0")

Tamper = Callable[[Callable[[Floats], Floats]], None]


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch) -> Tamper:
    """Changes the log-probabilities that rollout engines return; all roles are forks of this process."""
    generate = RolloutRole.generate

    def change(logprobs: Callable[[Floats], Floats]) -> None:
        async def tampered(self: RolloutRole, request: GenerateRequest) -> list[Completion]:
            return [replace(each, logprobs=logprobs(each.logprobs)) for each in await generate(self, request)]

        monkeypatch.setattr(RolloutRole, "generate", tampered)

    return change


@pytest.mark.parametrize(
    "words",
    [MOVES, ("--algorithm.correction_form=bypass", "--async.require_batches=2"), ("--algorithm.loss=gspo", *ON_POLICY)],
    ids=["default", "bypass with two steps", "on policy"],
)
def test_every_update_of_a_run_measures_the_mismatch(
    forked_main: Main, config: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    output = run_to_its_end(forked_main, "train", config, "--out", run, *SHORT, *words)
    assert "mismatch alarm" not in output
    assert "mismatch p99 nats" in output
    updates = set(values_of(run, "train/reward"))
    for figure in FIGURES:
        assert set(values_of(run, f"mismatch/{figure}")) == updates, figure
    # Both sides compute this model in float32: what the same weights differ by is rounding.
    assert max(values_of(run, "mismatch/abs_max_nats_lag0").values()) < 1e-3
    assert min(values_of(run, "mismatch/ess_share_lag0").values()) > 0.999
    assert values_of(run, "mismatch/lagged_share")[1] == (0.5 if "--async.require_batches=2" in words else 0)
    if words == MOVES:
        assert max(values_of(run, "mismatch/abs_max_nats_lagged").values()) > 1e-3, "older weights differ by more"


@pytest.mark.parametrize("words", [(), ("--algorithm.correction_form=bypass",)], ids=["decoupled", "bypass"])
def test_a_run_shows_log_probabilities_that_are_eight_nats_off(
    forked_main: Main, config: Path, tmp_path: Path, tamper: Tamper, words: tuple[str, ...]
) -> None:
    tamper(lambda logprobs: logprobs - np.float32(8))
    run = tmp_path / "run"
    output = run_to_its_end(forked_main, "train", config, "--out", run, *SHORT, *ON_POLICY, *words)
    first = next(line.values for line in read_metrics(run / "metrics.jsonl"))
    alarm = "mismatch alarm from the first update on (1): trainer and rollout engines differ by 8 nats"
    assert output.count("mismatch alarm") == 1, "said once"
    assert alarm in output
    assert [(each.step, each.text.startswith(alarm)) for each in read_alarms(RunFolder.open(run, write=False))] == [
        (1, True)
    ]
    assert alarm in (run / "report.html").read_text()
    assert first["mismatch/abs_max_nats_lag0"] == pytest.approx(8, abs=0.01)
    assert first["mismatch/abs_p99_nats_lag0"] == pytest.approx(8, abs=0.01)
    assert first["mismatch/kl"] == pytest.approx(np.exp(8) - 9, rel=0.01)


def test_two_ranks_measure_what_one_does(forked_main: Main, config: Path, tmp_path: Path, tamper: Tamper) -> None:
    tamper(lambda logprobs: logprobs - np.arange(len(logprobs), dtype=np.float32) / 2)
    names = [f"mismatch/{figure}{tokens}" for figure in FIGURES for tokens in ("", "_lag0")]
    found: list[dict[str, float]] = []
    for num_ranks in (1, 2):
        run = tmp_path / str(num_ranks)
        words = [*SHORT, *ON_POLICY, f"--engine.num_ranks={num_ranks}", "--engine.max_tokens_per_microbatch=64"]
        run_to_its_end(forked_main, "train", config, "--out", run, *words)
        first = next(line.values for line in read_metrics(run / "metrics.jsonl"))
        found.append({name: float(first[name]) for name in names})  # type: ignore[arg-type]
    one, two = found
    assert one["mismatch/abs_max_nats"] > 2
    for name in names:
        assert two[name] == pytest.approx(one[name], rel=1e-4), name


def test_a_token_is_lagged_unless_the_weights_that_sampled_it_scored_it() -> None:
    from test_grpo_app_parts import FixedLogprobs, group

    class NotAsked:
        def logprobs(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("bypass recomputes nothing")

    groups = [group(9, [3, 2], [1.0, 0.0]), group(4, [2, 2], [1.0, 0.0])]  # the first token's version is 9, and 4

    def lagged(parts: Any) -> list[list[float]]:
        return [[float(x) for each in part for x in each.extras["lagged"][each.loss_mask]] for part in parts]

    recomputed, _ = build_batches(groups, AlgorithmConfig(), FixedLogprobs(), 2, version=9)  # type: ignore[arg-type]
    assert lagged(recomputed) == [[0, 0, 0, 0, 0], [1, 0, 1, 0]]
    bypass = AlgorithmConfig(correction_form="bypass")
    stepped, _ = build_batches(groups, bypass, NotAsked(), 2, version=9)  # type: ignore[arg-type]
    assert lagged(stepped) == [[0, 0, 0, 0, 0], [1, 1, 1, 1]]
    later, _ = build_batches(groups, AlgorithmConfig(), FixedLogprobs(), 1, version=10)  # type: ignore[arg-type]
    assert lagged(later) == [[1] * 9]


def looks(alarm: MismatchAlarm, values: list[float | None], first: int = 1) -> list[str]:
    """Return the alarm's message at each update; None stands for an update without a token of lag 0."""
    measured = [{} if value is None else {ALARM_METRIC: Metric(value=value)} for value in values]
    return [alarm.look(update, metrics) for update, metrics in enumerate(measured, first)]


def test_the_alarm_says_once_since_when() -> None:
    assert not any(looks(MismatchAlarm(0.5), [0.1, 0.5, None]))
    assert not any(looks(MismatchAlarm(None), [8.0]))
    from_the_first = looks(MismatchAlarm(0.5), [None, 3.0, 4.0])
    assert [bool(text) for text in from_the_first] == [False, True, False]
    assert "from the first update on (2)" in from_the_first[1]
    later = looks(MismatchAlarm(0.5), [0.1, 0.02, 3.0, 4.0])
    assert [bool(text) for text in later] == [False, False, True, False]
    assert "since update 3 (until then at most 0.1 nats)" in later[2]
    assert "since update 2 (until then at most 0.5 nats)" in looks(MismatchAlarm(0.5), [0.5, 3.0])[1]


def line(step: int, value: float) -> MetricsLine:
    return MetricsLine(step=step, time_s=0.0, values={ALARM_METRIC: value})


def test_a_resumed_run_does_not_repeat_the_alarm_and_knows_what_was_before() -> None:
    given = looks(MismatchAlarm(0.5), [0.1, 3.0])
    resumed = MismatchAlarm(0.5, [line(1, 0.1), line(2, 3.0)], given)
    assert not any(looks(resumed, [4.0], first=3))
    quiet = MismatchAlarm(0.5, [line(1, 0.1), line(2, 0.2)])
    assert "since update 3 (until then at most 0.2 nats)" in looks(quiet, [4.0], first=3)[0]


def test_a_resume_under_another_bound_gives_the_alarm_of_that_bound_once() -> None:
    """A value of before that is above the new bound alone was never reported; the run may stay above it to its end."""
    before = [line(1, 0.1), line(2, 0.4), line(3, 0.2)]
    [lower, again] = looks(MismatchAlarm(0.3, before), [5.0, 6.0], first=4)
    assert "since update 2 (until then at most 0.1 nats)" in lower
    assert "differ by 5 nats" in lower
    assert again == ""
    assert not any(looks(MismatchAlarm(0.3, [*before, line(4, 5.0)], [lower]), [6.0], first=5))
    [higher] = looks(MismatchAlarm(2.0, [*before, line(4, 5.0)], [lower]), [6.0], first=5)
    assert "since update 4 (until then at most 0.4 nats)" in higher
    assert any(looks(MismatchAlarm(0.0, before, [higher, lower]), [0.1], first=5)), "0.3 begins with another bound"
    assert not any(looks(MismatchAlarm(None, before, [lower]), [9.0], first=5))


def test_what_was_told_is_taken_from_the_alarms_of_the_run(config: Path, tmp_path: Path) -> None:
    measured = {ALARM_METRIC: Metric(value=0.4)}

    def look(run: RunFolder, bound: str, update: int) -> str:
        chosen = load_config(config, GrpoConfig, [f"--algorithm.mismatch_alarm_nats={bound}"])
        logger: Any = RunLogger(run, chosen, num_updates=20)
        with logger.opened(update - 1):
            alarm: str = logger._mismatch_alarm.look(update, measured)
            logger._opened.write(update, measured)
            if alarm:
                logger._opened.alarm(update, alarm)
        return alarm

    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        given = [bool(look(run, *at)) for at in (("0.5", 1), ("0.3", 2), ("0.3", 3), ("0.2", 4), ("0.3", 5))]
        assert given == [False, True, False, True, False]
        assert [alarm.step for alarm in read_alarms(run)] == [2, 4]
