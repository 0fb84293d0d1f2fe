"""verl's rollout in our words: engines, sampling, group sizes of forks."""

from typing import Any, Final

from offbeat_recipes import RecipeBuilder

_ROLLOUT: Final = "actor_rollout_ref.rollout."
_SAMPLERS: Final = {"vllm": "vllm", "hf": "torch", "trtllm": "trtllm"}


def write_rollout(draft: RecipeBuilder) -> None:
    """Write section rollout; the longest prompt is written."""
    name = f"{_ROLLOUT}name"
    wanted = draft.text(name, default="vllm")
    draft.put("rollout.backend", _SAMPLERS.get(wanted, "vllm"), name)
    if wanted not in _SAMPLERS:
        draft.change(name, "no such rollout engine here: using vllm instead")
    width = f"{_ROLLOUT}tensor_model_parallel_size"
    draft.put("rollout.tensor_parallel", draft.count(width, default=2), width)
    draft.copy("rollout.dtype", f"{_ROLLOUT}dtype", default="bfloat16")
    _write_quantization(draft)
    _write_group_size(draft)
    draft.copy("rollout.temperature", f"{_ROLLOUT}temperature")
    draft.copy("rollout.top_p", f"{_ROLLOUT}top_p")
    draft.copy("rollout.top_k", f"{_ROLLOUT}top_k", convert=lambda k: max(k, 0))
    prompt = draft.entries["data.max_prompt_tokens"].value
    answer = draft.count("data.max_response_length", f"{_ROLLOUT}response_length", default=512)
    draft.put("rollout.max_tokens", answer, "data.max_response_length", f"{_ROLLOUT}response_length")
    longest = draft.count(f"{_ROLLOUT}max_model_len", "data.max_model_len", default=prompt + answer)
    lengths = (f"{_ROLLOUT}max_model_len", "data.max_model_len", "data.max_response_length")
    draft.put("rollout.max_model_len", longest, *lengths, f"{_ROLLOUT}response_length")
    draft.copy("rollout.max_running", f"{_ROLLOUT}max_num_seqs", default=1024)
    draft.copy(
        "rollout.sync_bucket_bytes",
        f"{_ROLLOUT}update_weights_bucket_megabytes",
        f"{_ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes",
        convert=lambda mib: int(float(mib) * 2**20),
    )
    draft.copy("rollout.seed", f"{_ROLLOUT}seed")
    _write_turns(draft)
    _write_engine_arguments(draft, wanted)


_FORKS: Final = (f"{_ROLLOUT}n_agent", "env.rollout.n", "agent_grpo.n")
"""Group sizes of Search-R1, verl-agent and DeepResearcher, whose own rollout.n is 1 or multiplies it."""


def group_of_fork(draft: RecipeBuilder) -> int:
    """Return the group size that a fork has beside rollout.n, or 1."""
    names = [name for name in _FORKS if draft.has(name)]
    return draft.count(*names, default=1) if names else 1


def _write_group_size(draft: RecipeBuilder) -> None:
    each = draft.count(f"{_ROLLOUT}n", "rollout.n", default=1)
    names, of_fork = [name for name in _FORKS if draft.has(name)], group_of_fork(draft)
    draft.put("rollout.samples_per_prompt", each * of_fork, *names, f"{_ROLLOUT}n", "rollout.n")
    if names:
        draft.change(names[0], f"the group size of a fork: {each * of_fork} samples of each prompt")


def _write_turns(draft: RecipeBuilder) -> None:
    """Turns that the rollout makes by itself; with tools that are named in other places."""
    names = (
        "max_turns",
        "rllm.agent.max_steps",
        f"{_ROLLOUT}max_turns",
        f"{_ROLLOUT}multi_turn.max_assistant_turns",
        *(["actor_rollout_ref.agent.max_turns"] if draft.given("actor_rollout_ref.agent.enable_agent") is True else []),
        "env.max_steps",
        "trainer.max_turns",
        f"{_ROLLOUT}agent.max_steps",
        "agent_proxy.max_turn",
    )
    if (turns := draft.number(*names, default=0)) and turns > 1:
        draft.put("environment.max_turns", turns, *names)
        draft.lose(draft.named(*names), "what answers the turns is not imported: set environment.name")


def _write_quantization(draft: RecipeBuilder) -> None:
    """Source: verl, verl/trainer/config/rollout/rollout.yaml (quantization: null or fp8)."""
    name = f"{_ROLLOUT}quantization"
    wanted = draft.take(name)
    if wanted == "fp8":
        draft.put("rollout.weight_format", "fp8", name)
    elif wanted is not None:
        draft.lose(name, "engines sample from rollout.dtype, or from fp8 with rollout.weight_format")


def _write_engine_arguments(draft: RecipeBuilder, wanted: str) -> None:
    """Arguments of the rollout engine itself go to `rollout.options`, which hands on what it does not know."""
    if _SAMPLERS.get(wanted, "vllm") != "vllm":
        return
    prefix = f"{_ROLLOUT}engine_kwargs.vllm."
    names = {name: name.removeprefix(prefix) for name in draft.left if name.startswith(prefix)}
    own = (
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "max_num_batched_tokens",
    )
    names |= {f"{_ROLLOUT}{name}": name for name in own if draft.has(f"{_ROLLOUT}{name}")}
    options: dict[str, Any] = {}
    for name, argument in names.items():
        if (value := draft.take(name)) is not None:
            *outer, last = argument.split(".")
            inner = options
            for each in outer:
                inner = inner.setdefault(each, {})
            inner[last] = value
    if options:
        draft.put("rollout.options", options, *names)
