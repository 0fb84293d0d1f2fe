"""States of layers with the gated delta rule: the plan counts what vLLM sets aside of them for a sample."""

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import MambaSpec

from offbeat_placement import ModelShape, RolloutMemory

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("state", ["auto", "float32"])
def test_a_sample_s_states_are_those_that_vllm_sets_aside(tensor_parallel, state):
    sizes = [CONFIG[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim")]
    sizes += [CONFIG["linear_value_head_dim"], CONFIG["linear_conv_kernel_dim"]]
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tensor_parallel, *sizes)
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", state)
    of_a_layer = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes).page_size_bytes
    config = CONFIG if state == "auto" else {**CONFIG, "mamba_ssm_dtype": state}
    memory = RolloutMemory(weight_bytes=2, tensor_parallel=tensor_parallel)
    assert memory.state_bytes_per_sample(ModelShape.from_config(config)) == 3 * of_a_layer
