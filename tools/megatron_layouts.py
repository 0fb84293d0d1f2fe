"""The parallel layouts in which offbeat-engine-megatron is compared with plain transformers, and their errors.

    python tools/megatron_layouts.py [--only WORD] [--json]

Every layout trains two steps of one tiny model on real ranks over gloo, and is held against `megatron_yardstick`. Run
it where the engine is installed. `tests/engine` of the package holds every layout to 1e-5; this prints what is found.
"""

import gc
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from bench.harness import on_ranks, parser_of, show
from megatron_yardstick import (
    LORA_RANK,
    NUM_STEPS,
    Trained,
    compare,
    make_sequences,
    policy_loss,
    train_with_transformers,
)
from tiny_families import write_tiny_family
from torch import Tensor

from offbeat_core import TrainEngine, TrainEngineConfig
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh
from offbeat_testing import tiny_model

GROUPS: Final = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {"family": "qwen3", "tied": True},
    "qwen3-untied": {"family": "qwen3", "tied": False},
    "qwen2": {"family": "qwen2", "tied": True},
    "llama": {"family": "llama", "tied": False},
    "qwen3-moe": {},
}
MORE_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "mistral": {"sliding_window": None},
    "qwen2-moe": {"mlp_only_layers": [1], "shared_expert_intermediate_size": 48},
    "glm4-moe": {"attention_bias": True, "n_shared_experts": 2, **GROUPS},
    "deepseek-v3": {
        **GROUPS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4-moe-lite": {"q_lora_rank": None, "v_head_dim": 24},
    "dots1": {"first_k_dense_replace": 2, "norm_topk_prob": True, "sliding_window": None},
}
"""Settings of each family, beside those of `write_tiny_family`."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model, the sizes of the mesh's axes that are not 1, and what else is set.

    Args:
        model: one of `MODELS` or `MORE_FAMILIES`.
        axes: of the mesh.
        options: of the engine.
        recompute: activation checkpointing.
        lora: train low-rank adapters of rank `LORA_RANK` instead of the weights.
    """

    model: str = "qwen3"
    axes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    lora: bool = False

    @property
    def num_ranks(self) -> int:
        """Return the number of processes; experts are spread over the ranks of the other axes."""
        return math.prod(size for axis, size in self.axes.items() if axis != "ep")

    def __str__(self) -> str:
        axes = " ".join(f"{axis}{size}" for axis, size in self.axes.items()) or "one rank"
        rest = [f"{name}={value}" for name, value in self.options.items()]
        rest += ["recompute"] * self.recompute + ["lora"] * self.lora
        return ", ".join([self.model, axes, *rest])

    @property
    def slug(self) -> str:
        """Return a name for a folder."""
        return str(self).replace(" ", "-").replace(",", "")


