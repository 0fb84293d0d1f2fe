"""Every option of verl, TRL, OpenRLHF and prime-rl has its line in a table, and none whose key is here is lost."""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports import openrlhf, prime_rl, trl, verl
from offbeat_core import ConfigError
from offbeat_recipes import TRAINING_ARGUMENTS, OptionTable, OptionVerdict, RecipeBuilder, read_option_table

LISTS = Path(__file__).parent / "import_options"
TABLES = "grpo_async_app._imports"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@dataclasses.dataclass(frozen=True)
class Peer:
    """A framework: how its options are imported, and options with which one or another of them has an effect."""

    translate: Callable[[Mapping[str, Any]], RecipeBuilder]
    table: OptionTable
    settings: tuple[Mapping[str, Any], ...]


CORRECTION = "algorithm.rollout_correction."
TEACHER = "distillation.teacher_models.teacher_model."
PEERS = {
    "verl": Peer(
        verl.import_verl,
        read_option_table(TABLES, "verl"),
        (
            {"algorithm.adv_estimator": "grpo", "data.val_files": "v", "trainer.test_freq": 5},
            {f"{ACTOR}use_kl_loss": True, f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_rs": "sequence"},
            {"algorithm.use_kl_in_reward": True, "algorithm.filter_groups.enable": True}
            | {"custom_reward_function.path": "a.py", f"{ACTOR}megatron.tensor_model_parallel_size": 2},
            {"async_training.staleness_threshold": 0.5, "reward_model.enable": True}
            | {"actor_rollout_ref.model.lora_rank": 8, "reward_model.model.path": "m"},
            {"trainer.v1.trainer_mode": "separate_async", "reward.custom_reward_function.path": "a.py"}
            | {"actor_rollout_ref.model.lora.rank": 8, f"{ACTOR}policy_loss.loss_mode": "sapo"},
            {"data.val_files": "v", f"{ROLLOUT}val_kwargs.n": 4, f"{ROLLOUT}val_kwargs.temperature": 0.6}
            | {f"{CORRECTION}bypass_mode": True, "trainer.total_training_steps": 9, f"{ACTOR}optim.lr_warmup_steps": 2},
            {"distillation.enabled": True, f"{TEACHER}model_path": "t"}
            | {f"{ACTOR}policy_loss.loss_mode": "clip_cov", f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"},
            {f"{ACTOR}policy_loss.loss_mode": "kl_cov", "algorithm.adv_estimator": "gdpo"}
            | {"algorithm.gdpo_reward_keys": ["a", "b"]},
            *(
                {f"{prefix}overlong_buffer{end}.enable": True, f"{prefix}overlong_buffer{end}.len": 9}
                for prefix in ("reward_model.", "reward_model.reward_kwargs.", "reward.reward_kwargs.")
                for end in ("", "_cfg")
            ),
        ),
    ),
    "trl": Peer(
        trl.import_trl,
        read_option_table(TABLES, "trl").beside(TRAINING_ARGUMENTS),
        (
            {"use_vllm": True, "eval_strategy": "steps"},
            {"loss_type": "sapo", "reward_funcs": ["a", "b"], "save_strategy": "steps"},
            {"beta": 0.1, "use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate", "use_peft": True},
            {"lr_scheduler_type": "cosine_with_min_lr", "use_vllm": True, "max_steps": 9, "warmup_ratio": 0.5},
            {"use_peft": True, "use_rslora": True, "delta": 2.0, "loss_type": "dr_grpo", "num_processes": 2},
        ),
    ),
    "openrlhf": Peer(
        openrlhf.import_openrlhf,
        read_option_table(TABLES, "openrlhf"),
        (
            {"algo.advantage.estimator": "gae", "critic.model_name_or_path": "c", "eval.dataset": "e"},
            {"algo.advantage.estimator": "group_norm", "eval.dataset": "e", "eval.steps": 5, "ds.lora.rank": 4},
            {"algo.advantage.is_correction_level": "token", "reward.overlong_buffer_len": 9, "logger.wandb.key": "k"},
            {"algo.advantage.is_correction_enable": True, "algo.kl.use_loss": True, "train.async_enable": True},
            {"actor.policy_loss_type": "gspo", "algo.advantage.estimator": "reinforce", "actor.lr_warmup_ratio": 0.0},
        ),
    ),
    "prime_rl": Peer(
        prime_rl.import_prime_rl,
        read_option_table(TABLES, "prime_rl"),
        (
            {"orchestrator.batch_size": 128, "trainer.scheduler.type": "cosine", "orchestrator.eval.interval": 5},
            {"orchestrator.train.source.0.env.id": "a", "orchestrator.eval.source.0.env.id": "b"},
            {"orchestrator.env.0.id": "a", "orchestrator.eval.env.0.id": "b", "orchestrator.env.1.id": "c"},
            {"deployment.num_infer_gpus": 4, "deployment.num_train_nodes": 2, "trainer.model.lora.rank": 4},
            {"orchestrator.train.env.0.id": "a", "orchestrator.train.env.1.id": "c"},
            {"orchestrator.train.source.0.id": "a", "orchestrator.train.source.1.id": "c"},
            {"orchestrator.algo.type": "opd", "orchestrator.algo.teacher.name": "t", "trainer.model.lora.rank": 4},
            {"orchestrator.eval.interval": 5, "orchestrator.eval.source.0.id": "b", "trainer.loss.type": "ipo"},
        ),
    ),
}
OF_TYPE: Mapping[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (4, 0),
    float: (0.25, 2.0),
    str: ("name",),
    list: ([1, 2], ["a"]),
    dict: (),
    type(None): (True, 4, 0.25, "name", [1, 2], ["a"]),
}
"""Values that an option may have, by the type of its default."""


def options_of(name: str) -> Iterator[tuple[str, Any]]:
    """Options of a list, and the default of each."""
    for line in (LISTS / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            option, _, text = line.partition(" = ")
            default = json.loads(text) if text else None
            yield option, {} if isinstance(default, dict) else default


def outcome_of(draft: RecipeBuilder, name: str) -> str:
    """Return what becomes of an option, or "" where it is not mentioned."""
    if re.search(rf"(^| ){re.escape(name)}( |$)", " ".join(entry.source for entry in draft.entries.values())):
        return "ours"
    return next((title for title, found in draft.messages().items() if name in found), "")


def today(peer: Peer, name: str) -> str:
    return next(iter(peer.table.renamed({name: 0})[0]))


@pytest.mark.parametrize("name", PEERS)
def test_every_option_of_a_framework_has_a_line_in_its_table(name: str) -> None:
    peer = PEERS[name]
    without = [option for option, _ in options_of(name) if peer.table.row(today(peer, option)) is None]
    assert without == []


@pytest.mark.parametrize("name", PEERS)
def test_every_option_gets_a_verdict_whatever_its_value_is(name: str) -> None:
    peer = PEERS[name]
    for listed in (name, f"public_{name}"):
        for option, default in options_of(listed):
            called = today(peer, option)
            for value in (default, *OF_TYPE[type(default)]):
                draft = translated(peer, {option: value})
                if draft is None:
                    continue
                row = peer.table.row(called)
                is_read = (
                    called not in draft.left
                    and row is not None
                    and row.verdict in (OptionVerdict.OURS, OptionVerdict.ALWAYS)
                )
                has_verdict = outcome_of(draft, called) or outcome_of(draft, option) or is_read
                assert has_verdict or value in (None, [], {}), f"{option} = {value}"


@pytest.mark.parametrize("name", PEERS)
def test_an_option_whose_key_is_here_is_written_to_it(name: str) -> None:
    """With some setting of the others it sets a key of ours or is read; with none its table reports it as lost."""
    peer, unread = PEERS[name], []
    for option, default in options_of(name):
        called = today(peer, option)
        row = peer.table.row(called)
        if row is None or row.verdict is not OptionVerdict.OURS or isinstance(default, dict):
            continue
        values = (default, *OF_TYPE[type(default)])
        if not any(is_read_with(peer, {**held, option: value}, called) for held in peer.settings for value in values):
            unread.append(option)
    assert unread == []


QUIET = ("has no effect here", "always the case here", "not supported here, but harmless")


@pytest.mark.parametrize("name", PEERS)
def test_an_option_of_which_only_quiet_things_are_said_changes_nothing(name: str) -> None:
    peer = PEERS[name]
    listed = [
        (option, default) for option, default in options_of(name) if verdict_of(peer, option) is OptionVerdict.OURS
    ]
    for held in peer.settings:
        for option, default in [*listed, *held.items()]:
            for value in (held[option],) if option in held else (default, *OF_TYPE[type(default)]):
                draft = translated(peer, {**held, option: value})
                without = translated(peer, {other: kept for other, kept in held.items() if other != option})
                if draft is None or without is None or not is_quiet(draft, {option, today(peer, option)}):
                    continue
                changed = {key for key, entry in draft.entries.items() if entry.value != value_of(without, key)}
                assert not changed | without.entries.keys() - draft.entries.keys(), f"{option} = {value} beside {held}"


def verdict_of(peer: Peer, option: str) -> OptionVerdict | None:
    row = peer.table.row(today(peer, option))
    return row.verdict if row else None


def is_quiet(draft: RecipeBuilder, names: set[str]) -> bool:
    """Return whether something is said of an option, no key comes from it, and no title warns."""
    sources = {name for entry in draft.entries.values() for name in entry.source.split(" and ")}
    titles = [title for title, found in draft.messages().items() if names & set(found)]
    return bool(titles) and not names & sources and set(titles) <= set(QUIET)


def value_of(draft: RecipeBuilder, key: str) -> Any:
    return draft.entries[key].value if key in draft.entries else None


def is_read_with(peer: Peer, options: Mapping[str, Any], name: str) -> bool:
    draft = translated(peer, options)
    return draft is None or name not in draft.left


def translated(peer: Peer, options: Mapping[str, Any]) -> RecipeBuilder | None:
    """None: an option was read, and refused in one line."""
    try:
        return peer.translate(options)
    except ConfigError:
        return None


def keys_of(config: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(config).items():
        inner = [each for each in (*typing.get_args(hint), hint) if dataclasses.is_dataclass(each)]
        yield f"{prefix}{name.rstrip('_')}"
        for each in inner:
            yield from keys_of(each, f"{prefix}{name.rstrip('_')}.")


@pytest.mark.parametrize("name", PEERS)
def test_keys_of_a_table_are_keys_of_ours(name: str) -> None:
    keys = {*keys_of(GrpoConfig)}
    for option, row in PEERS[name].table.rows.items():
        if row.verdict is OptionVerdict.OURS and not row.text.endswith((".*", "AdamW")):
            known = [key for key in row.text.split(", ") if key in keys or key.startswith("reward.reward_model.")]
            assert row.text == ", ".join(known), option


# Words that are a key of ours and an option of theirs, and mean something else there.
HOMONYMS = {
    "path", "name", "device", "options", "keep", "command", "every", "steps", "address", "split", "weight", "dtype",
    "temperature", "top_p", "top_k", "min_p", "n", "k", "seed", "backend", "environment", "extract", "tag", "model",
    "colocate", "variables", "answer", "concurrency", "rollout", "reward",
    "data", "teacher", "chat_template", "max_tokens", "engine", "critic", "log", "eval", "profile", "roles", "pattern",
    "success", "mix", "tensorboard",
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_an_option_named_as_a_key_of_ours_is_not_told_as_lost(name: str) -> None:
    """As lost by the table, that is: with a word of ours, a key exists here, or the word means something else there."""
    peer = PEERS[name]
    words = {key.rpartition(".")[2] for key in keys_of(GrpoConfig)} - HOMONYMS
    lost = []
    for listed in (name, f"public_{name}"):
        for option, _ in options_of(listed):
            row = peer.table.row(today(peer, option))
            last = option.replace("lora.", "lora_").rpartition(".")[2]
            is_of_environment = ".args." in option or ".taskset." in option  # words of its own
            if (
                last in words
                and not is_of_environment
                and (row is None or row.verdict in (OptionVerdict.CHANGES, OptionVerdict.HARMLESS))
            ):
                lost.append(option)
    assert lost == []
