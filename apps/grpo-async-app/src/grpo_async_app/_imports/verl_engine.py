"""verl's training engine and optimizer in our words."""

from typing import Any, Final

from offbeat_recipes import RecipeBuilder, write_betas

_ACTOR: Final = "actor_rollout_ref.actor."
_MODEL: Final = "actor_rollout_ref.model."
_MEGATRON: Final = f"{_ACTOR}megatron."
_FSDP: Final = f"{_ACTOR}fsdp_config."
_ULYSSES: Final = f"{_ACTOR}ulysses_sequence_parallel_size", f"{_FSDP}ulysses_sequence_parallel_size"
_ENGINES: Final = {"fsdp": "torch", "fsdp2": "torch", "dp": "torch", "megatron": "megatron"}
_SCHEDULES: Final = ("constant", "linear", "cosine")
_AXES: Final = {
    "tensor_parallel": "tensor_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
}

_FORMATS: Final = dict.fromkeys(("float32", "fp32", "float", "32"), "float32") | dict.fromkeys(
    ("bfloat16", "bf16"), "bfloat16"
)
"""Source: verl, verl/utils/torch_dtypes.py, which compares with names, and hydra, which reads 32 as a number."""


def write_trainer(draft: RecipeBuilder, usual: str) -> None:
    """Write section engine; `usual`: the engine of verl's configuration."""
    has_axes = any(name.startswith(_MEGATRON) for name in draft.left)
    names = (f"{_ACTOR}strategy", "model_engine")
    strategy = draft.text(*names, default="megatron" if has_axes else usual)
    if strategy not in _ENGINES:
        draft.change(draft.named(*names), "no such training engine here: using torch instead")
    draft.put("engine.backend", _ENGINES.get(strategy, "torch"), f"{_ACTOR}strategy")
    _write_format(draft, strategy)
    sharing = 1
    if strategy == "megatron":
        _write_axes(draft)
    elif (sharing := draft.count(*_ULYSSES, default=1)) > 1:
        draft.put("engine.options", {"context_parallel": sharing}, *_ULYSSES)
    # Source: verl, verl/workers/actor/dp_actor.py: the tokens of all ranks that share sequences.
    budget = f"{_ACTOR}ppo_max_token_len_per_gpu"
    draft.copy("engine.max_tokens_per_microbatch", budget, default=16384, convert=lambda number: number * sharing)
    draft.copy("engine.activation_checkpointing", f"{_MODEL}enable_gradient_checkpointing", default=True)
    _write_adapters(draft)


def _write_format(draft: RecipeBuilder, strategy: str) -> None:
    """Source: verl, verl/workers/fsdp_workers.py, in which mixed_precision comes before dtype, and megatron.yaml."""
    is_megatron = strategy == "megatron"
    names = (f"{_MEGATRON}dtype",) if is_megatron else (f"{_FSDP}mixed_precision.param_dtype", f"{_FSDP}dtype")
    name = next(filter(draft.has, names), names[-1])
    wanted = str(draft.take(*names, default="bfloat16"))
    draft.put("engine.dtype", _FORMATS.get(wanted, "bfloat16"), name)
    if wanted not in _FORMATS:
        draft.lose(name, f"{wanted} is not supported: using bfloat16 instead")


def _write_adapters(draft: RecipeBuilder) -> None:
    """Source: verl, model/hf_model.yaml, and ppo_megatron_trainer.yaml for the names with a dot."""
    for dot, usual in (("_", 16), (".", 32)):
        names = f"{_MODEL}lora{dot}rank", f"{_MODEL}lora{dot}alpha"
        rank, alpha = draft.number(names[0], default=0), draft.number(names[1], default=usual)
        if rank > 0:  # there the scale of adapters may be given without any
            draft.put("engine.lora_rank", rank, names[0])
            draft.put("engine.lora_alpha", float(alpha), names[1])


def _write_axes(draft: RecipeBuilder) -> None:
    sizes = {key: draft.take(f"{_MEGATRON}{name}") for key, name in _AXES.items()}
    if options := {key: size for key, size in sizes.items() if size is not None}:
        draft.put("engine.options", options, *(f"{_MEGATRON}{_AXES[key]}" for key in options))


def write_replay(draft: RecipeBuilder) -> None:
    """Write whether the trainer takes the experts that the engines took.

    Source: verl, docs/advance/router_replay.md: R3 replays the engines' experts, R2 those of the old log-probabilities.
    """
    name, asking = f"{_ACTOR}router_replay.mode", "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    mode, is_asked = draft.take(name), draft.take(asking)
    if mode == "R3" or (is_asked and mode is None):
        draft.put("rollout.replay_routes", "auto", name if mode else asking)
    elif mode == "R2":
        draft.lose(name, "R2 replays the trainer's experts of the old log-probabilities: rollout.replay_routes = auto")


_OPTIM: Final = f"{_ACTOR}optim."


def write_optimizer(draft: RecipeBuilder) -> None:
    """Write the optimizer and its schedule; batches and the end of the run are written."""
    kind = str(draft.take(f"{_OPTIM}optimizer", default="AdamW"))
    if kind.lower() not in ("adam", "adamw"):
        draft.lose(f"{_OPTIM}optimizer", f"{kind} is not supported: using AdamW instead")
    draft.put("engine.learning_rate", draft.number(f"{_OPTIM}lr", default=1e-6), f"{_OPTIM}lr")
    _write_schedule(draft)
    draft.copy("engine.weight_decay", f"{_OPTIM}weight_decay", default=0.01)
    write_betas(draft, f"{_OPTIM}betas", (0.9, 0.999))
    draft.copy("engine.max_grad_norm", f"{_ACTOR}grad_clip", f"{_OPTIM}clip_grad")


def _write_schedule(draft: RecipeBuilder) -> None:
    names = (f"{_OPTIM}lr_scheduler_type", f"{_OPTIM}lr_decay_style", f"{_OPTIM}warmup_style")
    kind = draft.take(*names)
    if isinstance(kind, str) and kind in _SCHEDULES:
        draft.put("engine.schedule", kind, *names)
    elif kind is not None:
        draft.lose(draft.named(*names), f"{kind} is not supported: using constant instead")
    draft.copy("engine.min_learning_rate_ratio", f"{_OPTIM}min_lr_ratio")
    least, peak = draft.number(f"{_OPTIM}min_lr", default=0.0), draft.entries["engine.learning_rate"].value
    if least and peak:
        draft.put("engine.min_learning_rate_ratio", min(least / peak, 1.0), f"{_OPTIM}min_lr", f"{_OPTIM}lr")
    _write_warmup(draft)


def _write_warmup(draft: RecipeBuilder) -> None:
    """The schedule of verl goes one step further with each train batch, ours with each mini-batch.

    Source: verl, verl/workers/engine_workers.py (update_lr_scheduler is set for the last mini-batch alone); for
    Megatron's and FSDP's engines alike.
    """
    name, share_name = f"{_OPTIM}lr_warmup_steps", f"{_OPTIM}lr_warmup_steps_ratio"
    steps, share = draft.number(name, default=-1), draft.number(share_name, default=0.0)
    each: Any = draft.entries["async.require_batches"].value * draft.entries["algorithm.num_passes"].value
    if steps <= 0:
        if share and (total := draft.entries.get("engine.max_updates")):
            draft.put("engine.warmup_steps", int(share * total.value * each), share_name)
        elif share:
            draft.lose(share_name, "a share of all steps: give engine.warmup_steps as their number")
        return
    draft.put("engine.warmup_steps", int(steps * each), name)
    if each > 1:
        draft.change(name, f"counted in train batches there, in optimizer steps here: {each} in each")
