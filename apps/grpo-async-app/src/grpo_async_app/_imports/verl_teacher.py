"""verl's on-policy distillation in our words.

Source: verl at 1dda039, verl/trainer/config/distillation/distillation.yaml and verl/trainer/distillation/losses.py.
"""

from typing import Final

from offbeat_recipes import Draft, is_number

_SECTION: Final = "distillation."
_LOSS: Final = f"{_SECTION}distillation_loss."
_TEACHERS: Final = f"{_SECTION}teacher_models."


def write_teacher(draft: Draft) -> None:
    """The teacher, its place, and how much is learned from it.

    Args:
        draft: to add to; reward and advantage are written.
    """
    if not draft.take(f"{_SECTION}enabled"):
        return
    paths = [name for name in draft.left if name.startswith(_TEACHERS) and name.endswith(".model_path")]
    if not paths:
        draft.miss(f"{_SECTION}enabled", "no teacher is named: set teacher.path")
        return
    draft.copy("teacher.path", paths[0])
    for name in paths[1:]:
        draft.miss(name, "one teacher is learned from: the first")
    inference = f"{paths[0].removesuffix('model_path')}inference."
    backend = draft.take(f"{inference}name", default=draft.entries["rollout.backend"].value)
    draft.put("teacher.backend", backend if backend in ("vllm", "trtllm") else "vllm", f"{inference}name")
    draft.put("teacher.dtype", draft.take(f"{inference}dtype", default="bfloat16"), f"{inference}dtype")
    draft.copy("teacher.tensor_parallel", f"{inference}tensor_model_parallel_size", default=2)
    share_name = f"{inference}gpu_memory_utilization"
    if is_number(share := draft.take(share_name)):
        draft.put("teacher.options", {"gpu_memory_utilization": share}, share_name)
    names = (f"{_SECTION}nnodes", f"{_SECTION}n_gpus_per_node")
    devices = draft.number(names[0], default=1) * draft.number(names[1], default=8)
    draft.put("teacher.num_replicas", max(devices // draft.entries["teacher.tensor_parallel"].value, 1), *names)
    _write_loss(draft)


def _write_loss(draft: Draft) -> None:
    uses_rewards, name = draft.take(f"{_LOSS}use_task_rewards", default=True), f"{_LOSS}distillation_loss_coef"
    weight = draft.number(name, default=1.0)
    draft.put("algorithm.distillation_coefficient", float(weight) if uses_rewards else 1.0, name)
    if not uses_rewards:
        draft.put("algorithm.advantage", "none", f"{_LOSS}use_task_rewards")
        draft.drop("reward")
        draft.changed.pop("reward_model.reward_manager", None)
        if draft.entries.pop("eval.every_updates", None):
            draft.miss("trainer.test_freq", "validation needs a reward: set reward.name and eval.every_updates")
    mode = draft.take(f"{_LOSS}loss_mode", default="k3")
    if mode not in ("k1", "kl"):
        draft.change(f"{_LOSS}loss_mode", "KL(policy, teacher) at the sampled tokens takes its place")
