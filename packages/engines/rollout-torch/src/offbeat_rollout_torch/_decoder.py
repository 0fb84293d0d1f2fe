"""A decoder of plain torch: its weights by Hugging Face name, and its forward pass.

Query, key and value are one matrix, and so are gate and up where they are not packed. Rotary embedding turns pairs of
numbers: Hugging Face pairs element i of a head with element i + head_dim / 2; here the two lie side by side, so that
one complex product turns them. The dot product of query and key does not see the order, and names hide it: reading a
name gives what was written to it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_device import ExactLayer, StableMemory, can_pack, exact_layer, exact_norm
from offbeat_rollout_torch._attention import Attention
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._images import ImageInputs, build_tower
from offbeat_rollout_torch._inspection import NO_NOTES, PointNotes
from offbeat_rollout_torch._layers.delta_rule import DeltaRule
from offbeat_rollout_torch._layers.experts import Experts
from offbeat_rollout_torch._layers.linear import Linear, is_worth_packing
from offbeat_rollout_torch._parameters import Arena, Parameter


class LayerWeights:
    """Weights of one layer. Where it has the gated delta rule, `qkv` and `out` are the matrices before and after it."""

    def __init__(
        self,
        architecture: Architecture,
        like: Tensor | Arena,
        pack: bool,
        *,
        has_rule: bool = False,
        exact: bool = False,
    ) -> None:
        a, self._exact = architecture, exact

        def linear(out_size: int, in_size: int, bias: bool) -> Linear:
            return Linear(out_size, in_size, bias=bias, like=like, pack=pack, exact=exact)

        self.rule = DeltaRule(a, like) if has_rule else None
        self._in_parts = _rule_inputs(a) if has_rule else _attention_inputs(a)
        mixed_size = a.rule.value_width if a.rule and has_rule else a.num_heads * a.head_dim
        self.input_norm = like.new_empty(a.hidden_size)
        self.qkv = linear(sum(self._in_parts.values()), a.hidden_size, a.qkv_bias and not has_rule)
        self.q_norm = like.new_empty(a.head_dim)
        self.k_norm = like.new_empty(a.head_dim)
        self.qk_norm = like.new_empty(a.num_heads + a.num_kv_heads, a.head_dim)
        self.out = linear(a.hidden_size, mixed_size, a.out_bias and not has_rule)
        self.mlp_norm = like.new_empty(a.hidden_size)
        self.experts = Experts(a, like) if a.num_experts else None
        if a.num_experts:
            return
        # Packed, two products of which the second multiplies by the first; else one product, and so one call less.
        num_parts = 2 if exact or (pack and is_worth_packing(a.intermediate_size, a.hidden_size)) else 1
        self.gate_up = [
            linear(2 * a.intermediate_size // num_parts, a.hidden_size, a.mlp_bias) for _ in range(num_parts)
        ]
        self.down = linear(a.hidden_size, a.intermediate_size, a.mlp_bias)

    @property
    def matrices(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, *(() if self.experts else (*self.gate_up, self.down))

    def freeze(self, architecture: Architecture) -> None:
        """Pack the matrices and lay the head norms out for one product over queries and keys."""
        for matrix in self.matrices:
            matrix.freeze()
        heads = [self.q_norm] * architecture.num_heads + [self.k_norm] * architecture.num_kv_heads
        torch.stack(heads, out=self.qk_norm)  # where it lies: recorded steps read it there

    def parameters(self, architecture: Architecture) -> dict[str, Parameter]:
        """Hugging Face names, without the layer's prefix."""
        a, start, found = architecture, 0, dict[str, Parameter]()
        for name, size in self._in_parts.items():
            rotary = self._turned(a) if name.endswith(("q_proj", "k_proj")) else 0
            found |= _matrix(name, self.qkv, slice(start, start + size), a.hidden_size, rotary)
            start += size
        out, mixed_size = ("linear_attn.out_proj" if self.rule else "self_attn.o_proj"), self.out.in_size
        found |= {
            "input_layernorm.weight": _vector(lambda: self.input_norm, a.hidden_size),
            "post_attention_layernorm.weight": _vector(lambda: self.mlp_norm, a.hidden_size),
            **_matrix(out, self.out, slice(0, a.hidden_size), mixed_size),
            **(self._dense(a) if self.experts is None else self.experts.parameters()),
        }
        if self.rule is not None:
            return found | self.rule.parameters()
        if a.qk_norm:
            rotary = self._turned(a)
            found["self_attn.q_norm.weight"] = _vector(lambda: self.q_norm, a.head_dim, rotary)
            found["self_attn.k_norm.weight"] = _vector(lambda: self.k_norm, a.head_dim, rotary)
        return found

    def _turned(self, a: Architecture) -> int:
        """Return the elements of a head that lie side by side in pairs.

        With gates between its heads, or turned in part, it is laid out as it is in the folder; so it is where bits
        count, which the order of a sum decides.
        """
        return 0 if a.rule or self._exact else a.head_dim

    def exact(self, a: Architecture, dtype: torch.dtype) -> ExactLayer:
        """Return the layer as exact numerics compute it."""
        gate, up = self.gate_up
        return ExactLayer(
            input_norm=self.input_norm,
            qkv=self.qkv.exact,
            query_norm=self.q_norm if a.qk_norm else None,
            key_norm=self.k_norm if a.qk_norm else None,
            out=self.out.exact,
            mlp_norm=self.mlp_norm,
            gate=gate.exact,
            up=up.exact,
            down=self.down.exact,
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            eps=a.norm_eps,
            dtype=dtype,
        )

    def _dense(self, a: Architecture) -> dict[str, Parameter]:
        wide = a.intermediate_size
        up_start = wide if len(self.gate_up) == 1 else 0
        return {
            **_matrix("mlp.gate_proj", self.gate_up[0], slice(0, wide), a.hidden_size),
            **_matrix("mlp.up_proj", self.gate_up[-1], slice(up_start, up_start + wide), a.hidden_size),
            **_matrix("mlp.down_proj", self.down, slice(0, a.hidden_size), wide),
        }


