"""Runs that learn from preferences: what they learn, what they log, and what plain transformers says of the result."""

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sft_runs import RANKS, assert_same, latest_checkpoint, values_of

from offbeat_core import Floats, Metric, Metrics, TrainSequence, load_config
from offbeat_testing import CommandLine, RunningCommand
from sft_app import _cli
from sft_app._config import SftConfig
from sft_app._examples import Example, _scored
from sft_app._learners import PreferenceLearner
from sft_app._preflight import check_run
from sft_app._reference import REFERENCE_FILE, Reference, compute_reference, load_reference, save_reference

NUM_HELD_OUT = 4
CONSTANT = ["--engine.schedule=constant", "--engine.learning_rate=1e-3"]
PAIRED = ("dpo", "ipo", "orpo", "simpo", "reward")


def pair(number: int) -> dict[str, str]:
    return {
        "prompt": f"what is {number} and one?",
        "chosen": f"the answer is {number + 1}",
        "rejected": f"who knows, {number}",
    }


def rating(number: int) -> dict[str, object]:
    both, is_good = pair(number), number % 2 == 0
    return {
        "prompt": both["prompt"],
        "completion": both["chosen" if is_good else "rejected"],
        "label": is_good,
    }


@pytest.fixture
def preferences(config: Path) -> Path:
    """The small run of the other tests, on pairs; the held-out ones lie in a file of their own."""
    for name, row in (("pairs", pair), ("ratings", rating)):
        for part, numbers in (("", range(20)), ("-held", range(50, 50 + NUM_HELD_OUT))):
            lines = [json.dumps(row(number)) + "\n" for number in numbers]
            config.with_name(f"{name}{part}.jsonl").write_text("".join(lines))
    text = config.read_text().replace("chats.jsonl", "pairs.jsonl").replace("eval_size = 4", "eval_size = 0")
    text = text.replace("[engine]", f'eval_path = "{config.with_name("pairs-held.jsonl")}"\n[engine]')
    config.write_text(text + '[preference]\nloss = "dpo"\n')
    return config


@pytest.mark.parametrize("loss", ["dpo", "reward", "kto"])
def test_a_plan_shows_what_is_compared_as_the_model_gets_it(loss: str, command: CommandLine, preferences: Path) -> None:
    planned = command("plan", preferences, "--json", *words_of(loss, preferences.parent))
    assert planned.code == 0, planned.err
    rows = {row["what"]: row["text"] for row in json.loads(planned.out)["rows"]}
    begin = r"<|im_start|>user\nwhat is 0 and one?<|im_end|>\n<|im_start|>assistant\n"
    if loss == "kto":
        assert f"{begin}the answer is 1" in rows["a sequence"]
        return
    assert f"{begin}the answer is 1" in rows["a chosen sequence"]
    assert f"{begin}who knows, 0" in rows["its rejected one"]


def words_of(loss: str, folder: Path) -> list[str]:
    """What changes the small run into one of this loss."""
    words = [f"--preference.loss={loss}"]
    if loss == "kto":
        words += [f"--data.path={folder / 'ratings.jsonl'}", f"--data.eval_path={folder / 'ratings-held.jsonl'}"]
    return words


