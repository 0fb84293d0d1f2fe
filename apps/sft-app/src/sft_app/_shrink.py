"""`--shrink`: a run of the same structure with every size shrunk, on a CPU, in a minute, with nothing to download.

What stays: ranks up to two, how they share the model, LoRA, schedule, validation, checkpoints. What goes: the model,
the data, lengths, batches, devices, an engine that is not installed.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from offbeat_data import ConversationConfig
from offbeat_recipes import (
    MAX_ROLES,
    SEEING,
    draw_chats,
    draw_figures,
    draw_pairs,
    draw_ratings,
    draw_sums,
    installed_backend,
    make_tiny_model,
    shrink_engine,
    stand_ins,
    takes_experts,
    takes_images,
    tiny_family,
)
from sft_app._config import SftConfig
from sft_app._preflight import Preflight, check_run

_NUM_UPDATES: Final = 2
_SEQUENCES_PER_RANK: Final = 4
_NUM_HELD_OUT: Final = 4
_MAX_SEQUENCE_TOKENS: Final = 48


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run made small.

    Args:
        family: of the model to make at its `model.path`.
        is_chat: the rows of the recipe are conversations, and no prompts with completions.
        notices: what is not as in the recipe, beyond sizes.
    """

    config: SftConfig
    family: str
    is_chat: bool
    notices: tuple[str, ...]

    def prepare(self) -> Preflight:
        """Make the model, draw what it learns, and check the run as any other."""
        config, data = self.config, self.config.data
        make_tiny_model(
            Path(config.model.path), self.family, max_positions=data.max_sequence_tokens, seed=config.engine.seed
        )
        if config.preference.rows == "conversations":
            self._draw_conversations()
        else:
            self._draw_preferences()
        return replace(check_run(config), notices=self.notices)

    def _draw_conversations(self) -> None:
        data = self.config.data
        columns = {"prompt_column": data.prompt_column, "answer_column": data.completion_column}
        if self.family in SEEING:
            draw_figures(Path(data.path), **columns, seed=data.seed)
        elif self.is_chat:
            draw_chats(Path(data.path), messages_column=data.messages_column, seed=data.seed)
        else:
            draw_sums(Path(data.path), **columns, seed=data.seed)

    def _draw_preferences(self) -> None:
        data = self.config.data
        if self.config.preference.rows == "pairs":
            columns = {"chosen_column": data.chosen_column, "rejected_column": data.rejected_column}
            draw_pairs(Path(data.path), prompt_column=data.prompt_column, **columns, seed=data.seed)
        else:
            columns = {"completion_column": data.completion_column, "label_column": data.label_column}
            draw_ratings(Path(data.path), prompt_column=data.prompt_column, **columns, seed=data.seed)


def shrink_run(config: SftConfig, model_folder: Path) -> Rehearsal:
    """Shrink a run for a tiny model made in `model_folder`; its data lie in the folder "data" beside it."""
    engine, taken = config.engine, installed_backend("offbeat.engine", config.engine.backend)
    num_ranks = min(engine.num_ranks, MAX_ROLES)
    can_see = takes_images(engine, taken) and config.preference.rows == "conversations"
    family, family_notice = tiny_family(config.model.path, has_experts=takes_experts(engine, taken), can_see=can_see)
    small_engine = shrink_engine(
        replace(engine, batch_size=min(engine.batch_size, _SEQUENCES_PER_RANK * num_ranks)),
        wanted=engine.backend,
        taken=taken,
        num_ranks=num_ranks,
        num_updates=_NUM_UPDATES,
    )
    every_updates = min(config.validates_every, _NUM_UPDATES)
    small = replace(
        config,
        model=replace(config.model, path=str(model_folder)),
        data=_drawn_data(
            config.data, model_folder.with_name("data") / "rows.jsonl", _NUM_HELD_OUT if every_updates else 0
        ),
        engine=small_engine,
        eval=replace(config.eval, every_updates=every_updates, max_sequences=0),
        checkpoint=replace(config.checkpoint, every=min(config.checkpoint.every, _NUM_UPDATES)),
        cluster=replace(config.cluster, launcher="local", num_nodes=0, accelerators_per_node=0, trainer_threads=0),
        log=replace(config.log, trackers=()),
        profile=replace(config.profile, steps=""),
    )
    notices = [family_notice, *stand_ins({"engine.backend": (engine.backend, taken)})]
    if config.cluster.launcher != small.cluster.launcher:
        notices.append(f"cluster.launcher: {small.cluster.launcher} instead of {config.cluster.launcher}")
    return Rehearsal(
        config=small,
        family=family,
        is_chat=_is_chat(config.data),
        notices=tuple(f"shrunk: {it}" for it in notices if it),
    )


def _is_chat(data: ConversationConfig) -> bool:
    """Return whether the recipe keeps the default names of prompts and completions, and so means conversations."""
    usual = ConversationConfig(path=data.path)
    return (data.prompt_column, data.completion_column) == (usual.prompt_column, usual.completion_column)


def _drawn_data(data: ConversationConfig, path: Path, eval_size: int) -> ConversationConfig:
    """In the columns of the recipe."""
    return replace(
        data,
        path=str(path),
        split="train",
        num_items=0,
        eval_path="",
        eval_split="",
        eval_size=eval_size,
        system_prompt="",
        template_options={},
        max_sequence_tokens=_MAX_SEQUENCE_TOKENS,
        epochs=1,
    )