def _attention_inputs(a: Architecture) -> dict[str, int]:
    """Return the rows of each part of `qkv` of a layer with attention; a query's gate lies behind it."""
    queries, keys = a.num_heads * a.head_dim * (2 if a.rule else 1), a.num_kv_heads * a.head_dim
    return {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}


def _rule_inputs(a: Architecture) -> dict[str, int]:
    """Return the rows of each part of `qkv` of a layer with the gated delta rule, see `DeltaRule`."""
    assert a.rule is not None
    sizes = a.rule.num_channels, a.rule.value_width, a.rule.num_value_heads, a.rule.num_value_heads
    return {f"linear_attn.in_proj_{name}": size for name, size in zip(("qkv", "z", "b", "a"), sizes, strict=True)}


def _vector(storage: Callable[[], Tensor], size: int, rotary: int = 0) -> Parameter:
    return Parameter(storage, slice(0, size), (size,), rotary)


def _matrix(name: str, linear: Linear, rows: slice, in_size: int, rotary: int = 0) -> dict[str, Parameter]:
    size = rows.stop - rows.start
    found = {f"{name}.weight": Parameter(linear.weight, rows, (size, in_size), rotary)}
    if (bias := linear.bias) is not None:
        found[f"{name}.bias"] = Parameter(lambda: bias, rows, (size,), rotary)
    return found