def encode(tokenizer, prompt: str, answer: str) -> tuple[list[int], int, int]:  # type: ignore[no-untyped-def]
    """(ids, first token of the answer, first token after it), by hand."""
    opening = tokenizer(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    said = tokenizer(f"{answer}<|im_end|>")["input_ids"]
    return opening + said + tokenizer("\n")["input_ids"], len(opening), len(opening) + len(said)


def answer_logprobs(folder: Path, rows: list[dict[str, str]], side: str) -> list[float]:
    """Summed log-probability of each answer by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        ids, first, stop = encode(tokenizer, row["prompt"], row[side])
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(first, stop)))
    return found


def answer_scores(folder: Path, rows: list[dict[str, str]], side: str) -> list[float]:
    """Score of each row by plain transformers, all in one padded batch."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    padding = model.config.pad_token_id
    assert padding not in (None, tokenizer.eos_token_id)
    ids = [torch.tensor(encode(tokenizer, row["prompt"], row[side])[0]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)
    with torch.no_grad():
        logits = model(input_ids=padded, attention_mask=padded != padding).logits
    scores: list[float] = logits[:, 0].tolist()
    return scores


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def held_out_rows() -> list[dict[str, str]]:
    return [pair(number) for number in range(50, 50 + NUM_HELD_OUT)]


def test_dpo_learns_and_its_loss_is_what_transformers_finds(
    command: CommandLine, preferences: Path, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    run = tmp_path / "run"
    ended = command("train", preferences, "--out", run)
    assert ended.code == 0, ended.err
    assert "dpo, beta 0.1, reference: the policy before training" in " ".join((run / "plan.txt").read_text().split())
    held_out = values_of(run, "eval/loss")
    assert held_out[0] == pytest.approx(math.log(2), abs=1e-6), "before training it is the reference itself"
    assert held_out[8] < 0.5
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert len(values_of(run, name)) == 8
        assert len(values_of(run, f"eval/{name}")) == len(held_out)
    assert values_of(run, "eval/rewards/accuracies")[8] == 1.0
    assert values_of(run, "eval/rewards/margins")[8] > 1.0

    # Both answers of a pair are trained on: three epochs of 20 pairs in batches of 8, the last of 4.
    speeds, samples = values_of(run, "perf/tokens_per_s"), values_of(run, "perf/samples_per_s")
    tokens = sum(speeds[n] / samples[n] * (4 if n == 8 else 8) for n in range(1, 9))
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [encode(tokenizer, pair(n)["prompt"], pair(n)[side]) for n in range(20) for side in ("chosen", "rejected")]
    assert tokens == pytest.approx(3 * sum(len(ids) for ids, _, _ in pairs))

    rows, last = held_out_rows(), latest_checkpoint(run).path
    now = {side: answer_logprobs(last, rows, side) for side in ("chosen", "rejected")}
    before = {side: answer_logprobs(model, rows, side) for side in ("chosen", "rejected")}
    ratios = {side: [a - b for a, b in zip(now[side], before[side], strict=True)] for side in now}
    margins = [0.1 * (c - r) for c, r in zip(ratios["chosen"], ratios["rejected"], strict=True)]
    assert held_out[8] == pytest.approx(sum(softplus(-margin) for margin in margins) / len(rows), abs=1e-4)
    assert values_of(run, "eval/logps/chosen")[8] == pytest.approx(sum(now["chosen"]) / len(rows), abs=1e-3)
    assert values_of(run, "eval/rewards/margins")[8] == pytest.approx(sum(margins) / len(rows), abs=1e-3)

    output = command("eval", run).out
    best = min(held_out, key=lambda step: (held_out[step], step))
    assert f"loss {held_out[best]:.4f}" in output
    assert "rewards/accuracies 1.0000" in output


def test_a_reward_model_is_a_classifier_of_transformers(
    command: CommandLine, preferences: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = command(
        "train", preferences, "--out", run, *words_of("reward", tmp_path), "--preference.center_rewards=0.01"
    )
    assert ended.code == 0, ended.err
    held_out, last = values_of(run, "eval/loss"), latest_checkpoint(run).path
    assert held_out[8] < held_out[0] - 0.2
    assert values_of(run, "eval/rewards/accuracies")[8] == 1.0
    weights = load_file(last / "model.safetensors")
    assert weights["score.weight"].shape == (1, json.loads((last / "config.json").read_text())["hidden_size"])
    assert not any(name.startswith("lm_head") for name in weights)
    chosen, rejected = (answer_scores(last, held_out_rows(), side) for side in ("chosen", "rejected"))
    losses = [softplus(r - c) + 0.01 * (c + r) ** 2 for c, r in zip(chosen, rejected, strict=True)]
    assert held_out[8] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert f"loss {min(held_out.values()):.4f}" in command("eval", run).out


@pytest.mark.parametrize(
    "loss", ["kto", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ipo", "orpo", "simpo"))]
)
def test_every_loss_prefers_what_was_chosen(command: CommandLine, preferences: Path, tmp_path: Path, loss: str) -> None:
    run = tmp_path / "run"
    ended = command("train", preferences, "--out", run, *words_of(loss, tmp_path), *CONSTANT)
    assert ended.code == 0, ended.err
    held_out, margins = values_of(run, "eval/loss"), values_of(run, "eval/rewards/margins")
    assert held_out[8] < held_out[0]
    assert margins[8] > margins[0]


def test_what_the_first_policy_says_is_on_the_disk_before_it_has_its_name(
    preferences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = check_run(load_config(preferences, SftConfig))
    folder, synced, fsync = tmp_path / "kept", [], os.fsync
    folder.mkdir()

    def watched(descriptor: int) -> None:
        assert not (folder / REFERENCE_FILE).exists()
        fsync(descriptor)
        synced.append(os.fstat(descriptor))

    def logprobs_of(examples: Sequence[Example]) -> tuple[tuple[Floats, ...], ...]:
        return tuple(tuple(-np.ones(each.loss_mask.sum(), np.float32) for each in one.all) for one in examples)

    monkeypatch.setattr(os, "fsync", watched)
    reference = Reference(train=logprobs_of(preflight.examples.train), held_out=logprobs_of(preflight.held_out))
    save_reference(folder, preflight, reference)
    [kept], [last] = folder.iterdir(), synced
    assert (last.st_ino, last.st_size) == (kept.stat().st_ino, kept.stat().st_size)


class Asked:
    """An engine that gives every token the log-probability -1, and notes what it is asked."""

    def __init__(self) -> None:
        self.sequences: list[TrainSequence] = []
        self.reference: set[bool] = set()

    def logprobs(self, sequences: Sequence[TrainSequence], *, reference: bool = False) -> list[Floats]:
        self.reference.add(reference)
        return [np.where(each.loss_mask, -1, 0).astype(np.float32) for each in sequences]

    def forward_backward(self, sequences: Sequence[TrainSequence], loss: object) -> Metrics:
        self.sequences = list(sequences)
        return {"loss/total": Metric(value=0.0)}


def extra(sequences: list[TrainSequence], name: str) -> list[list[float]]:
    return [each.extras[name][each.loss_mask].tolist() for each in sequences]


def test_the_likelihood_of_orpo_is_a_mean_over_the_tokens_of_the_chosen_answers(
    preferences: Path, tmp_path: Path
) -> None:
    preflight = check_run(load_config(preferences, SftConfig, words_of("orpo", tmp_path)))
    engine = Asked()
    PreferenceLearner(preflight, engine, None, 0, None).learn(preflight.batch(0))  # type: ignore[arg-type]
    shares = extra(engine.sequences, "likelihood")
    assert math.fsum(share for each in shares for share in each) == pytest.approx(1.0)
    assert len({share for each in shares[::2] for share in each}) == 1, "each token counts alike"
    assert not any(share for each in shares[1::2] for share in each)


def test_the_baseline_of_kto_is_measured_on_answers_of_others(preferences: Path, tmp_path: Path) -> None:
    """Only there the policy has moved, by 2 nats a token."""
    preflight = check_run(load_config(preferences, SftConfig, words_of("kto", tmp_path)))
    engine, examples = Asked(), preflight.examples.train
    before = [
        tuple(np.full(each.loss_mask.sum(), at, np.float32) for at, each in zip((-1, -3), one.all, strict=True))
        for one in examples
    ]
    reference, indices = Reference(train=tuple(before), held_out=()), preflight.batch(0)
    PreferenceLearner(preflight, engine, None, 0, reference).learn(indices)  # type: ignore[arg-type]
    moved = [2.0 * int(one.mismatched.loss_mask.sum()) for index in indices if (one := examples[index]).mismatched]
    for baseline in extra(engine.sequences, "baseline"):
        assert baseline == pytest.approx([sum(moved) / len(indices)] * len(baseline))
    assert extra(engine.sequences, "reference") == [[-1.0] * len(each) for each in extra(engine.sequences, "sign")]


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_first_policy_is_asked_where_the_run_has_begun(preferences: Path, has_begun: bool) -> None:
    preflight, engine = check_run(load_config(preferences, SftConfig)), Asked()
    compute_reference(preflight, engine, has_begun=has_begun, is_asked_to_end=lambda: False)  # type: ignore[arg-type]
    assert engine.reference == {has_begun}


def test_what_the_first_policy_says_of_other_data_is_not_taken(preferences: Path, tmp_path: Path) -> None:
    preflight = check_run(load_config(preferences, SftConfig))
    engine: Any = Asked()
    reference = compute_reference(preflight, engine, has_begun=False, is_asked_to_end=lambda: False)
    save_reference(tmp_path, preflight, reference)
    kept = load_reference(tmp_path, preflight)
    assert kept is not None
    for name in ("train", "held_out"):
        assert [[each.tolist() for each in one] for one in getattr(kept, name)] == [
            [each.tolist() for each in one] for one in getattr(reference, name)
        ]
    swapped = ["--data.chosen_column=rejected", "--data.rejected_column=chosen"]
    assert load_reference(tmp_path, check_run(load_config(preferences, SftConfig, swapped))) is None


def test_padding_at_the_end_of_an_answer_is_not_what_a_score_is_read_off() -> None:
    """As transformers' classifiers look for the last token of a padded sequence."""
    answer = TrainSequence(ids=np.array([2, 5, 6, 2, 2], np.int32), loss_mask=np.arange(5) > 1)
    for padding, read in ((2, [2, 5, 6]), (9, [2, 5, 6, 2, 2]), (None, [2, 5, 6, 2, 2])):
        scored = _scored(answer, padding)
        assert scored.ids.tolist() == [*read, 0]
        assert np.flatnonzero(scored.loss_mask).tolist() == [len(read)]


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_with_adapters_the_rest_stays_as_it_was_and_a_run_in_two_parts_ends_as_one(
    command: CommandLine, preferences: Path, tmp_path: Path, loss: str
) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = [*words_of(loss, tmp_path), *CONSTANT, "--engine.lora_rank=4", "--eval.every_updates=2"]
    assert command("train", preferences, "--out", undisturbed, *words).code == 0
    assert command("train", preferences, "--out", run, *words, "--engine.max_updates=4").code == 0
    (run / REFERENCE_FILE).unlink(missing_ok=True)  # the adapters are switched off instead
    ended = command("resume", run, "--engine.max_updates=0")
    assert ended.code == 0, ended.err
    assert_same(run, undisturbed)
    assert values_of(run, "eval/loss")[8] < values_of(run, "eval/loss")[0]


@pytest.mark.parametrize(
    ("loss", "keeps"),
    [
        ("dpo", True),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("dpo", False), ("kto", True), ("reward", True))),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    command: CommandLine, preferences: Path, tmp_path: Path, loss: str, keeps: bool
) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = [*words_of(loss, tmp_path), *CONSTANT, "--data.epochs=6", "--eval.every_updates=5"]
    with RunningCommand("sft_app", "train", preferences, "--out", run, *words) as process:
        process.wait_until(lambda: len(values_of(run, "train/loss")) >= 5, "five updates")
        process.kill()
        process.wait()
    if not keeps:
        (run / REFERENCE_FILE).unlink()  # a second copy of the first model is asked instead
    assert command("train", preferences, "--out", undisturbed, *words).code == 0
    ended = command("resume", run)
    assert ended.code == 0, ended.err
    assert_same(run, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [*PAIRED, "kto"])
def test_two_ranks_learn_as_one_process(command: CommandLine, preferences: Path, tmp_path: Path, loss: str) -> None:
    words = [
        "train",
        preferences,
        *words_of(loss, tmp_path),
        *CONSTANT,
        "--eval.every_updates=2",
        "--engine.max_updates=4",
    ]
    with RunningCommand(_cli.main, *words, "--out", tmp_path / "run", *RANKS) as process:
        assert process.wait() == 0, process.output
    ended = command(*words, "--out", tmp_path / "undisturbed")
    assert ended.code == 0, ended.err
    assert_same(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.nightly
def test_ranks_of_which_one_dies_go_on_with_the_same_reference(
    command: CommandLine, preferences: Path, tmp_path: Path
) -> None:
    from role_faults import signal_role

    run, words = tmp_path / "run", [*CONSTANT, "--data.epochs=15", "--checkpoint.every=3", "--eval.every_updates=5"]
    with RunningCommand(_cli.main, "train", preferences, "--out", run, *words, *RANKS) as process:
        process.wait_until((run / "checkpoints" / "step-000003").is_dir, "a checkpoint")
        signal_role(process, "trainer-1", signal.SIGKILL)
        assert process.wait() == 0, process.output
    assert command("train", preferences, "--out", tmp_path / "undisturbed", *words).code == 0
    assert_same(run, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preference.target_margin=0.5"], "preference.target_margin is of simpo"),
        (["--preference.loss=dpp"], "dpo"),
        (["--data.rejected_column=worse"], "no column 'worse', it has prompt, chosen, rejected"),
        (["--preference.loss=kto"], "no column 'completion'"),
        (["--preference.loss=sft"], "none of the columns messages, completion, text"),
        (["--data.max_sequence_tokens=20"], "every row is too long"),
    ],
)
def test_a_mistake_is_one_clear_error(command: CommandLine, preferences: Path, words: list[str], said: str) -> None:
    ended = command("plan", preferences, *words)
    assert ended.code == 2
    assert said in ended.err


def test_a_run_goes_on_with_the_loss_that_it_was_begun_with(
    command: CommandLine, preferences: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert command("train", preferences, "--out", run, "--engine.max_updates=2", "--eval.every_updates=0").code == 0
    ended = command("resume", run, "--preference.loss=ipo")
    assert ended.code == 2
    assert "preference.loss = dpo" in ended.err


def test_a_trainer_without_a_score_head_is_refused_by_name(
    command: CommandLine, preferences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat_engine_torch import TorchTrainEngine

    monkeypatch.delattr(TorchTrainEngine, "heads")
    ended = command("plan", preferences, "--preference.loss=reward")
    assert ended.code == 2
    assert "trains a score head, and engine.backend = 'torch' has none" in ended.err
