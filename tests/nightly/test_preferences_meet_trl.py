"""Losses of sft-app and of TRL's trainers on the same batch and the same weights.

TRL is not in the lock, and has an environment of its own: `nox -s preferences`. Models are made here, nothing is
fetched. What sft-app trains is one update old, so that policy and reference differ; the differences seen are printed.
"""

import importlib.util
import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

TOLERANCE = 1e-5
NUM_ROWS = 6
SETTINGS = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.4},
    "kto": {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
    "orpo": {"beta": 0.2},
    "simpo": {"beta": 2.5, "target_margin": 0.7, "label_smoothing": 0.1},
    "reward": {"center_rewards": 0.01},
}


def write_rows(path, *, rated):
    rows = []
    for n in range(NUM_ROWS):
        answers = {"chosen": f"the answer is {n + 1}", "rejected": f"no idea, perhaps {n * 37 % 11} or more"}
        if rated:
            good = n % 3 != 0
            rows.append({"completion": answers["chosen" if good else "rejected"], "label": good})
        else:
            rows.append(answers)
        rows[-1]["prompt"] = f"what is {n} and {n * n}, if you please?"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Ours:
    """sft-app after one update on all rows, and what its second one sees: `loss`, `grad_norm`, and its two models."""

    def __init__(self, folder, loss):
        from offbeat_core import load_config
        from offbeat_run import RunFolder
        from offbeat_testing import tiny_model
        from sft_app._config import SftConfig
        from sft_app._learners import create_learner
        from sft_app._preflight import check_run
        from sft_app._train import create_engine

        self.first, self.policy = tiny_model(folder / "first"), folder / "policy"
        write_rows(folder / "rows.jsonl", rated=loss == "kto")
        config = folder / "run.toml"
        section = "".join(f"{name} = {value}\n" for name, value in SETTINGS[loss].items())
        config.write_text(
            f'[model]\npath = "{self.first}"\n[data]\npath = "{folder / "rows.jsonl"}"\nshuffle = false\nepochs = 2\n'
            f'[engine]\ndevice = "cpu"\nlearning_rate = 1e-4\nbatch_size = {NUM_ROWS}\nmax_grad_norm = 0.0\n'
            f'max_tokens_per_microbatch = 256\n[preference]\nloss = "{loss}"\n{section}'
        )
        preflight = check_run(load_config(config, SftConfig))
        with (
            RunFolder.create(folder / "run", required_bytes=0) as run,
            closing(create_engine(preflight, run)) as engine,
        ):
            learner = create_learner(preflight, engine, run)
            learner.prepare(lambda: False)
            learner.learn(preflight.batch(0))
            engine.step()
            engine.save_weights(self.policy)
            loss_metric, metrics = learner.learn(preflight.batch(1))
            assert metrics["num_microbatches"].value > 1, "one micro-batch proves less"
            self.loss, self.metrics = loss_metric.value, {name: metric.value for name, metric in metrics.items()}
            self.grad_norm = engine.step()["grad_norm"].value
        self.read_ids(preflight)

    def read_ids(self, preflight):
        """Return prompt and answers of each row as token ids, as they were read."""
        from offbeat_data import load_pairs, load_ratings, load_tokenizer

        config, tokenizer = preflight.config, load_tokenizer(self.first)
        if config.preference.loss == "kto":
            read = load_ratings(config.data, tokenizer).train
            self.rows = [[each.answer] for each in read]
            self.labels = [each.is_good for each in read]
        else:
            self.rows = [[each.chosen, each.rejected] for each in load_pairs(config.data, tokenizer).train]

    def split(self, sequence):
        """Return (prompt, answer up to its last learned token)."""
        places = np.flatnonzero(sequence.loss_mask)
        return sequence.ids[: places[0]].tolist(), sequence.ids[places[0] : places[-1] + 1].tolist()


