"""The weights of a decoder: fused storage, addressed, written in place and read back by Hugging Face names.

Query, key and value are one matrix. Rotary embedding turns pairs of numbers: Hugging Face pairs element i of a head
with element i + head_dim / 2; here the two lie side by side, so that one complex product turns them. The dot product
of query and key does not see the order, and names hide it: reading a name gives what was written to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._linear import Linear, can_pack
from offbeat_rollout_torch._vision import build_tower


@dataclass(frozen=True)
class Parameter:
    """One Hugging Face tensor inside fused storage.

    Args:
        storage: returns the plain storage it lies in.
        rows: which rows of it.
        shape: under Hugging Face.
        rotary: head_dim when its rows are heads in pair order, else 0.
    """

    storage: Callable[[], Tensor]
    rows: slice
    shape: tuple[int, ...]
    rotary: int = 0

    def view(self) -> Tensor:
        """View of the storage whose elements run in Hugging Face order: [heads, 2, head_dim / 2, ...] or `shape`."""
        rows = self.storage()[self.rows]
        if not self.rotary:
            return rows
        return rows.view(-1, self.rotary // 2, 2, *self.shape[1:]).transpose(1, 2)


class LayerWeights:
    """One decoder layer."""

    def __init__(self, architecture: Architecture, like: Tensor, pack: bool) -> None:
        a = architecture
        q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim

        def linear(out_size: int, in_size: int, bias: bool) -> Linear:
            return Linear(out_size, in_size, bias=bias, like=like, pack=pack)

        self.input_norm = like.new_empty(a.hidden_size)
        self.qkv = linear(q_rows + 2 * kv_rows, a.hidden_size, a.qkv_bias)
        self.q_norm = like.new_empty(a.head_dim)
        self.k_norm = like.new_empty(a.head_dim)
        self.qk_norm = like.new_empty(0)
        self.out = linear(a.hidden_size, q_rows, a.out_bias)
        self.mlp_norm = like.new_empty(a.hidden_size)
        self.gate = linear(a.intermediate_size, a.hidden_size, a.mlp_bias)
        self.up = linear(a.intermediate_size, a.hidden_size, a.mlp_bias)
        self.down = linear(a.hidden_size, a.intermediate_size, a.mlp_bias)

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """All linear maps."""
        return self.qkv, self.out, self.gate, self.up, self.down

    def freeze(self, architecture: Architecture) -> None:
        """Pack the matrices and lay the head norms out for one product over queries and keys."""
        for matrix in self.matrices:
            matrix.freeze()
        heads = [self.q_norm] * architecture.num_heads + [self.k_norm] * architecture.num_kv_heads
        self.qk_norm = torch.stack(heads)

    def parameters(self, architecture: Architecture) -> dict[str, Parameter]:
        """Hugging Face names, without the layer's prefix."""
        a = architecture
        q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        found = {
            "input_layernorm.weight": _vector(lambda: self.input_norm, a.hidden_size),
            "post_attention_layernorm.weight": _vector(lambda: self.mlp_norm, a.hidden_size),
            **_matrix("self_attn.q_proj", self.qkv, slice(0, q_rows), a.hidden_size, a.head_dim),
            **_matrix("self_attn.k_proj", self.qkv, slice(q_rows, q_rows + kv_rows), a.hidden_size, a.head_dim),
            **_matrix("self_attn.v_proj", self.qkv, slice(q_rows + kv_rows, q_rows + 2 * kv_rows), a.hidden_size),
            **_matrix("self_attn.o_proj", self.out, slice(0, a.hidden_size), q_rows),
            **_matrix("mlp.gate_proj", self.gate, slice(0, a.intermediate_size), a.hidden_size),
            **_matrix("mlp.up_proj", self.up, slice(0, a.intermediate_size), a.hidden_size),
            **_matrix("mlp.down_proj", self.down, slice(0, a.hidden_size), a.intermediate_size),
        }
        if a.qk_norm:
            found["self_attn.q_norm.weight"] = _vector(lambda: self.q_norm, a.head_dim, a.head_dim)
            found["self_attn.k_norm.weight"] = _vector(lambda: self.k_norm, a.head_dim, a.head_dim)
        return found


def _vector(storage: Callable[[], Tensor], size: int, rotary: int = 0) -> Parameter:
    return Parameter(storage, slice(0, size), (size,), rotary)


def _matrix(name: str, linear: Linear, rows: slice, in_size: int, rotary: int = 0) -> dict[str, Parameter]:
    """Name the rows of a linear map, and of its bias if it has one."""
    size = rows.stop - rows.start
    found = {f"{name}.weight": Parameter(linear.weight, rows, (size, in_size), rotary)}
    if (bias := linear.bias) is not None:
        found[f"{name}.bias"] = Parameter(lambda: bias, rows, (size,), rotary)
    return found