class DecoderWeights:
    """All weights of a model. Made empty; filled by name; `freeze` makes them ready to serve.

    Args:
        architecture: of the model.
        dtype: format.
        device: where they lie.
        pack: large matrices, where that can be.
        reserve: makes memory of so many bytes for the weights of the decoder, so that they stay where they are when
            they are released; None, where it gives None, or packed: `restored` are other tensors.
        exact: they serve exact numerics.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pack: bool = True,
        reserve: Callable[[int], StableMemory | None] | None = None,
        exact: bool = False,
    ) -> None:
        self.architecture, self.dtype, self.device, self.exact = architecture, dtype, device, exact
        self.pack, self._reserve = pack and can_pack(device, dtype), reserve
        like = torch.empty(0, dtype=dtype, device=device)
        self._memory: StableMemory | None = None
        if reserve is not None and not self.pack:
            counted = Arena(like)
            self._allocate(counted)
            self._memory = reserve(counted.num_bytes)
        if self._memory is None:
            self._allocate(like)
        else:
            self._memory.restore()
            self._allocate(Arena(like, self._memory.tensor))

    def _allocate(self, like: Tensor | Arena) -> None:
        a, pack = self.architecture, self.pack
        self.embedding = like.new_empty(a.vocab_size, a.hidden_size)
        shared = self.embedding if a.tied else None
        # Logits rounded to bfloat16 are off by up to 0.06 at 16: a third of what the format costs log-probabilities.
        # Packed the head is in float32; plain it has a product that does not round, see `Linear.in_float32`.
        self.head: Linear | None = Linear(
            a.vocab_size,
            a.hidden_size,
            bias=False,
            like=like,
            pack=pack,
            shared=shared,
            packed_dtype=torch.float32,
            exact=self.exact,
        )
        self.final_norm = like.new_empty(a.hidden_size)
        has_rule = a.rule.is_in_layer if a.rule else (False,) * a.num_layers
        self.layers = [LayerWeights(a, like, pack, has_rule=each, exact=self.exact) for each in has_rule]
        self.aliases = {"lm_head.weight": f"{a.prefix}embed_tokens.weight"} if a.tied else {}
        self._build_tower()

    def _build_tower(self) -> None:
        """Make the vision tower, which no recorded step reads, and name all parameters."""
        vision = self.architecture.vision
        self.tower = build_tower(vision, self.dtype, self.device) if vision else None
        self.parameters = self._parameters()
        self.stacks = {
            f"{self.architecture.prefix}layers.{index}.{name}": stack
            for index, layer in enumerate(self.layers)
            if layer.experts is not None
            for name, stack in layer.experts.stacks().items()
        }

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
        parameter = self.stacks.get(name) or self.parameters[self.aliases.get(name, name)]
        return parameter.view().reshape(parameter.shape)

    def parts_of(self, stack: str) -> list[str]:
        """Names of the experts' own tensors that are one under the name of a stack."""
        stem, _, kind = stack.rpartition(".")
        kinds = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        return [f"{stem}.{n}.{each}.weight" for n in range(self.architecture.num_experts) for each in kinds]

    @property
    def keeps_addresses(self) -> bool:
        """Return whether what recorded steps read stays where it is while the weights are released."""
        return self._memory is not None

    def release(self) -> None:
        """Release all memory, until `restored`."""
        self.parameters, self.stacks, self.tower = {}, {}, None
        if self._memory is not None:
            self._memory.release()
            return
        self.layers = []
        self.embedding, self.head = self.final_norm, None

    def restored(self) -> "DecoderWeights":
        """Return weights with memory again, and without values: these where they keep their addresses, else others."""
        if self._memory is None:
            more: Any = {"pack": self.pack, "reserve": self._reserve, "exact": self.exact}
            return DecoderWeights(self.architecture, self.dtype, self.device, **more)
        self._memory.restore()
        self._build_tower()
        return self

    def shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of the matrices, as they are multiplied with."""
        return [matrix.size for layer in self.layers[:1] for matrix in layer.matrices]

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


class MatrixUpdate(Protocol):
    """Addition to the products of a layer's matrices: a LoRA adapter, for some tokens of a pass."""

    def add(self, layer: int, matrix: str, y: Tensor, x: Tensor) -> None:
        """Add to the output y [N, out] of a matrix what the input x [N, in] makes of it, in place."""


