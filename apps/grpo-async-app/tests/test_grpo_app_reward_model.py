"""A reward model beside the run: its scores are those of transformers, its death loses nothing, and it is planned."""

import asyncio
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from role_faults import accounting_complaints, last_value, role_pids, signal_role, updates

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.reward_model import RewardModelAsk, RewardModelOptions, check_reward_model
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.replicas import Replicas
from grpo_async_app._fleet.teachers import RewardModels
from grpo_async_app._preflight.placement import place_run
from grpo_async_app._preflight.sources import check_rewards
from grpo_async_app._roles.reward_model import RewardModelRole, _Waiting
from offbeat_core import ConfigError, ModelError, load_config
from offbeat_data import DataConfig, RewardError, load_prompts, load_tokenizer
from offbeat_placement import ClusterView, grid_nodes
from offbeat_run import read_metrics
from offbeat_testing import CommandLine, RunningCommand

Main = Callable[[], object]
NUM_TRAIN = 20


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A sequence classification model with one label, and the policy's tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("scorer") / "model"
    shutil.copytree(model, folder)
    torch.manual_seed(3)
    made = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    made.config.pad_token_id = 0
    made.score.weight.data.normal_(std=0.5)
    made.save_pretrained(folder)
    return folder


def with_model(config: Path, scorer: Path, *words: str) -> GrpoConfig:
    table = f"{{path = {json.dumps(str(scorer))}, device = 'cpu', max_batch = 3}}"
    return load_config(config, GrpoConfig, ["--reward.name=reward_model", f"--reward.reward_model={table}", *words])


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_scores_are_those_of_transformers_whatever_is_read_together(kind: str, config: Path, scorer: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    settings = with_model(config, scorer, f"--reward.reward_model.input={kind}", "--reward.reward_model.max_tokens=64")
    completions = ["two", "the answer is three", "", "a number is a number, so it is a number", "no"]
    messages = [("user", "what is one and one?")]

    async def score() -> list[Any]:
        role = RewardModelRole(config=settings, num_threads=1)
        await role.start()
        asks = [
            RewardModelAsk(messages=messages, text="what is one and one?", completions=part)
            for part in (completions[:2], completions[2:], ["x" * 300])
        ]
        answers = await asyncio.gather(*map(role.score, asks))
        await role.close()
        return [each.judged() for part in answers for each in part]

    *scores, too_long = asyncio.run(score())
    assert isinstance(too_long, RewardError)
    assert "are more than reward.reward_model.max_tokens = 64" in str(too_long)
    reference = AutoModelForSequenceClassification.from_pretrained(scorer)
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    for completion, found in zip(completions, scores, strict=True):
        if kind == "text":
            text = messages[0][1] + completion
        else:
            chat = [{"role": role, "content": said} for role, said in (*messages, ("assistant", completion))]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=kind == "text").input_ids
        with torch.no_grad():
            assert found.value == pytest.approx(float(reference(input_ids=ids).logits[0, 0]), abs=1e-4)
    assert len({round(each.value, 3) for each in scores}) == len(scores)


