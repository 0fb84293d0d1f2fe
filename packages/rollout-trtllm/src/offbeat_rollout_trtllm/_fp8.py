"""Which weights TensorRT-LLM holds in FP8 blocks."""

from typing import Final

from offbeat_weightsync import TensorSpec
from offbeat_weightsync import is_fp8_weight as is_fp8_matrix

ROUTERS: Final = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight", ".block_sparse_moe.gate.weight")
"""They choose the experts; TensorRT-LLM keeps them in the model's own format, as DeepSeek-V3 does."""


def is_fp8_weight(spec: TensorSpec) -> bool:
    """Whether a tensor goes over as FP8 blocks: matrices of the layers, but no table, head or router."""
    return is_fp8_matrix(spec) and not spec.name.endswith(ROUTERS)
