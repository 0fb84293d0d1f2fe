"""Validation sets by name in real runs, beside training; evaluations that stand alone and continue after a kill."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.evaluation import check_evaluation
from grpo_async_app._run.log.run_logger import RunLogger
from grpo_async_app._run.validation import Validation
from offbeat_core import ConfigError, RunFolderError, load_config, parse_config
from offbeat_run import EvalFolder, ItemAnswers, RunFolder, SampledAnswer, read_answers, read_metrics, summarize
from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

SETS = """
[eval.sets.sums]
path = "{rows}"
max_prompts = 6
prompt_column = "question"
n = 4
k = [1, 4]
temperature = 1.0
top_p = 0.9
max_tokens = 6
[eval.sets.words]
path = "{rows}"
max_prompts = 3
prompt_column = "question"
reward = {{name = "rewards_of_words:has_a_vowel"}}
success_reward = 1.0
"""
A_VOWEL = "def has_a_vowel(prompt, completion):\n    return float(any(letter in 'aeiou' for letter in completion))\n"


@pytest.fixture
def sets(config: Path, tmp_path: Path, own_module: Callable[[str, str], None]) -> Path:
    """The small configuration with two sets more."""
    own_module("rewards_of_words", A_VOWEL)
    rows = tmp_path / "rows.jsonl"
    lines = [{"question": f"how much is {n} and one?", "answer": str(n + 1)} for n in range(12)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.write_text(config.read_text() + SETS.format(rows=rows))
    return config


def test_a_run_that_goes_on_knows_its_last_validation_and_what_came_of_it(sets: Path, tmp_path: Path) -> None:
    config = load_config(sets, GrpoConfig, ["--eval.score_set=words"])
    with RunFolder.create(tmp_path / "run") as run:
        logger: Any = RunLogger(run, config, num_updates=20)
        with logger.opened(-1):
            for step, accuracy in ((0, 0.25), (4, 0.5), (8, 0.75)):
                logger._opened.write(step, {"eval/words/accuracy": accuracy, "eval/accuracy": 1.0})
                logger._opened.write(step + 1, {"train/reward": 0.0})
            assert (logger.last_validated, logger.last_accuracy) == (-1, None)
        with logger.opened(6):
            assert (logger.last_validated, logger.last_accuracy) == (4, 0.5)


@pytest.mark.parametrize(("score_set", "reward"), [("words", 0.75), ("held-out", 0.5), ("", 0.5), ("other", 0.25)])
def test_a_checkpoint_is_as_good_as_the_set_that_is_named_or_the_prompts_held_out(
    score_set: str, reward: float
) -> None:
    def summary(name: str, reward: float) -> Any:
        samples = (SampledAnswer(reward=reward, right=False),)
        return summarize(name, 1, [ItemAnswers(step=1, item=0, prompt="", samples=samples)], 1)

    summaries = [summary("sums", 0.25), summary("held-out", 0.5), summary("words", 0.75)]
    assert Validation(version=1, answered=[], items={}, summaries=summaries).score(score_set) == reward


def by_step(run: Path, name: str) -> dict[int, list[ItemAnswers]]:
    found: dict[int, list[ItemAnswers]] = {}
    for item in read_answers(run / "validation" / f"{name}.jsonl"):
        found.setdefault(item.step, []).append(item)
    return found


def test_every_set_is_validated_before_while_and_after_training_as_it_says(
    forked_main: Main, sets: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = run_to_its_end(forked_main, "train", sets, "--out", run)
    assert "sums: pass@4" in said
    assert "words: accuracy" in said
    steps = [0, 2, 4, 5]
    for metric in ("eval/reward", "eval/sums/pass_at_4", "eval/sums/accuracy_low", "eval/words/accuracy"):
        assert list(values_of(run, metric)) == steps, metric
    answers = by_step(run, "sums")
    assert list(answers) == steps
    for step, items in answers.items():
        assert [item.item for item in items] == list(range(6))
        assert {len(item.samples) for item in items} == {4}
        assert all("how much" in item.prompt for item in items), items[0].prompt
        assert all(sample.num_tokens <= 6 for item in items for sample in item.samples)
        shares = [item.share_right for item in items]
        assert values_of(run, "eval/sums/accuracy")[step] == pytest.approx(sum(shares) / 6)
        # Beside training an answer may be of later versions; each says which, and none is older.
        assert all(version >= step for item in items for sample in item.samples for version, _ in sample.versions)
    rewards = {sample.reward for items in by_step(run, "words").values() for item in items for sample in item.samples}
    assert rewards <= {0.0, 1.0}
    assert "sums" in (run / "report.html").read_text()


def test_answers_are_the_same_when_the_sets_are_asked_again_by_a_run_that_is_resumed(
    forked_main: Main, sets: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_to_its_end(forked_main, "train", sets, "--out", run, "--engine.max_updates=2", "--checkpoint.every=1")
    before = by_step(run, "sums")
    run_to_its_end(forked_main, "resume", run, "--engine.max_updates=4")
    after = by_step(run, "sums")
    assert list(after) == [0, 2, 4]
    assert after[0] == before[0]


SLOW = ["--eval.sets.sums.n=256", "--eval.sets.sums.k=1", "--eval.sets.sums.max_tokens=24"]


@pytest.mark.nightly
@pytest.mark.parametrize("at_sync", ["go_on", "wait"])
def test_training_waits_for_a_validation_only_where_it_is_told_to(
    forked_main: Main, sets: Path, tmp_path: Path, at_sync: str
) -> None:
    run = tmp_path / "run"
    words = [*SLOW, f"--eval.at_sync={at_sync}", "--eval.sets.sums.max_prompts=12", "--data.epochs=2"]
    if at_sync == "wait":  # each of eleven validations is waited for, however short it is
        words.append("--eval.sets.sums.n=32")
    run_to_its_end(forked_main, "train", sets, "--out", run, *words, "--eval.every_updates=1")
    lines = [(line.step, "eval/sums/accuracy" in line.values) for line in read_metrics(run / "metrics.jsonl")]
    overtaken = [
        step for at, (step, is_eval) in enumerate(lines) if is_eval and max(s for s, _ in lines[: at + 1]) > step
    ]
    versions = {
        step: {version for item in items for sample in item.samples for version, _ in sample.versions}
        for step, items in by_step(run, "sums").items()
    }
    assert 0 in versions
    assert 10 in versions, "the last version is validated"
    if at_sync == "wait":
        assert not [step for step in overtaken if step + 1 < max(s for s, _ in lines) and len(versions[step]) > 1]
        assert all(answered == {step} for step, answered in versions.items())
        assert list(versions) == list(range(11))
    else:
        assert overtaken, "updates continued while a validation ran"
        assert any(len(answered) > 1 for answered in versions.values())
        assert len(versions) < 11, "a validation that runs is not begun a second time"


def test_prompts_that_are_trained_on_too_are_noticed_and_mistakes_are_one_line(
    command: CommandLine, sets: Path, tmp_path: Path
) -> None:
    ended = command("plan", sets, f"--eval.sets.twice.path={tmp_path / 'sums.jsonl'}")
    assert ended.code == 0, ended.err
    assert "20 prompts of eval.sets.twice are also training prompts" in " ".join(ended.out.split())
    ended = command("plan", sets, "--data.eval_size=0", "--data.eval_path=", "--eval.temperature=0.5")
    assert "eval.temperature: of held-out prompts alone, and there are none" in " ".join(ended.out.split()), ended.err
    for words, said in (
        (["--eval.sets.sums.temperature=0"], "n = 4 samples at temperature 0 are all the same"),
        (["--eval.sets.sums.k=8"], "k = 8 needs as many samples"),
        (["--eval.sets.sums.path=/nowhere"], "/nowhere"),
        (["--eval.sets.sums.max_tokens=90"], "eval.sets.sums.max_tokens = 154 is more than rollout.max_model_len"),
        (["--eval.score_set=sum"], "there are held-out, sums, words"),
        (["--eval.sets.words.reward.name=exact_mach"], "perhaps exact_match"),
        (["--eval.sets.held-out.path=x"], "this name is that of the prompts held out"),
    ):
        ended = command("plan", sets, *words)
        assert (ended.code, "Traceback" in ended.err) == (2, False), ended.err
        assert said in ended.err


def eval_words(model: Path, rows: Path, out: Path) -> list[object]:
    """A model alone, and a set that takes a while."""
    one = "--eval.sets.sums."
    return [
        *("eval", model, "--out", out, f"{one}path={rows}", f"{one}prompt_column=question", f"{one}n=4"),
        *(f"{one}temperature=1", f"{one}max_tokens=24", "--reward.name=number_match", "--rollout.device=cpu"),
        *("--rollout.max_model_len=96", "--rollout.dtype=float32", "--data.max_prompt_tokens=64"),
        *("--rollout.max_running=8", "--cluster.rollout_threads=1"),
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"question": f"how much is {n} and one?", "answer": str(n % 7)} for n in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_evaluation_killed_goes_on_and_ends_with_the_table_it_would_have_had(
    forked_main: Main, model: Path, rows: Path, tmp_path: Path
) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    answers = out / "sums.jsonl"
    with RunningCommand(forked_main, *eval_words(model, rows, out)) as process:
        process.wait_until(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= 3, "three answers")
        started = process.descendants()
        process.kill()
        process.wait()
        wait_until_gone(started, 10)
    given = answers.read_bytes().rpartition(b"\n")[0]
    assert 3 <= given.count(b"\n") + 1 < 30
    assert not (out / "table.md").exists()
    said = run_to_its_end(forked_main, *eval_words(model, rows, out))
    assert "items are answered in" in said
    assert answers.read_bytes().startswith(given), "answers that were given are kept"
    assert sorted(item.item for item in read_answers(answers)) == list(range(30))

    run_to_its_end(forked_main, *eval_words(model, rows, whole))
    assert (out / "table.txt").read_text() == (whole / "table.txt").read_text()
    assert (out / "table.md").read_text() == (whole / "table.md").read_text()
    [table] = json.loads((out / "table.json").read_text())["sets"]
    assert table["estimates"].keys() == {"avg@4", "pass@4", "maj@4", "reward"}
    assert table["num_items"] == 30

    with RunningCommand(forked_main, "compare", whole, out) as process:
        assert process.wait() == 0, process.output
        assert "of 30 items 0 gained, 0 lost" in process.output
    with RunningCommand(forked_main, *eval_words(model, rows, out), "--eval.sets.sums.top_k=3") as process:
        assert process.wait() == 2
        assert "holds answers of the set sums from other" in process.output


def test_an_evaluation_needs_nothing_of_training(config: Path, model: Path) -> None:
    text = config.read_text().replace('device = "cpu"\nlearning', 'device = "cuda:7"\nlearning')
    evaluation = check_evaluation(parse_config(text, GrpoConfig), ["held-out"])
    assert [each.name for each in evaluation.run.sets] == ["held-out"]
    with pytest.raises(ConfigError, match="--set sum: no such validation set; there are held-out"):
        check_evaluation(load_config(config, GrpoConfig), ["sum"])


@pytest.mark.parametrize(
    "change",
    [
        '--agent.command=["python", "better.py"]',
        '--agent.variables={TRIES = "4"}',
        "--agent.max_calls=2",
        "--agent.shows_answer=true",
        "--rollout.options={max_batched_tokens = 512}",
        "--data.answer_column=prompt",
    ],
)
def test_answers_of_another_agent_engine_or_answer_column_are_not_gone_on_with(
    config: Path, tmp_path: Path, change: str
) -> None:
    words = ['--agent.command=["python", "agent.py"]']

    def opened(*more: str) -> EvalFolder:
        asked = check_evaluation(load_config(config, GrpoConfig, [*words, *more]), []).asked()
        return EvalFolder(tmp_path / "answers", {}, asked)

    with opened() as folder:
        folder.write("held-out", ItemAnswers(step=0, item=0, prompt="", answer="", samples=()))
    with opened("--agent.max_running=2") as folder:
        assert list(folder.answered("held-out")) == [0]
    with pytest.raises(RunFolderError, match="holds answers of the set held-out from other"), opened(change):
        pass


def test_a_set_cannot_ask_a_reward_model_that_the_run_does_not_have(command: CommandLine, config: Path) -> None:
    path = config.parent / "sums.jsonl"
    own = '{name = "reward_model", reward_model = {path = "/models/judge"}}'
    config.write_text(f'{config.read_text()}\n[eval.sets.judged]\npath = "{path}"\nreward = {own}\n')
    ended = command("plan", config)
    assert ended.code == 2
    assert "eval.sets.judged.reward asks a reward model that section reward does not ask" in ended.err