def trainer_of(kind, folder, ours, **options):
    """Return one of TRL's trainers, with our policy and first model."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    if kind in ("ORPO", "CPO"):
        trl = importlib.import_module(f"trl.experimental.{kind.lower()}")
    family = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(ours.first)
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=NUM_ROWS,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=1024,
        **options,
    )
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    reference = {"ref_model": AutoModelForCausalLM.from_pretrained(ours.first)} if kind in ("DPO", "KTO") else {}
    return getattr(trl, f"{kind}Trainer")(
        model=family.from_pretrained(ours.policy),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **reference,
    )


def padded(ids, value):
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in ids], batch_first=True, padding_value=value)


def concatenated(ours, padding):
    """Return the batch that the trainers of ORPO and CPO take."""
    batch = {}
    for at, side in enumerate(("chosen", "rejected")):
        parts = [ours.split(row[at]) for row in ours.rows]
        batch[f"{side}_input_ids"] = padded([prompt + answer for prompt, answer in parts], padding)
        batch[f"{side}_attention_mask"] = padded([[1] * (len(p) + len(a)) for p, a in parts], 0)
        batch[f"{side}_labels"] = padded([[-100] * len(prompt) + answer for prompt, answer in parts], -100)
    return batch


def loss_of_trl(loss, folder, ours):
    """Return the loss as a tensor, and the trainer."""
    options = {"beta": SETTINGS[loss].get("beta")} if loss != "reward" else {}
    if loss in ("dpo", "ipo"):
        trainer = trainer_of("DPO", folder, ours, loss_type=["sigmoid" if loss == "dpo" else "ipo"], **options)
        examples = []
        for row in ours.rows:
            (prompt, chosen), (_, rejected) = map(ours.split, row)
            examples.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        return trainer.compute_loss(trainer.model, trainer.data_collator(examples)), trainer
    if loss == "kto":
        weights = {name: SETTINGS["kto"][name] for name in ("desirable_weight", "undesirable_weight")}
        trainer = trainer_of("KTO", folder, ours, **options, **weights)
        parts = [ours.split(row[0]) for row in ours.rows]
        shifted = [parts[at - 1][1] for at in range(len(parts))]  # as TRL does within a batch
        examples = [
            {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label}
            for (prompt, answer), other, label in zip(parts, shifted, ours.labels, strict=True)
        ]
        return trainer.compute_loss(trainer.model, trainer.data_collator(examples)), trainer
    if loss == "reward":
        trainer = trainer_of("Reward", folder, ours, center_rewards_coefficient=SETTINGS["reward"]["center_rewards"])
        examples = [
            {"chosen_ids": chosen.ids.tolist(), "rejected_ids": rejected.ids.tolist()} for chosen, rejected in ours.rows
        ]
        return trainer.compute_loss(trainer.model, trainer.data_collator(examples)), trainer
    if loss == "simpo":
        options |= {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": SETTINGS["simpo"]["target_margin"]}
        options["label_smoothing"] = SETTINGS["simpo"]["label_smoothing"]
    trainer = trainer_of("ORPO" if loss == "orpo" else "CPO", folder, ours, **options)
    batch = concatenated(ours, trainer.processing_class.pad_token_id)
    return trainer.get_batch_loss_metrics(trainer.model, batch, "train")[0], trainer


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.mark.parametrize("loss", list(SETTINGS))
def test_a_loss_is_that_of_trl_on_the_same_batch(loss: str, tmp_path: Path) -> None:
    assert importlib.util.find_spec("trl"), "trl must be installed here: run `nox -s preferences`"
    import torch

    ours = Ours(tmp_path, loss)
    theirs, trainer = loss_of_trl(loss, tmp_path, ours)
    theirs.backward()
    theirs = float(theirs.detach())
    grads = [each.grad for each in trainer.model.parameters() if each.grad is not None]
    grad_norm = float(torch.stack([grad.double().norm() for grad in grads]).norm())
    apart, apart_grad = abs(ours.loss - theirs), abs(ours.grad_norm - grad_norm) / grad_norm
    print(f"{loss}: {ours.loss:.7f} here, {theirs:.7f} there, {apart:.1e} apart; gradient norms {apart_grad:.1e}")
    assert apart <= TOLERANCE
    assert apart_grad <= 1e-4
    assert min(ours.loss, ours.grad_norm) > 0.01, "nothing to compare"