def _dense() -> Iterator[Layout]:
    """Return one model in every layout."""
    yield Layout()
    yield Layout(recompute=True)
    yield Layout(options={"distributed_optimizer": False})
    for axes in (
        {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2},
        {"tp": 4}, {"cp": 4}, {"pp": 4}, {"dp": 4},
        {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "dp": 2},
        {"pp": 2, "dp": 2}, {"tp": 2, "cp": 2, "dp": 2}, {"tp": 2, "cp": 2, "pp": 2}, {"tp": 2, "pp": 2, "dp": 2},
        {"cp": 2, "pp": 2, "dp": 2}, {"tp": 4, "dp": 2}, {"cp": 4, "pp": 2}, {"tp": 2, "pp": 4},
    ):  # fmt: skip
        yield Layout(axes=axes)
    for axes in ({"pp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "cp": 2, "pp": 2}):
        yield Layout(axes=axes, options={"virtual_pipeline": 2})
    yield Layout(axes={"pp": 2}, options={"virtual_pipeline": 2, "overlap_p2p": True})
    yield Layout(axes={"pp": 4}, options={"batch_p2p": True})
    yield Layout(axes={"tp": 2}, options={"sequence_parallel": False})
    yield Layout(axes={"tp": 2, "cp": 2}, options={"sequence_parallel": False})
    yield Layout(axes={"tp": 2, "pp": 2}, recompute=True)
    yield Layout(axes={"tp": 2, "dp": 2}, options={"distributed_optimizer": False})
    for axes in ({"dp": 2}, {"pp": 2, "dp": 2}, {"cp": 2, "dp": 2}):
        yield Layout(axes=axes, options={"overlap_grad_reduce": True, "overlap_param_gather": True})


def _families() -> Iterator[Layout]:
    """Return every family in the layouts in which its tensors are split differently."""
    for model in ("qwen3-untied", "qwen2", "llama"):
        yield Layout(model=model)
        for axes in ({"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}):
            yield Layout(model=model, axes=axes)


def _experts() -> Iterator[Layout]:
    """Return layouts with experts spread over the ranks of a stage."""
    for axes in (
        {}, {"dp": 2}, {"dp": 2, "ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2},
        {"pp": 2, "dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"tp": 2, "cp": 2, "ep": 4},
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2},
    ):  # fmt: skip
        yield Layout(model="qwen3-moe", axes=axes)
    yield Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}, options={"distributed_optimizer": False})
    yield Layout(model="qwen3-moe", axes={"pp": 2, "dp": 2, "ep": 2}, options={"virtual_pipeline": 2})
    for axes in ({"dp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}):
        yield Layout(model="qwen3-moe", axes=axes, options={"experts": "sequential"})


def _adapters() -> Iterator[Layout]:
    """Return layouts with adapters beside layers that ranks share along their outputs, their inputs, or not at all."""
    for axes in ({}, {"tp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "dp": 2}):
        yield Layout(axes=axes, lora=True)
    yield Layout(axes={"tp": 4}, options={"sequence_parallel": False}, lora=True)
    yield Layout(axes={"pp": 2, "dp": 2}, options={"virtual_pipeline": 2}, lora=True, recompute=True)
    yield Layout(axes={"dp": 2}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}, lora=True)
    yield Layout(model="qwen2", axes={"tp": 2}, lora=True)
    yield Layout(model="qwen3-moe", axes={"tp": 2, "dp": 2, "ep": 2}, lora=True)


def _more_families() -> Iterator[Layout]:
    """Return mixtures with what ranks share in other ways: shared experts, gates, biases, latent attention."""
    yield Layout(model="mistral", axes={"tp": 2, "pp": 2})
    for model in ("qwen2-moe", "glm4-moe", "deepseek-v3", "glm4-moe-lite", "dots1"):
        yield Layout(model=model)
        for axes in ({"tp": 2, "ep": 2}, {"cp": 2, "pp": 2, "ep": 2}, {"tp": 2, "dp": 2, "pp": 2, "ep": 4}):
            yield Layout(model=model, axes=axes)
    yield Layout(model="glm4-moe", axes={"pp": 2, "dp": 2}, options={"virtual_pipeline": 2}, recompute=True)
    yield Layout(
        model="glm4-moe", axes={"dp": 2, "ep": 2}, options={"overlap_grad_reduce": True, "overlap_param_gather": True}
    )
    yield Layout(model="glm4-moe", axes={"tp": 2, "dp": 2, "ep": 2}, lora=True)


LAYOUTS: Final = (*_dense(), *_families(), *_experts(), *_adapters(), *_more_families())


def params_of(layouts: Sequence[Layout], in_ci: Sequence[Layout] | None = None) -> list[Any]:
    """Return the parameters of a test that runs in each layout on real ranks; layouts outside CI run at night."""
    import pytest

    found = []
    for layout in layouts:
        marks = [pytest.mark.mesh(**({"dp": 1} | layout.axes), deadline_s=150), pytest.mark.timeout(180)]
        if in_ci is not None and layout not in in_ci:
            marks.append(pytest.mark.nightly)
        found.append(pytest.param(layout, marks=marks, id=str(layout)))
    return found


def make_model(folder: Path, model: str) -> Path:
    """Write a tiny model of four layers that every layout divides."""
    if model == "qwen3-moe":
        return _make_moe(folder)
    if model in MORE_FAMILIES:
        return _make_family(folder, model)
    return tiny_model(folder, num_layers=4, hidden_size=32, num_kv_heads=4, **MODELS[model])


def _make_moe(folder: Path) -> Path:
    """Make sparse layers of four experts, two for each token, after one dense layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tiny_model(folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    untyped: dict[str, Any] = {"head_dim": 32}  # transformers does not declare it; vLLM decodes none narrower on a CPU
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=False, initializer_range=0.1,
        max_position_embeddings=2048, **untyped,
    )  # fmt: skip
    network = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    network.save_pretrained(folder)
    return folder


def _make_family(folder: Path, model: str) -> Path:
    tiny_model(folder)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    sizes = {"vocab_size": 320, "num_key_value_heads": 4, "hidden_size": 32}
    write_tiny_family(model.replace("-", "_"), folder, MORE_FAMILIES[model], **sizes)
    return folder


def engine_config(folder: Path, layout: Layout) -> TrainEngineConfig:
    """Return settings under which every rank has several micro-batches, and clipping and decay have an effect.

    A large epsilon: Adam's first steps are nearly the sign of the gradient, which rounding alone may turn where the
    gradient is almost zero.
    """
    return TrainEngineConfig(
        model_path=str(folder),
        device="cpu",
        learning_rate=1e-2,
        adam_eps=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        max_tokens_per_microbatch=40,
        activation_checkpointing=layout.recompute,
        lora_rank=LORA_RANK if layout.lora else 0,
        options={"entropy_gradient": True, **layout.options},
    )


def train_with_engine(engine: MegatronTrainEngine) -> Trained:
    """Return the same two steps; all ranks call it."""
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        losses.append(engine.forward_backward(make_sequences(step), policy_loss)["loss"].value)
        if step == 0 and not engine.config.options.get("overlap_grad_reduce"):
            gradients = whole_gradients(engine, *engine._policy.trained)
        norms.append(engine.step()["grad_norm"].value)
    weights = copied(engine)
    asked = make_sequences(9)
    logprobs = [each[s.loss_mask] for each, s in zip(engine.logprobs(asked), asked, strict=True)]
    return Trained(losses=losses, grad_norms=norms, gradients=gradients, weights=weights, logprobs=logprobs)


def copied(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the weights that an engine hands out, by name; all ranks call it."""
    return {name: tensor.clone() for name, tensor in engine.weights()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Return whether two are equal bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def whole_gradients(engine: MegatronTrainEngine, *held: Any) -> dict[str, Tensor]:
    """Return the pass's gradients by name, summed over all ranks; the step that follows reduces them itself.

    Args:
        engine: all ranks call it.
        *held: the weights to look at.
    """
    from megatron.core.distributed import finalize_model_grads

    kept = [(buffer, buffer.clone()) for buffer in engine._optimizer.gradients()]
    with engine._shim:
        finalize_model_grads(engine._optimizer.parts, None, force_all_reduce=True)
    stream = (pair for each in held for pair in each.gather(lambda parameter: parameter.main_grad))
    found = {name: tensor.clone() for name, tensor in stream}
    for buffer, before in kept:
        buffer.copy_(before)
    return found


def measure(layout: Layout, folder: Path, wanted: Trained) -> dict[str, Any]:
    """Train a layout on forked ranks; return their largest errors, 0 where gradients are not visible.

    Raises:
        RuntimeError: a rank failed; its error is on standard error.
    """

    def train(rank: int, shared: Path) -> dict[str, float]:
        engine = MegatronTrainEngine.create(engine_config(folder, layout), Mesh(**layout.axes))
        errors = compare(train_with_engine(engine), wanted)
        engine.close()
        return asdict(errors)

    errors = on_ranks(layout.num_ranks, train)
    return {"layout": str(layout), **{name: max(each[name] for each in errors) for name in errors[0]}}


def main() -> None:
    """Measure all layouts, or those whose name contains a word."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="measure layouts whose name holds this")
    args = parser.parse_args()
    from offbeat_engine_megatron._megatron import load_megatron

    torch.set_num_threads(1)
    load_megatron()  # and all of the engine, once, for the ranks that are forked from here
    gc.freeze()  # their collections then leave alone, and copy no page of, what they share with this process
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {name: make_model(Path(folder) / name, name) for name in (*MODELS, *MORE_FAMILIES)}
        wanted: dict[tuple[str, bool], Trained] = {}
        for layout in LAYOUTS:
            if args.only in str(layout):
                path, kind = models[layout.model], (layout.model, layout.lora)
                if kind not in wanted:
                    wanted[kind] = train_with_transformers(path, lora=layout.lora)
                rows.append(measure(layout, path, wanted[kind]))
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
