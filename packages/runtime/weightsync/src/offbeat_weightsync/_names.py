"""Places of the trainer's tensors within the engine's: fused and interleaved matrices, expert stacks, tied tables; and
which of them are a LoRA adapter's.

Pure. The trainer knows a tensor by its Hugging Face name; an engine may hold several in one tensor of its own. The map
gives, for each of the trainer's names, a view of the engine's memory, so that a stream loads into place without a copy
between, and so that what is proved is read back from where it is used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from offbeat_core import TensorSpec, WeightSyncError
from offbeat_weightsync._tensors import torch_dtype

EXPERT: Final = "{expert}"


@dataclass(frozen=True)
class Fusion:
    """Several of the trainer's matrices are rows of one of the engine's.

    Args:
        engine: part of the engine's name, such as "qkv_proj", in the place of the parts'.
        parts: of the trainer's names, in the order of the engine's rows. A component "{expert}" stands for a number:
            those tensors are then stacked along a new first dim, one for each expert.
        num_groups: above 1, each part's rows are cut into so many groups, and the engine has the first group of each
            part, then the second of each: Megatron's linear_qkv, with one group for each key-value head.

    Source: vllm/model_executor/models/llama.py (qkv_proj, gate_up_proj) and fused_moe (w13_weight, w2_weight);
    megatron/core/transformer/attention.py (linear_qkv).
    """

    engine: str
    parts: tuple[str, ...]
    num_groups: int = 1


QKV: Final = Fusion("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
GATE_UP: Final = Fusion("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
EXPERTS: Final = (
    Fusion("experts.w13_weight", ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight")),
    Fusion("experts.w2_weight", ("experts.{expert}.down_proj.weight",)),
)


class TensorSlice(NamedTuple):
    """Place of one of the trainer's tensors: rows of a view of the engine's tensor.

    Args:
        name: the engine's.
        view: shape to see it in: (experts, groups, rows of a group, ...); () for the whole tensor as it is.
        expert: index along the first dim of the view.
        first_row: within each group.
        num_rows: of each group.
    """

    name: str
    view: tuple[int, ...] = ()
    expert: int = 0
    first_row: int = 0
    num_rows: int = 0

    def within(self, tensor: Tensor) -> Tensor:
        """Return the elements, as a view of the engine's tensor, in the order of the trainer's."""
        if not self.view:
            return tensor
        return tensor.view(self.view)[self.expert, :, self.first_row : self.first_row + self.num_rows]


@dataclass(frozen=True)
class NameMap:
    """The engine's names for the trainer's tensors. Make one with `build`.

    Args:
        specs: the trainer's tensors.
        engine_specs: the engine's.
        slices: trainer's name -> where it lies.
    """

    specs: tuple[TensorSpec, ...]
    engine_specs: tuple[TensorSpec, ...]
    slices: Mapping[str, TensorSlice]

    @classmethod
    def build(
        cls,
        specs: Iterable[TensorSpec],
        fusions: Iterable[Fusion] = (),
        *,
        renamed: Mapping[str, str] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> "NameMap":
        """Find where each tensor lies.

        Args:
            specs: the trainer's tensors, in its order.
            fusions: each name belongs to at most one.
            renamed: start of a name at the trainer -> at the engine, such as {"model.": "language_model.model."}.
            tied: trainer's name -> trainer's name of the tensor whose memory the engine uses for it too.

        Raises:
            WeightSyncError: a part or an expert is missing, or parts of one matrix do not fit together.
        """
        specs, fusions, tied = tuple(specs), tuple(fusions), tied or {}
        parts: dict[str, dict[tuple[int, int], TensorSpec]] = {}
        found: dict[str, tuple[str, Fusion]] = {}
        plain: dict[str, TensorSlice] = {}
        for spec in specs:
            if spec.name in tied:
                continue
            match = next(filter(None, (_match(spec.name, fusion) for fusion in fusions)), None)
            if match is None:
                plain[spec.name] = TensorSlice(_rename(spec.name, renamed))
            else:
                engine, fusion, part, expert = match
                parts.setdefault(engine, {})[part, expert] = spec
                found[spec.name] = engine, fusion
        slices, engine_specs = dict(plain), {}
        for spec in specs:
            if spec.name in plain:
                engine_specs[spec.name] = TensorSpec(plain[spec.name].name, spec.dtype, spec.shape)
            elif spec.name in found:
                engine, fusion = found[spec.name]
                engine_specs[engine], theirs = _fuse(_rename(engine, renamed), fusion, parts[engine])
                slices |= theirs
        slices |= {name: _tied_slice(name, other, specs, slices) for name, other in tied.items()}
        slices = {spec.name: slices[spec.name] for spec in specs}
        return cls(specs, tuple(engine_specs.values()), slices)

    def target(self, engine: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Return what to give to `stream.load`: trainer's name -> view of the engine's memory.

        Args:
            engine: engine's name -> its tensor, contiguous.
        """
        return lambda name: self.slices[name].within(engine(self.slices[name].name))

    def read(self, engine: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Return what to give to `stream.prove`: trainer's name -> what the engine holds, in the trainer's shape."""
        shapes = {spec.name: spec.shape for spec in self.specs}
        target = self.target(engine)
        return lambda name: target(name).reshape(shapes[name])

    def fuse(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the engine's tensors, made of the trainer's.

        Raises:
            WeightSyncError: tied tensors differ.
        """
        fused = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in self.engine_specs}
        target, written = self.target(fused.__getitem__), set[TensorSlice]()
        for name, tensor in tensors:
            view = target(name)
            source = tensor.detach().to(view).reshape(view.shape)  # a trainer's may be on its device
            if self.slices[name] in written and not torch.equal(view, source):
                raise WeightSyncError(f"{name} is tied to {self.slices[name].name}, but their values differ")
            view.copy_(source)
            written.add(self.slices[name])
        return fused

    def split(self, engine: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The trainer's tensors, read from the engine's: what `fuse` undoes."""
        read = self.read(engine)
        return ((spec.name, read(spec.name)) for spec in self.specs)


def _match(name: str, fusion: Fusion) -> tuple[str, Fusion, int, int] | None:
    words = name.split(".")
    for part, text in enumerate(fusion.parts):
        pattern = text.split(".")
        for start in range(len(words) - len(pattern) + 1):
            found = words[start : start + len(pattern)]
            if all(
                word == want or (want == EXPERT and word.isdecimal()) for word, want in zip(found, pattern, strict=True)
            ):
                expert = int(found[pattern.index(EXPERT)]) if EXPERT in pattern else 0
                engine = ".".join([*words[:start], fusion.engine, *words[start + len(pattern) :]])
                return engine, fusion, part, expert
    return None


def _fuse(
    engine: str, fusion: Fusion, parts: dict[tuple[int, int], TensorSpec]
) -> tuple[TensorSpec, dict[str, TensorSlice]]:
    num_experts, num_parts, groups = 1 + max(expert for _, expert in parts), len(fusion.parts), fusion.num_groups
    missing = [
        (part, expert) for expert in range(num_experts) for part in range(num_parts) if (part, expert) not in parts
    ]
    if missing:
        lacking = fusion.parts[missing[0][0]].replace(EXPERT, str(missing[0][1]))
        raise WeightSyncError(f"{engine} needs {lacking}, which the trainer does not have")
    first = parts[0, 0]
    rows = [parts[part, 0].shape[0] // groups for part in range(num_parts)]
    for (part, _), spec in parts.items():
        if spec.dtype != first.dtype or spec.shape != (rows[part] * groups, *first.shape[1:]):
            raise WeightSyncError(
                f"{engine}: {spec.name} is {spec.dtype} {spec.shape}, which does not fit {first.name}, {first.dtype} "
                f"{first.shape}, in {groups} group(s)"
            )
    view = (num_experts, groups, sum(rows), *first.shape[1:])
    slices = {
        spec.name: TensorSlice(engine, view, expert, sum(rows[:part]), rows[part])
        for (part, expert), spec in parts.items()
    }
    stacked = (num_experts,) if EXPERT in fusion.parts[0] else ()
    return TensorSpec(engine, first.dtype, (*stacked, groups * sum(rows), *first.shape[1:])), slices


def _rename(name: str, renamed: Mapping[str, str] | None) -> str:
    for old, new in (renamed or {}).items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _tied_slice(name: str, other: str, specs: tuple[TensorSpec, ...], slices: Mapping[str, TensorSlice]) -> TensorSlice:
    of = {spec.name: spec for spec in specs}
    if other not in slices:
        raise WeightSyncError(f"{name} is tied to {other}, which the trainer does not have")
    if name in of and (of[name].shape, of[name].dtype) != (of[other].shape, of[other].dtype):
        one, another = (f"{of[each].dtype} {of[each].shape}" for each in (name, other))
        raise WeightSyncError(f"{name} is tied to {other}, but {one} is not {another}")
    return slices[other]


DOWN: Final = ".lora_A."
UP: Final = ".lora_B."
PEFT_PREFIX: Final = "base_model.model."
"""Names are those of Hugging Face PEFT, "….q_proj.lora_A.weight" [rank, in] and "….q_proj.lora_B.weight" [out, rank].

Source: https://github.com/huggingface/peft, peft/tuners/lora/layer.py; W + (alpha / rank) B A, arXiv:2106.09685.
"""


def select_adapter(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the adapter's tensors among the trainer's, in order: what to plan and send.

    Raises:
        WeightSyncError: there is none, or one lacks its partner or does not fit it.
    """
    found = [(name, tensor) for name, tensor in tensors if DOWN in name or UP in name]
    if not found:
        raise WeightSyncError("a LoRA-only sync needs tensors named lora_A and lora_B: the trainer has none")
    by_name = dict(found)
    for name, tensor in found:
        other = name.replace(DOWN, UP) if DOWN in name else name.replace(UP, DOWN)
        if other not in by_name:
            raise WeightSyncError(f"{name} needs {other}, which the trainer does not have")
        down, up = (tensor, by_name[other]) if DOWN in name else (by_name[other], tensor)
        if down.shape[0] != up.shape[1]:
            raise WeightSyncError(f"{name}: rank {down.shape[0]} of lora_A is not rank {up.shape[1]} of lora_B")
    return found


def merge_adapter(
    base: Callable[[str], Tensor], adapter: Iterable[tuple[str, Tensor]], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """The merged weights of the layers that an adapter changes, for an engine that cannot hold adapters.

    Always from the base weights, never from the last merge: rounding would add up.

    Args:
        base: name -> [out, in], the weight without the adapter.
        adapter: as `select_adapter` gives it.
        scale: alpha / rank.

    Yields:
        (name, base + scale B A), in the base's dtype, computed in float32.
    """
    by_name = dict(adapter)
    for name, down in by_name.items():
        if DOWN in name:
            target = name.replace(DOWN, ".").removeprefix(PEFT_PREFIX)
            weight = base(target)
            merged = weight.float() + scale * (by_name[name.replace(DOWN, UP)].float() @ down.float())
            yield target, merged.to(weight.dtype)
