"""Low-rank adapters: W + (alpha / rank) B A on every linear layer of the blocks, with W frozen.

megatron-core's layers join what Hugging Face keeps apart (queries, keys and values; gate and up): each part has an
adapter of its own here, so that names, first values and files are those of one process. Experts, their router and the
vocabulary head have none.
Source: LoRA (arXiv:2106.09685); the names are those of Hugging Face PEFT.

Shapes: L tokens of this rank, E features going in, O coming out, R rank of the update.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from offbeat_engine_megatron._layout import Parallel, Plan
from offbeat_engine_megatron._slots import WEIGHT, ParameterPath, Slot, list_adapted, list_adapter_slots
from offbeat_engine_megatron._weights import HeldWeights, Put, Values
from offbeat_mesh import Mesh
from offbeat_training import initial_adapters, peft_name, without_lora, write_adapter_config


class Adapter(nn.Module):
    """The low-rank updates of one of megatron-core's linear layers, on one rank; they take part while `active`.

    Args:
        slots: of the weights that lie in the layer.
        rank: R.
        scale: alpha / R.
        groups: how often the parts alternate among the layer's outputs on this rank.
        tp: the ranks that share the layer.
        parallel: sizes of the axes.
        like: of the adapters' device and format.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        rank: int,
        scale: float,
        groups: int,
        tp: Any,
        parallel: Parallel,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.active = True
        self.scale, self._groups, self._tp, self._sp = scale, groups, tp, parallel.sp
        self._cuts_input = slots[0].tp_dim == 1
        self._parts = [slot.lies or "all" for slot in slots]
        for slot, part in zip(slots, self._parts, strict=True):
            rows, columns = slot.part_shape(parallel.tp)
            self._register(f"{part}_A", like.new_empty(rank, columns), is_cut=self._cuts_input)
            self._register(f"{part}_B", like.new_empty(rows, rank), is_cut=not self._cuts_input)

    def forward(self, x_LE: Tensor) -> Tensor | None:
        """[L, 1, O]: what is added to the layer's outputs; None while adapters are left out."""
        if not self.active:
            return None
        return self._from_cut_inputs(x_LE) if self._cuts_input else self._from_whole_inputs(x_LE)

    def _from_cut_inputs(self, x_LE: Tensor) -> Tensor:
        """Each rank has some of the features, and all of the outputs."""
        [down_RE], [up_OR] = self._sides("A"), self._sides("B")
        low: Tensor = x_LE @ down_RE.T * self.scale
        if self._sp:  # each rank continues with some of the tokens, so the gradient of B is a part of the whole
            low = reduce_scatter_to_sequence_parallel_region(low, group=self._tp)
            up_OR = copy_to_tensor_model_parallel_region(up_OR, group=self._tp)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self._tp)
        return low @ up_OR.T

    def _from_whole_inputs(self, x_LE: Tensor) -> Tensor:
        """Each rank has all features, of some of the tokens or of all, and makes some of the outputs."""
        downs, ups = self._sides("A"), self._sides("B")
        down_RE = torch.cat(downs)
        if self._sp:  # the gradient of A is a part of the whole; R numbers a token travel, not E
            down_RE = copy_to_tensor_model_parallel_region(down_RE, group=self._tp)
            low = gather_from_sequence_parallel_region(x_LE @ down_RE.T, group=self._tp)
        else:
            low = copy_to_tensor_model_parallel_region(x_LE @ down_RE.T, group=self._tp)
        pairs = zip(low.chunk(len(downs), -1), ups, strict=True)
        return self._interleave([part @ up_OR.T * self.scale for part, up_OR in pairs], -1)

    @torch.no_grad()
    def merged(self, weight_OE: Tensor) -> Tensor:
        """Return the layer's weight with the update, a new tensor, computed in float32."""
        pairs = zip(self._sides("B"), self._sides("A"), strict=True)
        updates = [up.float() @ down.float() * self.scale for up, down in pairs]
        return weight_OE.float() + self._interleave(updates, 0)

    def _sides(self, side: str) -> list[Tensor]:
        return [getattr(self, f"{part}_{side}") for part in self._parts]

    def _interleave(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Lay parts out as the layer does: group by group, in each the parts one after the other."""
        if len(parts) == 1:
            return parts[0]
        grouped: list[Tensor] = [Tensor.unflatten(part, dim, (self._groups, -1)) for part in parts]  # type: ignore[no-untyped-call]
        return torch.cat(grouped, dim if dim < 0 else dim + 1).flatten(*((-2, -1) if dim < 0 else (dim, dim + 1)))

    def _register(self, name: str, values: Tensor, *, is_cut: bool) -> None:
        parameter: Any = nn.Parameter(values)
        parameter.tensor_model_parallel = is_cut  # else the gradient norm counts it on the first rank alone
        self.register_parameter(name, parameter)


class Adapters:
    """All adapters of a model on one rank, under Hugging Face names with `.lora_A` and `.lora_B`.

    Everything else in the model's parts is frozen; `slots` are those of its weights.
    """

    def __init__(self, parts: Sequence[Any], slots: Iterable[Slot], plan: Plan, mesh: Mesh) -> None:
        rank, shape, parallel = plan.config.lora_rank, plan.shape, plan.parallel
        self.rank, self.alpha = rank, plan.config.lora_alpha or 2.0 * rank
        self._by_weight: dict[int, Adapter] = {}
        adapted = list_adapted(slots)
        layers: dict[ParameterPath, list[Slot]] = {}
        for weight in adapted:
            layers.setdefault(weight.place, []).append(weight)
        for part in parts:
            part.requires_grad_(requires_grad=False)
            if part.pre_process:  # recomputing needs a gradient to begin with
                part.embedding.register_forward_hook(_begin_gradient)
        for place, found in layers.items():
            if place.stage == mesh.coordinates["pp"]:
                layer = parts[place.part].get_submodule(place.path.removesuffix(WEIGHT))
                layer.adapter = Adapter(
                    found,
                    rank=rank,
                    scale=self.alpha / rank,
                    groups=shape.num_groups // parallel.tp if found[0].lies == "q" else 1,
                    tp=mesh.group("tp").process_group,
                    parallel=parallel,
                    like=layer.weight,
                )
                layer.register_forward_hook(_add_update)
                self._by_weight[id(layer.weight)] = layer.adapter
        sides = [side for weight in adapted for side in list_adapter_slots(weight, rank)]
        self.held = HeldWeights(parts, sides, shape, mesh)

    def initialise(self, seed: int, put: Put) -> None:
        """Draw A and let B be 0, so that training starts at the base model: the values that one process would draw."""
        self.held.fill(initial_adapters(((slot.name, slot.shape) for slot in self.held.slots), seed), put)

    def merged(self, parameter: Tensor) -> Tensor:
        """Return a parameter of the model with its update, as it is exported; as it is where it has none."""
        adapter = self._by_weight.get(id(parameter))
        return parameter.detach() if adapter is None else adapter.merged(parameter.detach())

    def left_out(self) -> AbstractContextManager[None]:
        """Run the base model."""
        return without_lora(self._by_weight.values())

    def stream(
        self, values: Values = Tensor.detach, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, whole tensor) on every rank, which all iterate to the end; see `HeldWeights.gather`."""
        for name, tensor in self.held.gather(values, dtype):
            yield peft_name(name), tensor

    def write_config(self, folder: Path, base_model: str) -> None:
        """Write PEFT's adapter_config.json into the adapters' folder."""
        layers = {slot.name.rpartition(".")[0] for slot in self.held.slots}
        write_adapter_config(folder, layers, rank=self.rank, alpha=self.alpha, base_model=base_model)


def _begin_gradient(embedding: nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _add_update(layer: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    update = layer.adapter(inputs[0])
    return output if update is None else (output[0] + update, *output[1:])
