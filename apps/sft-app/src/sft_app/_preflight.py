"""Everything that can be wrong with a run, found before anything starts; and the plan in words."""

from dataclasses import dataclass

from offbeat_data import ConversationSet, EpochOrder, load_conversations, load_tokenizer
from offbeat_run import ModelFolder, count_text, inspect_model, size_text
from offbeat_types import ConfigError, TrainSequence, load_backend
from sft_app._config import SftConfig


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a run will work with, checked.

    Args:
        config: of the run.
        model: the model folder.
        conversations: sequences to learn and their counts.
        held_out: the held-out sequences a validation uses.
        num_updates: optimizer steps of the whole run.
    """

    config: SftConfig
    model: ModelFolder
    conversations: ConversationSet
    held_out: tuple[TrainSequence, ...]
    num_updates: int

    @property
    def order(self) -> EpochOrder:
        """Maps a position to a sequence."""
        data = self.config.data
        return EpochOrder(len(self.conversations.train), data.seed, data.shuffle)

    @property
    def required_bytes(self) -> int:
        """Room on the disk for all checkpoints kept at once, one in the making, and the best."""
        checkpoint = self.config.checkpoint
        return self.model.num_parameters * 4 * (3 if checkpoint.save_optimizer else 1) * (checkpoint.keep + 2) + 2**26

    def plan(self) -> list[tuple[str, str]]:
        """Rows of (what, how much)."""
        config, model, counts = self.config, self.model, self.conversations.train_counts
        tokens = sum(len(sequence.ids) for sequence in self.conversations.train)
        learned = sum(int(sequence.loss_mask.sum()) for sequence in self.conversations.train)
        trained = f"LoRA of rank {config.engine.lora_rank}" if config.engine.lora_rank else "all weights"
        left_out = f", {counts.too_long} left out: too long" if counts.too_long else ""
        return [
            ("model", f"{model.family}, {count_text(model.num_parameters)} parameters, {model.path}"),
            ("trains", f"{trained}, {config.engine.backend} engine on {config.engine.device}, {config.engine.dtype}"),
            ("data", f"{counts.kept} sequences of {counts.read} rows from {config.data.path}{left_out}"),
            ("tokens", f"{count_text(tokens)} an epoch, {count_text(learned)} of them learned"),
            ("length", f"{self.num_updates} updates of {config.engine.batch_size} sequences"),
            (
                "memory",
                f"{size_text(model.num_parameters * 16)} for weights, gradients and moments + activations of "
                f"{config.engine.max_tokens_per_microbatch} tokens",
            ),
            ("disk", f"{size_text(self.required_bytes)} for checkpoints"),
        ]


def check_run(config: SftConfig) -> Preflight:
    """Check a configuration against the machine, the model folder and the data.

    Raises:
        UserError: the first thing that is wrong, with what to do.
    """
    model = inspect_model(config.model.path)
    load_backend("offbeat.engine", config.engine.backend)
    tokenizer = load_tokenizer(model.path, config.model.trust_remote_code)
    conversations = load_conversations(config.data, tokenizer)
    if config.eval.every_updates and not conversations.eval:
        raise ConfigError(
            "eval.every_updates needs held-out data: set data.eval_size or data.eval_path, or set it to 0"
        )
    return Preflight(
        config=config,
        model=model,
        conversations=conversations,
        held_out=tuple(conversations.eval)[: config.eval.max_sequences or None],
        num_updates=_count_updates(config, len(conversations.train)),
    )


def _count_updates(config: SftConfig, num_sequences: int) -> int:
    by_data = -(-config.data.epochs * num_sequences // config.engine.batch_size)
    limits = [limit for limit in (by_data, config.engine.max_updates) if limit]
    if not limits:
        raise ConfigError("the run would never end: set data.epochs or engine.max_updates above 0")
    return min(limits)
