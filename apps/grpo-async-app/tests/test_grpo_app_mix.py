"""Training prompts of several sources, drawn by weights and by success: draws, environments and rewards, resume."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest
from grpo_runs import Main, latest_checkpoint, run_to_its_end, trained_prompts, values_of

from grpo_async_app._config.resolved import Source, resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.evaluation import check_evaluation
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._preflight.settings import check_same_data
from grpo_async_app._preflight.sources import check_sources
from grpo_async_app._run.prompt_stream import PromptStream
from offbeat_core import ConfigError, RunFolderError, load_config, parse_config
from offbeat_data import EpochOrder, Prompt
from offbeat_run import RunFolder, read_answers, read_generations
from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

WEIGHTS = {"sums": 3, "talks": 1, "words": 2}
GROUPS_PER_UPDATE = 4
OWN = '''
from offbeat_data import RewardScore


class OneReply:
    """Answers once, with words of its own; its reward is a half."""

    def __init__(self, words):
        self.words, self.num_turns = words, 0

    async def reset(self, prompt):
        pass

    async def step(self, text):
        self.num_turns += 1
        return [{"role": "tool", "content": self.words}] if self.num_turns == 1 else None

    async def reward(self):
        return RewardScore(value=0.5, parts={"turns": float(self.num_turns)})

    async def close(self):
        pass


def twice(prompt, completion):
    return 2.0


def even(prompt, completion):
    return float(int(prompt.answer) % 2 == 0)
'''
MIX = """
[data.mix.words]
path = "{folder}/words.jsonl"
weight = 2
prompt_column = "question"
reward = {{name = "mixed_own:twice"}}
success_reward = 2.0
[data.mix.words.environment]
[data.mix.sums]
path = "{folder}/sums.jsonl"
weight = 3
environment = {{name = "mixed_own:OneReply", options = {{words = "and then?"}}, max_tokens = 64}}
[data.mix.talks]
path = "{folder}/talks.jsonl"
success_reward = 0.4
"""
IN_STEP = ["--async.staleness_threshold=0", "--async.partial_rollout=false"]
"""The groups of an update are the next ones in order, and begin when all before them have ended."""


def write_rows(path: Path, column: str, words: str, number: int) -> None:
    rows = [{column: f"{words} {at}?", "answer": str(at)} for at in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def mixed(config: Path, tmp_path: Path, own_module: Callable[[str, str], None]) -> Path:
    """The small configuration with three sources: a reward of its own, an environment of its own, and neither."""
    own_module("mixed_own", OWN)
    write_rows(tmp_path / "words.jsonl", "question", "say", 5)
    write_rows(tmp_path / "sums.jsonl", "prompt", "how much is", 7)
    write_rows(tmp_path / "talks.jsonl", "prompt", "talk about", 3)
    text = config.read_text().replace(f'path = "{tmp_path}/sums.jsonl"\neval_size = 4\n', "")
    text = text.replace("every_updates = 2", "every_updates = 0").replace('[reward]\nname = "number_match"\n', "")
    text = text.replace("max_tokens = 8", f"max_tokens = 8\nstop = {json.dumps(list(ascii_letters))}")
    text = text.replace("max_model_len = 96", "max_model_len = 192").replace("[engine]", "[engine]\nmax_updates = 6")
    environment = '\n[environment]\nname = "mixed_own:OneReply"\noptions = {words = "go on"}\nmax_tokens = 48\n'
    config.write_text(text + environment + MIX.format(folder=tmp_path))
    return config


def stream_of(config: GrpoConfig, known: dict[str, object] | None = None) -> PromptStream:
    return PromptStream(config, check_run(config).run.sources, known or {})


def source_of(text: str) -> str:
    return next(name for words, name in (("say", "words"), ("how much", "sums"), ("talk", "talks")) if words in text)


def check_replies(run: Path) -> None:
    """Each source has its environment, or none."""
    replies = {"words": set[str](), "sums": set[str](), "talks": set[str]()}
    for each in read_generations(RunFolder.open(run, write=False), "train"):
        replies[source_of(each.prompt)] |= {words for words in ("and then?", "go on") if words in each.completion}
    assert replies == {"words": set(), "sums": {"and then?"}, "talks": {"go on"}}


def test_a_run_mixes_its_sources_and_goes_on_with_the_same_draws_when_it_is_resumed(
    forked_main: Main, mixed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*IN_STEP, "--engine.max_updates=3", "--checkpoint.every=1"]
    said = " ".join(run_to_its_end(forked_main, "train", mixed, "--out", run, *words).split())
    assert "source words: 0.333 of the groups, 5 prompts from" in said
    run_to_its_end(forked_main, "resume", run, "--engine.max_updates=6")

    stream = stream_of(load_config(mixed, GrpoConfig))
    expected = [stream.draw(number).prompt.text for number in range(6 * GROUPS_PER_UPDATE)]
    assert trained_prompts(run) == Counter(expected)
    in_all = Counter(source_of(text) for text in expected)
    assert all(abs(in_all[name] - 4 * weight) <= 1 for name, weight in WEIGHTS.items())
    for step in range(1, 7):
        groups = expected[(step - 1) * GROUPS_PER_UPDATE : step * GROUPS_PER_UPDATE]
        shares = {name: values_of(run, f"mix/{name}/share")[step] for name in WEIGHTS}
        assert shares == {name: Counter(map(source_of, groups))[name] / GROUPS_PER_UPDATE for name in WEIGHTS}

    # Each source is answered and judged as it says: its own, or else what the sections say.
    assert set(values_of(run, "mix/words/reward").values()) == {2.0}
    assert set(values_of(run, "mix/words/success_rate").values()) == {1.0}
    assert set(values_of(run, "mix/sums/reward").values()) == {0.5}
    assert set(values_of(run, "mix/sums/success_rate").values()) == {0.0}  # curriculum.success_reward is 0.99
    assert set(values_of(run, "mix/talks/success_rate").values()) == {1.0}
    check_replies(run)
    logs = {path.name for path in (run / "logs").glob("environment-*.log")}
    assert logs == {"environment-0.log", "environment-1.log"}
    assert "Mix: groups" in (run / "report.html").read_text()
    assert "curriculum" not in json.loads((latest_checkpoint(run).path / "loop" / "state.json").read_text())


def test_a_curriculum_draws_by_success_and_a_resumed_run_knows_what_the_one_before_has_learned(
    forked_main: Main, config: Path, tmp_path: Path, own_module: Callable[[str, str], None]
) -> None:
    """With section data alone; prompts with an odd answer are never answered well."""
    own_module("mixed_own", OWN)
    run, num_updates = tmp_path / "run", 12
    words = ["--reward.name=mixed_own:even", "--curriculum.low=0.1", "--eval.every_updates=0", "--data.eval_size=0"]
    limits = ["--engine.max_updates=5", "--checkpoint.every=1", "--rollout.max_tokens=2"]
    said = run_to_its_end(forked_main, "train", config, "--out", run, *words, *IN_STEP, *limits)
    assert "a success rate below 0.1 or above 1 are drawn" in " ".join(said.split())
    run_to_its_end(forked_main, "resume", run, f"--engine.max_updates={num_updates}")

    stream, num_hard = stream_of(load_config(config, GrpoConfig, [*words, *limits])), 0
    expected = Counter[str]()
    for update in range(num_updates):
        draws = [stream.draw(update * GROUPS_PER_UPDATE + at) for at in range(GROUPS_PER_UPDATE)]
        for draw in draws:
            is_even = int(draw.prompt.answer or "") % 2 == 0
            expected[draw.prompt.text] += 1
            num_hard += not is_even
            stream.record(draw, [float(is_even)])
    assert trained_prompts(run) == expected
    state = json.loads((latest_checkpoint(run).path / "loop" / "state.json").read_text())
    assert state["curriculum"] == stream.state()
    assert {rate for _, rate in state["curriculum"][""]} == {0.0, 1.0}
    assert 12 <= num_hard < 0.4 * expected.total(), "each of the 12 once, and then seldom"
    assert values_of(run, "curriculum/too_hard")[num_updates] > 0.4
    assert set(values_of(run, "curriculum/too_easy").values()) == {0.0}
    assert not values_of(run, "mix//share")


@pytest.mark.nightly
def test_a_mixed_run_that_is_killed_goes_on_with_what_it_knew_at_its_checkpoint(
    forked_main: Main, mixed: Path, tmp_path: Path
) -> None:
    run, num_updates = tmp_path / "run", 8
    words = ["--curriculum.high=0.9", "--async.staleness_threshold=1", "--rollout.num_engines=2"]
    often = ["--checkpoint.every=1", "--engine.max_updates=400"]
    with RunningCommand(forked_main, "train", mixed, "--out", run, *words, *often) as process:
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= 3, "updates")
        started = process.descendants()
        process.kill()
        process.wait()
    wait_until_gone(started, 20)
    checkpoint = latest_checkpoint(run)
    known = json.loads((checkpoint.path / "loop" / "state.json").read_text())["curriculum"]
    assert all(rate == 1.0 for _, rate in known["words"] + known["talks"])
    assert all(rate == 0.0 for _, rate in known["sums"])
    last = max(num_updates, checkpoint.step + 2)
    run_to_its_end(forked_main, "resume", run, f"--engine.max_updates={last}")
    later = json.loads((latest_checkpoint(run).path / "loop" / "state.json").read_text())["curriculum"]
    for name, rates in known.items():
        assert {item for item, _ in rates} <= {item for item, _ in later[name]}, "what was known is known"
    shares = [values_of(run, f"mix/{name}/share") for name in WEIGHTS]
    assert set(shares[0]) == set(shares[1]) == set(shares[2]) <= set(range(1, last + 1))
    assert all(sum(each[step] for each in shares) == pytest.approx(1) for step in shares[0])
    assert values_of(run, "mix/words/too_easy")[last] == 1.0
    assert values_of(run, "mix/sums/too_easy")[last] == 0.0


def made_source(config: GrpoConfig, name: str, number: int) -> Source:
    """A source of prompts made up, as its table would settle it."""
    [plain] = resolve(config).sources
    ids = np.array([1], np.int32)
    prompts = tuple(Prompt(index=at, ids=ids, text=f"{name} {at}") for at in range(number))
    return replace(plain, name=name, prompts=prompts)


def test_what_is_known_comes_back_for_the_sources_it_is_of(config: Path) -> None:
    settings = load_config(config, GrpoConfig, ["--curriculum.high=0.5", "--engine.max_updates=9"])
    sources = [made_source(settings, "a", 4), made_source(settings, "b", 6)]
    stream = PromptStream(settings, sources, {})
    for number in range(40):
        stream.record(stream.draw(number), [float(number % 3 == 0)])
    known = json.loads(json.dumps(stream.state()))
    again = PromptStream(settings, sources, known)
    numbers = range(1000, 1100)
    assert [again.draw(number).item for number in numbers] == [stream.draw(number).item for number in numbers]
    items = {draw.item: draw.prompt.text for draw in map(stream.draw, numbers)}
    assert all(text == f"{'a' if item < 4 else 'b'} {item if item < 4 else item - 4}" for item, text in items.items())
    with pytest.raises(RunFolderError, match="success rates of 'b', no source of this run"):
        PromptStream(settings, sources[:1], known)


def test_what_a_curriculum_draws_depends_on_the_seed_of_the_data(config: Path) -> None:
    """Also where the order of the prompts does not."""

    def drawn(seed: int) -> list[int]:
        words = ["--curriculum.high=0.5", "--engine.max_updates=9", "--data.shuffle=false", f"--data.seed={seed}"]
        settings = load_config(config, GrpoConfig, words)
        sources = [made_source(settings, "a", 8)]
        stream = PromptStream(settings, sources, {"a": [[item, float(item % 2)] for item in range(8)]})
        return [stream.draw(number).item for number in range(100)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_without_a_mix_every_group_has_the_prompt_it_always_had(config: Path) -> None:
    stream = stream_of(load_config(config, GrpoConfig))
    order = EpochOrder(20, 0)
    assert [stream.draw(number).item for number in range(60)] == [order(number)[1] for number in range(60)]
    stream.record(stream.draw(0), [1.0])
    assert (stream.take_metrics(), stream.state()) == ({}, {})


def test_a_source_says_what_differs_and_takes_the_rest_from_the_sections(mixed: Path) -> None:
    own = ["--data.mix.talks.environment.name=reasoning_gym", "--data.mix.talks.path=reasoning-gym:chain_sum"]
    words = [*own, "--reward.name=number_match", "--data.mix.talks.task_options={min_terms = 2}", "--data.seed=3"]
    config = load_config(mixed, GrpoConfig, words)
    run = resolve(config)
    found = {each.name: each for each in run.sources}
    assert list(found) == ["sums", "talks", "words"], "in one order, whatever that of the file"
    assert {name: each.judge.settings.name for name, each in found.items()} == {
        "sums": "number_match",
        "talks": "",  # its environment judges by itself
        "words": "mixed_own:twice",
    }
    assert [each.label for each in run.judges] == ["", "mix/words"]
    assert [found[name].judge for name in ("sums", "words")] == list(run.judges)
    assert all(each.environment.table == f"data.mix.{name}" for name, each in found.items())
    assert [each.table for each in run.environments] == ["", "data.mix.sums", "data.mix.talks"], "empty tables are none"
    assert {name: each.success_reward for name, each in found.items()} == {"sums": 0.99, "talks": 0.4, "words": 2.0}
    assert all(each.data.seed == 3 and each.data.max_prompt_tokens == 64 for each in found.values())
    assert found["talks"].data.task_options == {"min_terms": 2}
    assert found["words"].data.prompt_column == "question"
    assert {name: each.response_tokens for name, each in found.items()} == {
        "sums": 64,
        "talks": 1024,
        "words": 8,
    }
    assert config.max_response_tokens == 1024


def test_an_evaluation_of_a_mixed_run_asks_its_sets_alone(mixed: Path, tmp_path: Path) -> None:
    words = ["--reward.name=number_match", "--curriculum.low=0.5", f"--eval.sets.talks.path={tmp_path}/talks.jsonl"]
    evaluation = check_evaluation(load_config(mixed, GrpoConfig, words), [])
    assert [(each.name, len(each.prompts)) for each in evaluation.run.sets] == [("talks", 3)]
    assert [each.table for each in evaluation.run.environments] == [""]
    assert list(evaluation.run.environments) == list(evaluation.run.templates)


OF_A_SET = ["--eval.sets.talks.environment.name=mixed_own:OneReply", "--eval.sets.talks.environment.max_tokens=48"]


def test_a_validation_set_is_answered_by_an_environment_of_its_own(
    forked_main: Main, mixed: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers"
    sets = [f"--eval.sets.{name}.path={tmp_path}/talks.jsonl" for name in ("talks", "plain")]
    own = [*OF_A_SET, '--eval.sets.talks.environment.options={words = "so what?"}', "--eval.sets.talks.n=8"]
    own += ["--eval.sets.talks.temperature=1", "--eval.sets.plain.environment.name="]
    judge = ["--eval.sets.plain.reward.name=mixed_own:twice", f"--config={mixed}"]
    run_to_its_end(forked_main, "eval", model, "--out", out, *sets, *own, *judge)
    talks, plain = (read_answers(out / f"{name}.jsonl") for name in ("talks", "plain"))
    samples = [each for item in talks for each in item.samples]
    assert {each.reward for each in samples} == {0.5}
    assert max(each.num_turns for each in samples) == 2, "most say a letter, which ends their first turn"
    assert all(("so what?" in each.text) == (each.num_turns == 2) for each in samples)
    assert {(each.reward, each.num_turns) for item in plain for each in item.samples} == {(2.0, 0)}

    checked = check_run(load_config(mixed, GrpoConfig, [*sets, *own, *judge[:1], "--eval.every_updates=2"]))
    assert [each.environment.table for each in checked.run.sets] == ["eval.sets.talks", "eval.sets.plain"]
    assert [each.table for each in checked.run.environments] == ["", "data.mix.sums", "eval.sets.talks"]
    assert list(checked.run.environments) == list(checked.run.templates)
    wrong = "--eval.sets.talks.environment.name=calculater"
    with pytest.raises(ConfigError, match=r"eval\.sets\.talks: environment: no environment 'calculater'"):
        check_run(load_config(mixed, GrpoConfig, [*sets, *own, *judge[:1], "--eval.every_updates=2", wrong]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.mix.sums.wieght=1"], "did you mean weight"),
        (["--data.mix.sums.weight=-1"], "data.mix.sums.weight"),
        ([f"--data.mix.{name}.weight=0" for name in WEIGHTS], "the weights of all sources are 0"),
        (["--data.path=arithmetic:1"], "data.path = 'arithmetic:1' and data.mix both name training prompts"),
        (["--data.eval_size=2"], "data.eval_size has no effect with data.mix: take a table [eval.sets.NAME]"),
        (["--data.num_items=2"], "data.num_items has no effect with data.mix: take max_prompts of the source"),
        (["--data.epochs=3"], "data.epochs = 3 has no effect: data.mix draws prompts without end"),
        (["--engine.max_updates=0"], "data.mix draws prompts without end; set engine.max_updates above 0"),
        (["--data.mix.sums.path=/nowhere"], "data.mix.sums: data path /nowhere does not exist"),
        (["--data.mix.talks.prompt_column=what"], "data.mix.talks: "),
        (["--data.mix.words.reward.name=exact_mach"], "data.mix.words: "),
        (["--data.mix.sums.environment.name=calculater"], "data.mix.sums: environment: no environment 'calculater'"),
        (
            ["--data.mix.talks.environment.name=calculator"],
            "data.mix.talks: reward: environment.name = 'calculator' leaves the last turn to this section",
        ),
        (
            ["--data.mix.talks.environment.name=reasoning_gym", "--data.mix.talks.environment.max_tokens=48"],
            "data.mix.talks: environment.name = 'reasoning_gym' needs path = \"reasoning-gym:NAME\"",
        ),
        (["--data.mix.sums.environment.max_tokens=150"], "data.mix.sums: data.max_prompt_tokens + environment"),
        (["--algorithm.advantage=gdpo"], "data.mix.sums: algorithm.advantage = gdpo"),
        (["--algorithm.overlong_buffer_tokens=16"], "data.mix.words: algorithm.overlong_buffer_tokens must be at most"),
        (["--algorithm.advantage=gppo"], "error: --algorithm.advantage must be one of"),
        (["--curriculum.low=0.9", "--curriculum.high=0.2"], "low = 0.9 is above high = 0.2"),
        (["--curriculum.outside_weight=0.5"], "outside_weight has no effect"),
        (["--eval.every_updates=2"], "eval.every_updates needs held-out prompts"),
        (["--agent.command", '["true"]'], "environment.name and section agent both answer the model"),
    ],
)
def test_mistakes_in_a_mix_are_one_line(command: CommandLine, mixed: Path, words: list[str], said: str) -> None:
    ended = command("plan", mixed, *words)
    assert (ended.code, "Traceback" in ended.err) == (2, False), ended.err
    assert said in " ".join(ended.err.split())


def test_the_page_shows_configurations_that_are_taken() -> None:
    page = (Path(__file__).parents[3] / "docs" / "mixing.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    model = '[model]\npath = "model"\n'
    assert parse_config(model + blocks.pop(1), GrpoConfig).environment.name == "mcp"
    config = parse_config(model + "".join(blocks), GrpoConfig)
    assert [each.name for each in resolve(config).sources] == ["sums", "tools"]
    assert config.curriculum.is_set
    check_sources(resolve(config))


def test_the_plan_has_a_row_for_each_source(command: CommandLine, mixed: Path) -> None:
    words = ["--curriculum.low=0.25", "--algorithm.advantage=rloo"]
    ended = command("plan", mixed, *words)
    assert ended.code == 0, ended.err
    shown = " ".join(ended.out.split())
    assert "15 training prompts from a mix of 3 sources" in shown
    assert "source sums: 0.5 of the groups, 7 prompts from" in shown
    assert "environment mixed_own:OneReply" in shown
    assert "reward mixed_own:twice" in shown
    assert "environment data.mix.sums: mixed_own:OneReply: at most 8 turns and 64 tokens" in shown
    assert "prompts with a success rate below 0.25" in shown
    assert "algorithm.advantage = rloo keeps the scale of each" in shown


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--data.mix.sums.weight=1", r"data\.mix\.sums\.weight was 3\.0 when the run began and would be 1\.0"),
        ("--data.mix.more.path=arithmetic:1", r"data\.mix\.more\.path was None when the run began"),
    ],
)
def test_a_run_goes_on_with_the_mix_it_was_begun_with(mixed: Path, word: str, said: str) -> None:
    begun = load_config(mixed, GrpoConfig)
    others = ["--curriculum.low=0.5", "--data.mix.sums.reward.name=mixed_own:twice"]
    check_same_data(begun, load_config(mixed, GrpoConfig, others))
    with pytest.raises(ConfigError, match=said):
        check_same_data(begun, load_config(mixed, GrpoConfig, [word]))


def test_a_section_environment_that_judges_by_itself_goes_beside_a_mix(mixed: Path) -> None:
    """Though section reward is there for sources with environments of their own."""
    words = ["--environment.name=openenv", "--environment.options.url=http://127.0.0.1:1"]
    words.append("--data.mix.words.environment.name=")
    check_sources(resolve(load_config(mixed, GrpoConfig, words)))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_mixed_run_on_ray_has_an_environment_for_each_source(mixed: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    run = tmp_path / "run"
    words = [*IN_STEP, "--cluster.launcher=ray", "--cluster.connect_timeout_s=300", "--engine.max_updates=3"]
    with RunningCommand("grpo_async_app", "train", mixed, "--out", run, *words) as process:
        assert process.wait(500) == 0, process.output
    stream = stream_of(load_config(mixed, GrpoConfig))
    expected = Counter(stream.draw(number).prompt.text for number in range(3 * GROUPS_PER_UPDATE))
    assert trained_prompts(run) == expected
    check_replies(run)