class DecoderWeights:
    """All weights of a model. Made empty; filled by name; `freeze` makes them ready to serve.

    Args:
        architecture: of the model.
        dtype: number format held.
        device: where they are held.
        pack: hold large matrices packed where the device can.
    """

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device, *, pack: bool = True
    ) -> None:
        a, like = architecture, torch.empty(0, dtype=dtype, device=device)
        self.architecture, self.dtype, self.device, self.pack = a, dtype, device, pack and can_pack(device, dtype)
        pack = self.pack
        self.embedding = like.new_empty(a.vocab_size, a.hidden_size)
        shared = self.embedding if a.tied else None
        self.head: Linear | None = Linear(a.vocab_size, a.hidden_size, bias=False, like=like, pack=pack, shared=shared)
        self.final_norm = like.new_empty(a.hidden_size)
        self.layers = [LayerWeights(a, like, pack) for _ in range(a.num_layers)]
        self.tower = build_tower(a.vision, dtype, device) if a.vision else None
        self.parameters = self._parameters()
        self.aliases = {"lm_head.weight": f"{a.prefix}embed_tokens.weight"} if a.tied else {}

    def _parameters(self) -> dict[str, Parameter]:
        a = self.architecture
        table = (a.vocab_size, a.hidden_size)
        found = {
            f"{a.prefix}embed_tokens.weight": Parameter(lambda: self.embedding, slice(0, a.vocab_size), table),
            f"{a.prefix}norm.weight": _vector(lambda: self.final_norm, a.hidden_size),
        }
        if not a.tied and self.head is not None:
            found["lm_head.weight"] = Parameter(self.head.weight, slice(0, a.vocab_size), table)
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.parameters(a).items():
                found[f"{a.prefix}layers.{index}.{name}"] = parameter
        if self.tower is not None:
            for name, tensor in self.tower.named_parameters(prefix="model.visual"):
                found[name] = Parameter(tensor.detach, slice(None), tuple(tensor.shape))
        return found

    def read(self, name: str) -> Tensor:
        """Return the tensor held under a Hugging Face name, in its shape.

        Raises:
            KeyError: no such name.
        """
        parameter = self.parameters[self.aliases.get(name, name)]
        return parameter.view().reshape(parameter.shape)

    def release(self) -> None:
        """Give all memory back. What is left tells only how to make such weights again."""
        self.parameters, self.layers = {}, []
        self.embedding, self.head, self.tower = self.final_norm, None, None

    def discard(self) -> None:
        """Forget what is packed: a whole update follows."""
        if self.head is not None:
            self.head.discard()
        for layer in self.layers:
            for matrix in layer.matrices:
                matrix.discard()

    def freeze(self) -> None:
        """Make ready to serve: pack. Call after every write, and after reads."""
        if self.head is not None:
            self.head.freeze()
        for layer in self.layers:
            layer.freeze(self.architecture)


class WeightWriter:
    """Writes named tensors into place and checks that each name comes once, in its shape, and none is missing.

    Args:
        weights: written in place.
        error: raised for whatever is wrong.
        source: where the tensors come from, for the text of the error.
    """

    def __init__(self, weights: DecoderWeights, error: type[Exception], source: str) -> None:
        self._weights, self._error, self._source = weights, error, source
        self.written: set[str] = set()

    def write(self, name: str, tensor: Any) -> None:
        """Copy one tensor into place, converted to the dtype held."""
        target = self._weights.aliases.get(name, name)
        parameter = self._weights.parameters.get(target)
        if parameter is None:
            raise self._error(f"{self._source}: this model has no tensor {name!r}")
        if name in self.written:
            raise self._error(f"{self._source}: the tensor {name!r} came twice")
        source = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
        if tuple(source.shape) != parameter.shape:
            raise self._error(f"{self._source}: {name!r} must have shape {parameter.shape}, got {tuple(source.shape)}")
        is_tied = target in self.written
        if not self.written:
            self._weights.discard()
        self.written |= {name, target}  # what was there is gone, whatever happens now
        view = parameter.view()
        source = source.reshape(view.shape)
        if is_tied and not torch.equal(view, source.to(view)):
            raise self._error(f"{self._source}: {name!r} and {target!r} are one tied tensor, but their values differ")
        view.copy_(source)

    def finish(self) -> None:
        """Check that nothing is missing."""
        missing = [name for name in self._weights.parameters if name not in self.written]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise self._error(f"{self._source}: missing {', '.join(map(repr, missing[:3]))}{more}")
