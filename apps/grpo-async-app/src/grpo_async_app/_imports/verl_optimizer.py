"""verl's optimizer and learning rate in our words."""

from typing import Any, Final

from offbeat_recipes import Draft, is_number

_OPTIM: Final = "actor_rollout_ref.actor.optim."
_SCHEDULES: Final = ("constant", "linear", "cosine")


def write_optimizer(draft: Draft) -> None:
    """AdamW, the learning rate and its schedule.

    Args:
        draft: to add to; batches are written.
    """
    draft.copy("engine.learning_rate", f"{_OPTIM}lr", default=1e-6)
    _write_schedule(draft)
    draft.copy("engine.weight_decay", f"{_OPTIM}weight_decay", default=0.01)
    betas = draft.take(f"{_OPTIM}betas")
    betas = betas if isinstance(betas, list) and len(betas) == 2 else [0.9, 0.999]
    draft.put("engine.adam_beta1", betas[0], f"{_OPTIM}betas")
    draft.put("engine.adam_beta2", betas[1], f"{_OPTIM}betas")
    draft.copy("engine.max_grad_norm", "actor_rollout_ref.actor.grad_clip", f"{_OPTIM}clip_grad")


def _write_schedule(draft: Draft) -> None:
    names = (f"{_OPTIM}lr_scheduler_type", f"{_OPTIM}lr_decay_style", f"{_OPTIM}warmup_style")
    kind = draft.take(*names)
    if kind in _SCHEDULES:
        draft.put("engine.schedule", kind, *names)
    elif kind is not None:
        draft.change(draft.named(*names), f"{kind} is not there: constant takes its place")
    draft.copy("engine.min_learning_rate_ratio", f"{_OPTIM}min_lr_ratio")
    least, peak = draft.take(f"{_OPTIM}min_lr"), draft.entries["engine.learning_rate"].value
    if is_number(least) and least and peak:
        draft.put("engine.min_learning_rate_ratio", min(least / peak, 1.0), f"{_OPTIM}min_lr", f"{_OPTIM}lr")
    _write_warmup(draft)


def _write_warmup(draft: Draft) -> None:
    """The schedule of verl goes one step further with each train batch, ours with each mini-batch.

    Source: verl, verl/workers/engine_workers.py (update_lr_scheduler is set for the last mini-batch alone); for
    Megatron's and FSDP's engines alike.
    """
    name, share_name = f"{_OPTIM}lr_warmup_steps", f"{_OPTIM}lr_warmup_steps_ratio"
    steps, share = draft.number(name, default=-1), draft.number(share_name, default=0.0)
    each: Any = draft.entries["async.require_batches"].value
    if steps <= 0:
        if share and (total := draft.entries.get("engine.max_updates")):
            draft.put("engine.warmup_steps", int(share * total.value * each), share_name)
        elif share:
            draft.miss(share_name, "a share of all steps: give engine.warmup_steps as their number")
        return
    draft.put("engine.warmup_steps", int(steps * each), name)
    if each > 1:
        draft.change(name, f"counted in train batches there, in optimizer steps here: {each} in each")
