"""TransformerEngine's linear layers and attention in plain torch, for machines without a GPU.

    python te_in_torch.py

Trains `CASES` with megatron-core's wrappers of them on one rank, and prints each one's largest error against plain
transformers as JSON. A process of its own: megatron-core asks once, when it is imported, whether TransformerEngine is
there. Signatures, names and shapes of parameters are those of TransformerEngine 2.10, transformer_engine/pytorch:
module/linear.py, module/grouped_linear.py and attention/dot_product_attention/dot_product_attention.py.
"""

import dataclasses
import importlib.machinery
import json
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

VERSION = "2.10.0"
CALLS = dict.fromkeys(("Linear", "GroupedLinear", "DotProductAttention"), 0)


class Linear(nn.Module):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__()
        assert tp_size == 1, "one rank"
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype))
        self.use_bias, self.return_bias = bias, return_bias

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        CALLS["Linear"] += 1
        bias = self.bias if self.use_bias else None
        out = linear(inp, self.weight, None if self.return_bias else bias)
        return (out, bias) if self.return_bias else out


class GroupedLinear(nn.Module):
    def __init__(
        self, num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True,
        return_bias=False, params_dtype=None, parallel_mode=None, device="cuda", ub_overlap_rs=False,
        ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, save_original_input=False,
    ):  # fmt: skip
        super().__init__()
        assert tp_size == 1, "one rank"
        assert not bias, "experts have none"
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
            self.register_parameter(f"weight{number}", weight)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        CALLS["GroupedLinear"] += 1
        parts = zip(torch.split(inp, m_splits), self.parameters(), strict=True)
        return torch.cat([linear(part, weight) for part, weight in parts])


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
        tp_group=None, layer_number=None, attention_type="self", cp_group=None, cp_global_ranks=None, cp_stream=None,
        cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla", return_max_logit=False,
    ):  # fmt: skip
        super().__init__()
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias",
        core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None,
        fp8_output=False, num_splits=1,
    ):  # fmt: skip
        """[T, H · D]; the checks are its own for packs, and that the bounds cover what is packed."""
        CALLS["DotProductAttention"] += 1
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert attention_mask is cu_seqlens_q_padded is cu_seqlens_kv_padded is None
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert sum(lengths) == len(query_layer) == len(key_layer)
        assert max_seqlen_q == max_seqlen_kv == max(lengths)
        tensors = [torch.split(each.transpose(0, 1), lengths, 1) for each in (query_layer, key_layer, value_layer)]
        how = {"is_causal": True, "scale": self.scale, "enable_gqa": True}
        found = [
            scaled_dot_product_attention(*(x[None] for x in each), **how)[0] for each in zip(*tensors, strict=True)
        ]
        return torch.cat(found, 1).transpose(0, 1).flatten(1)


class _Module(types.ModuleType):
    """Whatever megatron-core imports beside them, and does not use in bfloat16 or float32."""

    __path__ = ()

    def __init__(self, name, **attributes):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(self).update(attributes)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def install():
    """Before megatron-core is imported."""
    top = "transformer_engine"
    pytorch = _Module(
        f"{top}.pytorch", Linear=Linear, GroupedLinear=GroupedLinear, DotProductAttention=DotProductAttention
    )
    found = [_Module(top, __version__=VERSION, pytorch=pytorch), pytorch]
    found += [_Module(f"{top}.pytorch.{name}") for name in ("fp8", "router")]
    found += [_Module(f"{top}.pytorch.tensor", QuantizedTensor=type("QuantizedTensor", (torch.Tensor,), {}))]
    sys.modules.update({module.__name__: module for module in found})


CASES = {
    "experts grouped": ("qwen3-moe", {}, False),
    "experts one by one, our attention": ("qwen3-moe", {"experts": "sequential", "attention": "runs"}, False),
    "biases": ("qwen2", {}, False),
    "adapters": ("qwen3", {}, True),
}


def main():
    install()
    from megatron_layouts import Layout, engine_config, make_model, train_with_engine
    from megatron_yardstick import compare, train_with_transformers

    from offbeat_engine_megatron import MegatronTrainEngine, _kernels

    _kernels._why_not_te = lambda device_type, fits_flash: ""
    results = {}
    for case, (model, options, lora) in CASES.items():
        CALLS.update(dict.fromkeys(CALLS, 0))
        with tempfile.TemporaryDirectory() as place:
            folder = make_model(Path(place) / model, model)
            layout = Layout(model=model, options={"layers": "te", **options}, lora=lora)
            engine = MegatronTrainEngine.create(engine_config(folder, layout))
            wanted = train_with_transformers(folder, lora=lora)
            errors = dataclasses.asdict(compare(train_with_engine(engine), wanted))
            kernels = str(engine._plan.kernels(engine._device))
            results[case] = {"error": float(max(errors.values())), "kernels": kernels, **CALLS}
            engine.close()
    print(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