def test_a_reward_model_that_reads_the_prompt_reads_the_words_of_users_as_words(
    config: Path, model: Path, scorer: Path, tmp_path: Path
) -> None:
    tokenizer, end = load_tokenizer(model), load_tokenizer(model).special_tokens["eos_token"]
    rows = [{"prompt": f"one{words}", "answer": "1"} for words in ("", end)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, attacked = load_prompts(DataConfig(path=str(path)), tokenizer).train
    settings = with_model(config, scorer, "--reward.reward_model.input=text")
    options, role = RewardModelOptions(path=str(scorer)), RewardModelRole(config=settings, num_threads=1)
    role._load()
    asks: list[RewardModelAsk] = []

    class Asked:
        async def score(self, ask: RewardModelAsk, *_: Any) -> list[Any]:
            asks.append(ask)
            return []

    models = RewardModels(options, cast("Replicas", Asked()))
    for prompt in (plain, attacked):
        asyncio.run(models.score(prompt, ["two"]))
    without, with_words = (role._encode(ask)[0] for ask in asks)
    assert np.count_nonzero(with_words == tokenizer.eos_id) == np.count_nonzero(without == tokenizer.eos_id)
    assert tokenizer.decode(with_words, skip_special_tokens=False) == attacked.text + "two"
    assert (plain.escaped, attacked.question) == ("", f"one{end}")


def test_bos_comes_once_before_a_text_whose_template_wrote_it(config: Path, scorer: Path, tmp_path: Path) -> None:
    import tokenizers

    folder = tmp_path / "scorer"
    shutil.copytree(scorer, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    [bos] = backend.encode("<|im_start|>", add_special_tokens=False).ids
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    role = RewardModelRole(config=with_model(config, folder, "--reward.reward_model.input=text"), num_threads=1)
    role._load()
    for text in ("one", "<|im_start|>one"):
        [ids] = role._encode(RewardModelAsk(messages=[], text=text, completions=["two"]))
        assert [int(token) for token in ids].count(bos) == 1


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_control_tokens_that_a_policy_has_written_are_text_to_a_reward_model(
    kind: str, config: Path, scorer: Path
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    settings = with_model(config, scorer, f"--reward.reward_model.input={kind}", "--reward.reward_model.max_tokens=64")
    tokenizer = load_tokenizer(scorer)
    end = tokenizer.special_tokens["eos_token"]
    ask = RewardModelAsk(messages=[("user", f"one{end}")], text="one", completions=[f"two{end}"])

    async def score() -> float:
        role = RewardModelRole(config=settings, num_threads=1)
        await role.start()
        [answer] = await role.score(ask)
        await role.close()
        return answer.judged().value

    chat = [{"role": "user", "content": tokenizer.escape(f"one{end}")}]
    chat.append({"role": "assistant", "content": tokenizer.escape(f"two{end}")})
    text = "one" + tokenizer.escape(f"two{end}")
    if kind == "chat":
        text = tokenizer.require_template().render(chat, add_generation_prompt=False, options={}).text
    [ids] = tokenizer.encode([text], add_special_tokens=kind == "text")
    assert np.count_nonzero(ids == tokenizer.eos_id) == (2 if kind == "chat" else 0), "of the template alone"
    reference = AutoModelForSequenceClassification.from_pretrained(scorer)
    with torch.no_grad():
        wanted = float(reference(input_ids=torch.from_numpy(ids).long()[None]).logits[0, 0])
    assert asyncio.run(score()) == pytest.approx(wanted, abs=1e-4)


def test_the_text_that_has_waited_longest_is_read_next_whatever_its_length(config: Path) -> None:
    role: Any = RewardModelRole(config=with_model(config, Path("nowhere")), num_threads=1)
    role._pad_id = 0
    role._waiting = [_Waiting(np.zeros(length, np.int32), cast("Any", None)) for length in (20, 1, 1, 1, 1, 2)]
    batches = [[len(each.ids) for each in role._take_batch()] for _ in range(3)]
    assert batches == [[20, 2, 1], [1, 1, 1], []]


def test_a_reward_model_without_padding_token_scores_each_alone(config: Path, scorer: Path, tmp_path: Path) -> None:
    """transformers refuses a batch of several texts from such a model, also where all have one length."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path / "unpadded"
    shutil.copytree(scorer, folder)
    held = json.loads((folder / "config.json").read_text())
    held["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(held))
    settings = with_model(config, folder, "--reward.reward_model.input=text")
    completions = ["two", "ten", "a longer answer", "six", "one"]

    async def score() -> list[Any]:
        role = RewardModelRole(config=settings, num_threads=1)
        await role.start()
        asks = [RewardModelAsk(messages=[], text="one and one?", completions=part) for part in (completions, ["two"])]
        answers = await asyncio.gather(*map(role.score, asks))
        lengths = [len(ids) for ids in role._encode(asks[0])]
        assert len(set(lengths)) < len(lengths), "texts of one length are what it is about"
        await role.close()
        return [each.judged() for part in answers for each in part]

    scores = asyncio.run(score())
    reference = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    for completion, found in zip([*completions, "two"], scores, strict=True):
        [ids] = tokenizer.encode(["one and one?" + completion], add_special_tokens=True)
        with torch.no_grad():
            alone = float(reference(input_ids=torch.tensor([ids.tolist()])).logits[0, 0])
        assert found.value == pytest.approx(alone, abs=1e-5)


TRL_FILE = """
def brevity(completions, completion_ids, answer, **columns):
    assert len(answer) == len(completions)
    return [-len(ids) / 100 for ids in completion_ids]
"""


def test_a_run_with_a_reward_model_and_a_file_of_trl_survives_the_death_of_the_model(
    forked_main: Main, config: Path, scorer: Path, tmp_path: Path
) -> None:
    run, rewards = tmp_path / "run", tmp_path / "trl_rewards.py"
    rewards.write_text(TRL_FILE)
    weights = {"reward_model": 0.5, f"{rewards}:brevity": 1.0}
    words = [
        f"--reward.weights={{{', '.join(f'{json.dumps(name)} = {weight}' for name, weight in weights.items())}}}",
        "--reward.name=",
        f"--reward.reward_model={{path = {json.dumps(str(scorer))}, squash = 'sigmoid'}}",
        "--data.epochs=5",
    ]
    with RunningCommand(forked_main, "train", config, "--out", run, *words) as process:
        process.wait_until(lambda: len(updates(run)) >= 3, "3 updates")
        gone = signal_role(process, "reward_model-0", signal.SIGKILL)
        process.wait_until(lambda: role_pids(process).get("reward_model-0", gone) != gone, "a new reward model")
        assert process.wait() == 0, process.output
        output = " ".join(process.output.split())
        assert "called as TRL's reward_func" in output
        assert "tried once" in output
    assert accounting_complaints(run, NUM_TRAIN, 5, per_update=4) == []
    assert last_value(run, "reward_model/restarts") == 1.0
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    for values in lines:
        parts = 0.5 * values["reward/reward_model"] + values[f"reward/{rewards}:brevity"]
        assert values["train/reward"] == pytest.approx(parts, abs=1e-5)
        assert 0 < values["reward/reward_model"] < 1
        assert (
            0 <= values["scoring/latency_p50_s"] <= values["scoring/latency_p95_s"] <= values["scoring/latency_max_s"]
        )
        assert 0 <= values["scoring/busy_share"] <= 1
    assert "Scoring time" in (run / "report.html").read_text()


def test_a_reward_model_has_a_place_and_must_be_one(config: Path, scorer: Path, model: Path) -> None:
    settings = with_model(config, scorer, "--reward.reward_model.num_replicas=2")
    nodes = tuple(replace(node, num_cpus=16) for node in grid_nodes(1, 0))
    placed = place_run(settings, ClusterView(nodes=nodes, reserves=True))
    assert [rank.role for rank in placed.plan.ranks].count("reward_model") == 2
    assert check_rewards(resolve(settings)) == (f"reward_model: 2 x {scorer}, in processes of its own",)
    with pytest.raises(ModelError, match="one label, got Qwen3ForCausalLM"):
        check_reward_model(RewardModelOptions(path=str(model)))
    with pytest.raises(ConfigError, match="did you mean max_batch"):
        check_rewards(resolve(with_model(config, scorer, "--reward.reward_model.max_batches=2")))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 64),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4}, 32),
        (
            {
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            64,
        ),
    ],
    ids=["dynamic", "longrope", "by-layer"],
)
def test_texts_beyond_a_length_at_which_scores_depend_on_each_other_are_refused(
    scorer: Path, tmp_path: Path, rope: dict[str, Any], limit: int
) -> None:
    folder = shutil.copytree(scorer, tmp_path / "scorer")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"rope_parameters": rope, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(settings))
    check_reward_model(RewardModelOptions(path=str(folder), max_tokens=limit))
    with pytest.raises(ConfigError, match=f"set it to at most {limit}"):
        check_reward_model(RewardModelOptions(path=str(folder), max_tokens=limit + 1))


def test_a_plan_names_it(command: CommandLine, config: Path, scorer: Path) -> None:
    table = f"{{path = {json.dumps(str(scorer))}}}"
    ended = command("plan", config, "--reward.name=reward_model", f"--reward.reward_model={table}")
    assert ended.code == 0, ended.err
    assert f"reward_model: 1 x {scorer}".replace(" ", "") in "".join(ended.out.split())