def decode_hidden(
    weights: DecoderWeights,
    ids_N: Tensor,
    rotations_PC2: Tensor,
    attention: Attention,
    *,
    rotations_NC2: Tensor | None = None,
    image_inputs: ImageInputs | None = None,
    adapters: Sequence[MatrixUpdate] = (),
    routes: list[Tensor] | None = None,
    notes: PointNotes = NO_NOTES,
) -> Tensor:
    """Run the layers.

    Args:
        weights: frozen.
        ids_N: [N] int64 tokens of the pass, packed.
        rotations_PC2: [positions, rotary_dim / 2, 2] float32, cosine and sine.
        attention: planned for these tokens.
        rotations_NC2: the rotation of each token, where its place in the cache does not say it.
        image_inputs: of the images among these tokens.
        adapters: LoRA adapters, each with the tokens that it changes.
        routes: takes, of each layer with experts, [N, K] those of each token.
        notes: takes what is computed on the way.

    Returns:
        [N, hidden] before the last norm.
    """
    a = weights.architecture
    x = F.embedding(ids_N, weights.embedding)
    if image_inputs is not None:
        x.index_copy_(0, image_inputs.placeholders_M, image_inputs.embeds_MH.to(x.dtype))
    notes.take_inputs(ids_N, attention.positions_N, x)
    if weights.exact:  # a layer is one function there, and has no points of its own
        turns = rotations_PC2.index_select(0, attention.positions_N)
        for index, layer in enumerate(weights.layers):
            notes.enter(index)
            x = exact_layer(x.float(), layer.exact(a, weights.dtype), turns, partial(attention, index))
            notes.leave(x)
        return x
    if rotations_NC2 is None:
        rotations_NC2 = rotations_PC2.index_select(0, attention.positions_N)
    num_before = {True: 0, False: 0}  # layers with the rule, and with attention: each kind has places of its own
    for index, layer in enumerate(weights.layers):
        notes.enter(index)
        h = _normed(x, layer.input_norm, a)
        notes.take("attention input", h)
        qkv, has_rule = _adapted(layer.qkv(h), h, adapters, index, "qkv"), layer.rule is not None
        place, num_before[has_rule] = num_before[has_rule], num_before[has_rule] + 1
        if layer.rule is not None:
            mixed = layer.rule(qkv, attention.state_rows, place)
        else:
            heads = qkv.view(len(x), -1, a.head_dim)
            mixed = _attend(heads, rotations_NC2[:, None], attention, place, layer, a, notes)
        notes.take("attention", mixed)
        x = _adapted(layer.out.plus(mixed, x), mixed, adapters, index, "out")
        notes.take("after attention", x)
        h = _normed(x, layer.mlp_norm, a)
        notes.take("mlp input", h)
        if layer.experts is not None:
            mixed, chosen = layer.experts(h)
            x = x + mixed
            notes.take("experts", chosen.sort(-1).values)
            notes.leave(x)
            if routes is not None:
                routes.append(chosen)
            continue
        wide = _gated(layer, h, adapters, index)
        notes.take("activation", wide)
        x = _adapted(layer.down.plus(wide, x), wide, adapters, index, "down")
        if image_inputs is not None and index < len(image_inputs.deeper):
            x.index_add_(0, image_inputs.placeholders_M, image_inputs.deeper[index].to(x.dtype))
        notes.leave(x)
    return x


def _normed(x: Tensor, weight: Tensor, a: Architecture) -> Tensor:
    """Return the norm of x; families with the rule add 1 to its weight, and compute it in float32."""
    if a.rule is None:
        return F.rms_norm(x, weight.shape, weight, a.norm_eps)
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), a.norm_eps).to(x.dtype)


