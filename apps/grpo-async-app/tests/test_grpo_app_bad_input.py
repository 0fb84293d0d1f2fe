"""Each mistake a user can make: one clear error, exit code 2, no traceback, nothing made."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from offbeat_testing import CommandConformance, CommandLine, RunningCommand, tiny_model


class TestBadInput(CommandConformance):
    mistakes: ClassVar = {
        "unknown key of the rollout": (["--rollout.temprature", "1"], "temperature"),
        "out of range in the rollout": (["--rollout.temperature", "-1"], "rollout.temperature"),
        "one sample with group advantages": (["--rollout.samples_per_prompt", "1"], "samples"),
        "option of another command": (["--seed", "3"], "takes no --seed"),
        "correction without effect": (["--algorithm.correction", "none", "--algorithm.tis_cap", "3"], "tis_cap"),
        "missing column": (["--data.answer_column", "solution"], "solution"),
        "every prompt too long": (["--data.max_prompt_tokens", "2"], "too long"),
        "no such device of the rollout": (["--rollout.device", "cuda:7"], "cuda:7"),
        "no such option of the trainer": (["--engine.options", "{tensor_paralel = 2}"], "tensor_parallel"),
        "temperature of the trainer alone": (["--engine.options", "{temperature = 0.5}"], "rollout.temperature"),
        "gradient of the entropy": (["--engine.options", "{entropy_gradient = true}"], "algorithm.entropy_coefficient"),
        "temperature of a critic": (
            ["--algorithm.advantage", "gae", "--critic.options", "{temperature = 0.5}"],
            "critic.options.temperature has no effect",
        ),
        "scale of adapters that are not there": (["--engine.lora_alpha", "8"], "engine.lora_alpha has no effect"),
        "tag that is not looked for": (["--reward.tag", "final"], "reward.tag = 'final' has no effect"),
        "signature without a function": (["--reward.signature", "trl"], "reward.signature = 'trl' has no effect"),
        "format of the head of a critic": (
            ["--algorithm.advantage", "gae", "--critic.options", '{head_dtype = "bfloat16"}'],
            "critic.options.head_dtype has no effect",
        ),
        "variable that each conversation sets": (
            ["--data.template_options", "{add_generation_prompt = false}"],
            "data.template_options",
        ),
        "heads that the ranks cannot share": (
            ["--engine.num_ranks", "3", "--engine.options", "{tensor_parallel = 3}"],
            "num_attention_heads",
        ),
        "more engines than a machine holds": (["--rollout.num_engines", "60000"], "lower rollout.num_engines"),
        "samples without measure": (["--rollout.samples_per_prompt", "1" + 30 * "0"], "rollout.samples_per_prompt"),
        "no such reward": (["--reward.name", "exact_mach"], "exact_match"),
        "no such rollout engine": (["--rollout.backend", "vlllm"], "'vlllm' is not installed"),
        "no room for the completion": (["--rollout.max_tokens", "90"], "max_model_len"),
    }


OWN = """
import sys
def many(prompt, completion):
    return [1.0]
def picky(prompt, completion):
    raise ValueError("no bread today")
def fine(prompt, completion):
    return 0.5
def nothing(prompt, completion):
    len(completion)
def unknown(prompt, completion):
    return float("nan")
def misspelt(prompt, completion):
    return lenght(completion)
def uninstalled(prompt, completion):
    import no_such_module
def outdated(prompt, completion):
    return sys.bread(completion)
def secretive(prompt, completion):
    import os
    return float(len(os.environ["JUDGE_API_KEY"]))
def huge(prompt, completion):
    return 1e30
def longest(prompt, completions):
    return [float(len(each) == max(map(len, completions))) for each in completions]
