"""Faults of vLLM's own modules, and a process that runs grpo-async-app with one of them at a time.

`python planted_in_vllm.py` imports vLLM once. For each line of its input, the name of a fault and the words of a
command as JSON, it forks, plants the fault and runs the command, and prints exit code and output as JSON. It has its
own process because that of the tests has run engines, and a fork of it would lack their threads.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

DEADLINE_S = 250.0
MODULES = (
    *("offbeat_engine_torch", "offbeat_rollout_vllm._engine", "offbeat_rollout_vllm._in_workers.extension"),
    *("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"),
)


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be said of it.

    Args:
        plant: puts it in.
        kind: of the finding.
        where: part of the finding's place.
    """

    plant: Callable[[], None]
    kind: str
    where: str


def change(owner: str, name: str, wrap: Callable[..., Any]) -> None:
    """Put what `wrap` makes of a function in its place; `owner` is a module, or a class of one behind a colon."""
    path, _, kind = owner.partition(":")
    found: Any = import_module(path)
    found = getattr(found, kind) if kind else found
    setattr(found, name, wrap(getattr(found, name)))


def loaded(spoil: Callable[[Any], None]) -> Callable[[], None]:
    """Spoil the model when it is loaded."""

    def wrap(own: Any) -> Any:
        def init(self: Any, worker: Any) -> None:
            own(self, worker)
            spoil(worker.model_runner.get_model())

        return init

    return lambda: change("offbeat_rollout_vllm._in_workers.extension:WorkerSide", "__init__", wrap)


def proved(spoil: Callable[[Any], None]) -> Callable[[], None]:
    """Spoil the model after each update that has been proved."""
    models: list[Any] = []

    def wrap(own: Any) -> Any:
        def load(*args: Any) -> Any:
            proof = own(*args)
            spoil(models[0])
            return proof

        return load

    def plant() -> None:
        loaded(models.append)()
        change("offbeat_rollout_vllm._control:EngineControl", "_load", wrap)

    return plant


def other_base(model: Any) -> None:
    rotary = model.model.layers[0].self_attn.rotary_emb
    rotary.base /= 50
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())


def stretched(model: Any) -> None:
    cache = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    half = len(cache) // 2
    cache[:half] = cache[::2].clone()


def coarse_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.3


def coarse_heads(model: Any) -> None:
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 3.0


def steep_attention(model: Any) -> None:
    model.model.layers[0].self_attn.attn.impl.scale *= 1.5


def with_gelu(model: Any) -> None:
    from torch.nn import functional

    def gated(gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate) * up

    model.model.layers[0].mlp.act_fn.forward = gated


def large_embedding(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: output * 1.2)


def large_down(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, output: (output[0] * 1.3, output[1]))


def large_head(model: Any) -> None:
    model.logits_processor.scale = 1.2


def large_norm_weight(model: Any) -> None:
    model.model.norm.weight.data.mul_(1.3)


def large_packed_weight(model: Any) -> None:
    """A matrix that is held packed for oneDNN alone."""
    layer = model.model.layers[1].self_attn.o_proj
    own = layer.cpu_linear
    layer.cpu_linear = lambda *args: own(*args) * 1.3


def keep_cache() -> None:
    change("vllm.v1.engine.llm_engine:LLMEngine", "reset_prefix_cache", lambda _: lambda *args, **named: True)


def raw_logprobs() -> None:
    """vLLM's own default."""

    def wrap(own: Any) -> Any:
        return lambda *args, **named: own(*args, **named) | {"logprobs_mode": "raw_logprobs"}

    change("offbeat_rollout_vllm._setup", "engine_arguments", wrap)


def with_penalty() -> None:
    """A penalty as some models' generation_config.json has it."""

    def wrap(own: Any) -> Any:
        return lambda *args: own(*args) | {"repetition_penalty": 1.2}

    change("offbeat_rollout_vllm._requests", "vllm_params", wrap)


def one_seed() -> None:
    change("offbeat_rollout_vllm._vllm_objects", "mix_seed", lambda own: lambda seed: own(7))


FAULTS = {
    "none": Fault(lambda: None, "", ""),
    "rotary base": Fault(loaded(other_base), "layers", "rollout engine: layer 0: query"),
    "positions scaled": Fault(loaded(stretched), "layers", "rollout engine: layer 0: query"),
    "epsilon of a norm": Fault(loaded(coarse_norm), "layers", "rollout engine: layer 1: mlp input"),
    "epsilon of the norm of heads": Fault(loaded(coarse_heads), "layers", "rollout engine: layer 0: query"),
    "scale of attention": Fault(loaded(steep_attention), "layers", "rollout engine: layer 0: attention"),
    "activation": Fault(loaded(with_gelu), "layers", "rollout engine: layer 0: activation"),
    "last product of the MLP": Fault(loaded(large_down), "layers", "rollout engine: layer 0: output"),
    "embedding": Fault(loaded(large_embedding), "layers", "rollout engine: embedding"),
    "head": Fault(loaded(large_head), "layers", "rollout engine: head"),
    "the last norm's weight": Fault(proved(large_norm_weight), "weights", "model.norm"),
    "a packed weight": Fault(proved(large_packed_weight), "weights", "layers.1.self_attn.o_proj"),
    "old keys and values": Fault(keep_cache, "state", "cache of another version"),
    "log-probabilities before temperature": Fault(raw_logprobs, "inputs", "temperature = 1"),
    "a penalty": Fault(with_penalty, "inputs", "penalty of 1.2"),
    "one seed": Fault(one_seed, "state", "seeds"),
}


def main() -> None:
    from offbeat_testing import RunningCommand, forked_main

    # As an engine's start has them, too late for what is imported here.
    os.environ.update({"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    command = forked_main("grpo_async_app", *MODULES)
    for line in sys.stdin:
        fault, *words = json.loads(line)

        def planted(plant: Callable[[], None] = FAULTS[fault].plant) -> object:
            plant()
            return command()

        with RunningCommand(planted, *words) as process:
            code = process.wait(DEADLINE_S)
            print(json.dumps([code, process.output]), flush=True)


if __name__ == "__main__":
    main()