def _attend(
    qkv_NhD: Tensor,
    rotations_N1C2: Tensor,
    attention: Attention,
    place: int,
    layer: LayerWeights,
    a: Architecture,
    notes: PointNotes = NO_NOTES,
) -> Tensor:
    """Return the output of attention, [N, H * D]; in families with the rule it is gated."""
    gates = None
    if a.rule is not None:
        gates = qkv_NhD[:, 1 : 2 * a.num_heads : 2]
        qkv_NhD = torch.cat((qkv_NhD[:, : 2 * a.num_heads : 2], qkv_NhD[:, 2 * a.num_heads :]), 1)
    notes.take_heads(qkv_NhD, turned=False)
    _rotate(qkv_NhD[:, : a.num_heads + a.num_kv_heads], rotations_N1C2, layer, a)
    notes.take_heads(qkv_NhD, turned=True)
    mixed = attention(place, qkv_NhD)
    return mixed if gates is None else mixed * gates.flatten(1).sigmoid()


def _adapted(y: Tensor, x: Tensor, adapters: Sequence[MatrixUpdate], layer: int, matrix: str) -> Tensor:
    """Return the output y of a matrix for the input x, with what adapters add to it; in place."""
    for adapter in adapters:
        adapter.add(layer, matrix, y, x)
    return y


def _gated(layer: LayerWeights, h: Tensor, adapters: Sequence[MatrixUpdate], index: int) -> Tensor:
    """SwiGLU: fused into packed products, unless an adapter comes between."""
    if not adapters and len(layer.gate_up) == 2:
        gate_matrix, up_matrix = layer.gate_up
        return up_matrix.times(h, gate_matrix.silu(h))
    products = [matrix(h) for matrix in layer.gate_up]
    gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
    return F.silu(_adapted(gate, h, adapters, index, "gate")).mul_(_adapted(up, h, adapters, index, "up"))


def decode_logits(weights: DecoderWeights, hidden_BH: Tensor, notes: PointNotes = NO_NOTES) -> Tensor:
    """[B, hidden] of the tokens to continue from, to [B, vocabulary] float32."""
    assert weights.head is not None
    if weights.exact:
        exactly = exact_norm(hidden_BH, weights.final_norm, weights.architecture.norm_eps)
        notes.end(exactly)
        return weights.head.exact_in_float32(exactly)
    dtype = weights.head.input_dtype
    normed = _normed(hidden_BH.to(dtype), weights.final_norm.to(dtype), weights.architecture)
    notes.end(normed)
    return weights.head.in_float32(normed)


def _rotate(qk_NhD: Tensor, rotations_N1C2: Tensor, layer: LayerWeights, a: Architecture) -> None:
    """Normalise heads where the family does, and rotate by position; in place.

    CPU and CUDA have one operator for it, on complex numbers; other devices lack that, or views that it could write
    through. Families with the rule turn the first elements of a head, in the order of the folder.
    """
    if a.rule is not None:
        weight = 1 + layer.qk_norm.float()
        qk_NhD.copy_(F.rms_norm(qk_NhD.float(), (a.head_dim,), None, a.norm_eps).mul_(weight))
        halves = torch.unflatten(qk_NhD[..., : a.rotary_dim], -1, (2, -1))
        (x, y), (cos, sin) = halves.float().unbind(-2), rotations_N1C2.unbind(-1)
        halves.copy_(torch.stack((x * cos - y * sin, x * sin + y * cos), -2))
        return
    if a.qk_norm:
        torch.mul(F.rms_norm(qk_NhD, (a.head_dim,), None, a.norm_eps), layer.qk_norm, out=qk_NhD)
    pairs = torch.unflatten(qk_NhD, -1, (-1, 2))
    turned = pairs.float()  # the same tensor where it is float32
    if turned.is_cpu or turned.is_cuda:
        torch.view_as_complex(turned).mul_(torch.view_as_complex(rotations_N1C2))
    else:
        (x, y), (cos, sin) = turned.unbind(-1), rotations_N1C2.unbind(-1)
        turned = torch.stack((x * cos - y * sin, x * sin + y * cos), -1)
    if turned is not pairs:
        pairs.copy_(turned)