"""
COMPARES = "--reward.name=own_tried:longest"
CALCULATOR = ["--environment.name=calculator", "--environment.max_tokens=24"]
SET = ["--eval.sets.own.path=arithmetic:2", "--eval.sets.own.reward.name=own_tried:longest"]
BY_ITSELF = (
    "are scored one by one, each when it ends: it would have nothing to compare; take a reward of one completion"
)


@pytest.mark.parametrize(
    ("name", "words", "code", "said"),
    [
        ("many", [], 2, "must return a finite number: on prompt 0 it returned [1.0] (list)"),
        ("picky", ["--reward.on_error=fail"], 2, "no bread today"),
        ("nothing", [], 2, "must return a finite number: on prompt 0 it returned None (NoneType)"),
        ("unknown", ["--reward.on_error=zero"], 2, "it returned nan (float)"),
        (
            "misspelt",
            [],
            2,
            "NameError on prompt 0: name 'lenght' is not defined (OWN, line 14); found by scoring",
        ),
        (
            "uninstalled",
            [],
            2,
            "ModuleNotFoundError on prompt 0: No module named 'no_such_module' (OWN, line 16)",
        ),
        ("outdated", [], 2, "AttributeError on prompt 0: module 'sys' has no attribute 'bread' (OWN, line 18)"),
        ("secretive", [], 2, "unless reward.forward_env names it: ['JUDGE_API_KEY']"),
        (
            "secretive",
            ["--reward.forward_env=JUDGE_API_KEY"],
            0,
            "tried once, and works: it gave a made-up completion 4",
        ),
        ("huge", [], 0, "a reward must be in [-1e+06, 1e+06] (reward.lowest, reward.highest): got 1e+30"),
        ("picky", [], 0, "no bread today; such completions are left out (reward.on_error = drop)"),
        ("fine", [], 0, "tried once, and works: it gave a made-up completion 0.5"),
    ],
)
def test_a_reward_function_is_tried_once_before_anything_starts(
    command: CommandLine,
    config: Path,
    own_module: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: list[str],
    code: int,
    said: str,
) -> None:
    own_module("own_tried", OWN)
    monkeypatch.setenv("JUDGE_API_KEY", "1234")
    said = said.replace("OWN", str(tmp_path / "modules" / "own_tried.py"))
    ended = command("plan", config, f"--reward.name=own_tried:{name}", "--data.shuffle=false", *words)
    assert ended.code == code, ended.err
    assert said in " ".join((ended.err if code else ended.out).split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([COMPARES, *CALCULATOR], f"and episodes of environment.name = 'calculator' {BY_ITSELF}"),
        ([COMPARES, '--agent.command=["true"]'], f"and episodes of section agent {BY_ITSELF}"),
        (
            [COMPARES, "--algorithm.advantage=remax"],
            "algorithm.advantage = remax has the greedy completion scored by it",
        ),
        (
            [COMPARES, "--algorithm.advantage=gae", "--rollout.samples_per_prompt=1"],
            "samples_per_prompt = 1 makes groups",
        ),
        (
            [*SET, "--eval.sets.own.environment.name=calculator"],
            f"eval.sets.own: reward own_tried:longest compares the completions of a group, and episodes of "
            f"environment.name = 'calculator' {BY_ITSELF}",
        ),
        ([*SET, '--agent.command=["true"]'], "eval.sets.own: reward own_tried:longest compares the completions of a "),
    ],
)
def test_a_reward_that_compares_is_refused_where_it_would_see_one_completion(
    command: CommandLine, config: Path, own_module: Callable[[str, str], None], words: list[str], why: str
) -> None:
    own_module("own_tried", OWN)
    ended = command("plan", config, *words)
    assert ended.code == 2, ended.out
    assert why in " ".join(ended.err.split())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([COMPARES], "held-out"),
        ([*SET, "--eval.sets.own.n=1"], "own"),
        ([*SET, "--eval.sets.own.n=2", "--eval.sets.own.temperature=1"], ""),
    ],
)
def test_a_plan_says_where_a_reward_that_compares_has_nothing_to_compare(
    command: CommandLine, config: Path, own_module: Callable[[str, str], None], words: list[str], name: str
) -> None:
    own_module("own_tried", OWN)
    ended = command("plan", config, *words)
    assert ended.code == 0, ended.err
    output = " ".join(ended.out.split())
    assert (f"compares the completions of a prompt, and validation set {name} samples one" in output) == bool(name)
    assert ("compares the completions" in output) == bool(name)


def test_a_plan_says_where_an_update_takes_more_prompts_than_there_are(command: CommandLine, config: Path) -> None:
    planned = command("plan", config, "--async.mini_batch_size=50")
    assert planned.code == 0, planned.err
    text = " ".join(planned.out.split())
    assert "an update takes 50 prompts (async.mini_batch_size x async.require_batches), and an epoch has 20" in text
    assert "an epoch has" not in command("plan", config).out


def test_an_engine_that_refuses_its_settings_leaves_the_runs_name_free(
    forked_main: Callable[[], object], config: Path, tmp_path: Path
) -> None:
    words = ["train", config, "--out", tmp_path / "run", "--rollout.options", "{pack = true}"]
    with RunningCommand(forked_main, *words) as process:
        assert process.wait() == 2
        assert "rollout-torch has no option 'pack'" in process.output
        assert "Traceback" not in process.output
    assert not (tmp_path / "run").exists()


def test_sequences_longer_than_the_trainer_computes_faithfully_are_refused(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 96}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **factors}
    folder = tiny_model(tmp_path / "model", config={"rope_parameters": rope})
    ended = command("plan", config, "--model.path", folder)
    assert ended.code == 2
    assert "rollout.max_model_len = 96 must be below 96: with rope_type 'longrope'" in " ".join(ended.err.split())


def test_a_family_that_the_engine_does_not_have_is_refused_before_anything_starts(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "experts", "glm4_moe")
    for words in (("--model.path", path), ("--teacher.path", path, "--algorithm.distillation_coefficient=1")):
        ended = command("plan", config, *words)
        assert ended.code == 2
        assert "model family 'glm4_moe' is not supported by rollout-torch; supported: qwen3" in ended.err
