"""A model and how it is asked: loaded whole or in parts, checked once, asked for log-probabilities and entropies.

Shapes: T tokens, N loss tokens, V vocabulary (of this rank, where it is cut).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import ModelError, TrainEngineConfig, TrainSequence, check_token_ids
from offbeat_device import Device, copy_to_device
from offbeat_engine_torch._compiled import CompiledLayers, choose_compiled
from offbeat_engine_torch._family_check import FamilyCheck
from offbeat_engine_torch._frozen import base_in_bfloat16, hold_in_bfloat16, pack_layers
from offbeat_engine_torch._layers.balance import Routers
from offbeat_engine_torch._layers.context import PackShare
from offbeat_engine_torch._layers.exact import check_exact_model, make_exact
from offbeat_engine_torch._layers.plan import AttentionPlan, to_device
from offbeat_engine_torch._layers.recompute import OffloadedInputs, recompute_layers
from offbeat_engine_torch._layers.recurrence import missing_kernels
from offbeat_engine_torch._layers.vision import ImagePatches
from offbeat_engine_torch._layout import (
    TorchEngineOptions,
    adds_up_in_bfloat16,
    check_context_parallel,
    check_nf4_over_ranks,
    gathers_vocabulary_in_bfloat16,
    head_multiplies_in_bfloat16,
    holds_base_in_bfloat16,
    holds_base_in_nf4,
)
from offbeat_engine_torch._lengths import LengthLimit
from offbeat_engine_torch._model import (
    SCORE_WEIGHT,
    CausalModel,
    HeadQuery,
    load_model,
    outline_model,
)
from offbeat_engine_torch._parallel.ranks import Ranks, ShardedRanks, SingleRank
from offbeat_engine_torch._parallel.sharding import fill_buffers, find_layers, free_gathered, shard_model
from offbeat_engine_torch._pieces import Piece, find_pieces
from offbeat_mesh import Mesh
from offbeat_training import (
    Family,
    ImageInputs,
    MicroBatch,
    NoImages,
    TensorFolder,
    adapter_shapes,
    add_lora,
    initial_adapters,
    lay_out,
    slices,
    whole_box,
)

log = logging.getLogger(__name__)

_INITIAL_SPREAD: Final = 0.02
"""Standard deviation of a new score head, where the model's configuration has no `initializer_range`."""

FORMATS = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Known:
    """Knowledge of a model from ranks that have trained it, for those that are made anew.

    Args:
        fill: gives their values to pieces that updates change.
        limit: as the check of the family has found it, so that it is not made again.
    """

    fill: Callable[[Sequence[Piece]], None]
    limit: LengthLimit | None


class Policy:
    """One set of weights on one device, or this rank's part of it.

    Attributes:
        is_compiled: its decoder layers run compiled.
        routers: its routers' choices.
        limit: the longest sequence that it computes as its family does; None for any length.
    """

    def __init__(
        self,
        model: CausalModel,
        pieces: Sequence[Piece],
        device: Device,
        config: TrainEngineConfig,
        options: TorchEngineOptions,
        routers: Routers,
        limit: LengthLimit | None = None,
        compiled: CompiledLayers | None = None,
    ) -> None:
        self.model, self.pieces, self.routers, self.limit = model, pieces, routers, limit
        self.is_compiled = compiled is not None and compiled.runs
        self._vision = model.vision.inputs(config.model_path) if model.vision else None
        self.images: ImageInputs = self._vision or NoImages()
        self.kernel = attention_kernel(device)
        self._device, self._options = device.torch_device, options
        self._head_is_coarse = head_multiplies_in_bfloat16(config, options, device)
        self._autocast = FORMATS[config.dtype]

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        return self.model.vocabulary_size

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Refuse sequences that this model would get wrong: unknown tokens, too many of them, images amiss.

        Raises:
            ModelError: with what was found.
        """
        check_token_ids(sequences, self.vocabulary_size)
        if self.limit:
            self.limit.check(sequences)
        self.images.check(sequences)
        self.model.routing.check(sequences, type(self.model.whole).__name__)

    def weights_converted_once(self) -> AbstractContextManager[Any]:
        """Convert each weight once for all packs while it is open; weights must not be updated meanwhile.

        Autocast forgets what it has converted when the outermost of its contexts ends, and this is one around those
        of all packs, though it changes no format itself.
        """
        return torch.autocast(self._device.type, enabled=False) if self._autocast else nullcontext()

    def ask(self, pack: MicroBatch, *, through_tower: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities [N] and entropies [N] of a pack's loss tokens.

        Of a pack with routes, [N] also the share of layers in which the token that predicts would take other experts
        than the engine that sampled; below 0 where that is not known.

        With `through_tower` the vision tower runs though the pack has no image, because another rank's has one.
        """
        query = HeadQuery(
            predictor_N=pack.predictor_N,
            target_N=pack.target_N,
            temperature=self._options.temperature,
            coarse=self._head_is_coarse,
            entropy_gradient=self._options.entropy_gradient,
            fused=self.is_compiled,
        )
        ids, positions = self.tensor(pack.ids_T), self.tensor(pack.positions_T)
        vision = self.model.vision
        plan = AttentionPlan(
            pack.segments,
            self._device,
            blocks=pack.spans if vision and vision.sees_both_ways else (),
            in_windows_alone=vision is not None and vision.in_windows_alone,
        )
        patches = self._patches(pack) if pack.images or through_tower else None
        routes = None if pack.routes_TLK is None else self.tensor(pack.routes_TLK).permute(1, 2, 0)
        logprobs_N, entropy_N, *differing_N = self.model(
            ids,
            positions,
            plan,
            self.kernel,
            query,
            self._autocast,
            patches,
            routes,
            replays=self._options.replay_routes,
        )
        return logprobs_N, entropy_N, next(iter(differing_N), None)

    def _patches(self, pack: MicroBatch) -> ImagePatches:
        assert self._vision is not None, "a model without a vision tower was asked to look"
        return ImagePatches(
            pixels=tuple(copy_to_device(each, self._device) for each in self._vision.pixels(pack.images)),
            place_M=pack.place_M,
        )

    def lay_out(self, sequences: Sequence[TrainSequence], families: Sequence[Family]) -> MicroBatch:
        """Lay out one micro-batch for this model."""
        return lay_out(sequences, families, self.images)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Put an array onto the device."""
        return to_device(array, self._device)


def make_policy(
    config: TrainEngineConfig,
    options: TorchEngineOptions,
    device: Device,
    ranks: Ranks,
    mesh: Mesh | None,
    known: Known | None = None,
) -> Policy:
    """Load the model of `config`, or this rank's part of it, with new adapters where `lora_rank` asks for them.

    All ranks know the model, or none does.
    """
    with ranks.together("load model"):
        if mesh is None:
            model, pieces = _load_whole(config, options, device)
        else:
            model, pieces = _load_parts(config, options, device, mesh, ranks, known)
        device.adapt(model.whole)
        routers = Routers(
            model.whole,
            model.context.ranks if model.context else None,
            loss_weight=options.router_aux_loss,
            bias_rate=options.router_bias_rate,
        )
        if options.is_exact:
            model.exact = FORMATS[config.dtype] or torch.float32
            check_exact_model(model.whole.config)
            make_exact(model.whole, find_layers(model), model.decoder.norm, model.exact)
        folder, kernel = Path(config.model_path).expanduser(), attention_kernel(device)
        compiled = choose_compiled(model, config, options, device, kernel, ranks)
        if config.activation_checkpointing:
            recompute_layers(model.whole, OffloadedInputs(device) if options.offload_activations else None)
        elif options.offload_activations and ranks.leader:
            log.warning("option offload_activations does nothing where activation_checkpointing is false")
        is_rounded = (mesh is not None and mesh.group("dp", "cp").size > 1) or holds_base_in_bfloat16(config, options)
        read_in = FORMATS[config.dtype] if is_rounded or options.is_exact else None
        if known and not model.routing.has_routers:  # these show in the check how they choose
            limit = known.limit
        else:
            with model.routing.watch():
                limit = FamilyCheck(model=model, folder=folder, kernel=kernel, autocast=read_in).run()
        if compiled:
            check = FamilyCheck(model=model, folder=folder, kernel=kernel, autocast=FORMATS[config.dtype])
            compiled.start(check, ranks, required=options.compile_layers == "on")
        free_gathered(model)
    if limit and ranks.leader and not known:
        log.warning("%s: sequences of more than %d tokens will be refused: %s", folder, limit.num_tokens, limit.reason)
    if ranks.leader and not known and (missing := missing_kernels(model.whole, config.dtype)):
        log.warning(
            "%s: torch computes the gated delta rule, which is slower than kernels: install %s", folder, missing
        )
    return Policy(model, pieces, device, config, options, routers, limit, compiled)


def attention_kernel(device: Device) -> str:
    """Return the kernel of packed attention that suits a device."""
    kernel: str = getattr(device, "packed_attention", "rows")
    return kernel


def _load_whole(
    config: TrainEngineConfig, options: TorchEngineOptions, device: Device
) -> tuple[CausalModel, list[Piece]]:
    rounded: set[str] = set()
    if holds_base_in_bfloat16(config, options):
        if holds_base_in_nf4(options):
            return _load_packed(config, options, device)
        rounded = _rounded_names(_outline(config), config, options, device)
    model = load_model(
        config.model_path,
        device=device.torch_device,
        trust_remote_code=config.trust_remote_code,
        scores=config.head == "score",
        in_bfloat16=rounded,
    )
    hold_in_bfloat16(model, rounded)
    _choose_trained(model, config, options)
    pieces = find_pieces(model)
    _copy(_new_weights(model, config), pieces)
    return model, pieces


def _load_packed(
    config: TrainEngineConfig, options: TorchEngineOptions, device: Device
) -> tuple[CausalModel, list[Piece]]:
    """Pack one tensor of the files after the other: the device never holds the model in another format."""
    model = _outline_frozen(config, options, device)
    _choose_trained(model, config, options)
    model.to_empty(device=device.torch_device)
    model.whole.tie_weights()
    fill_buffers(model.whole)
    pieces = find_pieces(model)
    _fill(model, pieces, config, SingleRank())
    return model, pieces


def _outline_frozen(config: TrainEngineConfig, options: TorchEngineOptions, device: Device) -> CausalModel:
    """Build the model without memory for its weights, in the formats in which they will be held."""
    model = _outline(config)
    if holds_base_in_bfloat16(config, options):
        hold_in_bfloat16(model, _rounded_names(model, config, options, device))
        if holds_base_in_nf4(options):
            pack_layers(model)
    return model


def _load_parts(
    config: TrainEngineConfig,
    options: TorchEngineOptions,
    device: Device,
    mesh: Mesh,
    ranks: Ranks,
    known: Known | None,
) -> tuple[CausalModel, list[Piece]]:
    """Cut the model over the mesh; each rank only ever holds its own part and one layer."""
    assert isinstance(ranks, ShardedRanks)
    replicas = ranks.replicas
    check_nf4_over_ranks(options, mesh.group("dp", "cp").size)
    model = _outline_frozen(config, options, device)
    _choose_trained(model, config, options)
    shard_model(
        model,
        replicas,
        device.torch_device,
        FORMATS[config.dtype] if mesh.group("dp", "cp").size > 1 else None,
        rounds_vocabulary=gathers_vocabulary_in_bfloat16(config, options, device),
        reduced=torch.bfloat16 if adds_up_in_bfloat16(config, options) else torch.float32,
    )
    rows, tp = replicas.group("dp", "cp"), replicas.group("tp")
    edp, ep = mesh.group("edp"), mesh.group("ep")
    pieces = find_pieces(
        model,
        places=((rows.rank, rows.size), (tp.rank, tp.size)),
        of_stacks=((edp.rank, edp.size), (ep.rank, ep.size)),
        is_first=replicas.coordinates["pp"] == 0,
    )
    if mesh.axes["cp"] > 1:
        check_context_parallel(model.whole.config, mesh.axes["cp"])
        model.context = PackShare.of(mesh, num_heads=model.num_heads // tp.size)
    if known is None or not all(piece.changes for piece in pieces):
        _fill(model, pieces, config, ranks)
    if known:
        known.fill(pieces)
    return model, pieces


def _fill(model: CausalModel, pieces: list[Piece], config: TrainEngineConfig, ranks: Ranks) -> None:
    """Give pieces their first values."""
    new = _new_weights(model, config)
    _copy(new, pieces)
    left = [piece for piece in pieces if piece.name not in new]
    read_weights(Path(config.model_path).expanduser(), left, config, ranks)


def _outline(config: TrainEngineConfig) -> CausalModel:
    return outline_model(config.model_path, trust_remote_code=config.trust_remote_code, scores=config.head == "score")


def _rounded_names(
    outline: CausalModel, config: TrainEngineConfig, options: TorchEngineOptions, device: Device
) -> set[str]:
    """Return the names of the parameters that a frozen base holds in bfloat16; ModelError where there are none."""
    names = base_in_bfloat16(outline, rounds_vocabulary=gathers_vocabulary_in_bfloat16(config, options, device))
    if not names and options.lora_base_dtype != "auto":
        raise ModelError(
            f"{config.model_path}: {type(outline.whole).__name__} names no decoder layers, which lora_base_dtype = "
            f'"{options.lora_base_dtype}" needs; leave the option "auto"'
        )
    return names


def _new_weights(model: CausalModel, config: TrainEngineConfig) -> dict[str, Tensor]:
    """Return what the model folder lacks, whole and alike on all ranks: adapters, and a score head on a base model."""
    new = dict(initial_adapters(adapter_shapes(model.whole), config.seed))
    if model.scores:
        with TensorFolder(Path(config.model_path).expanduser()) as reader:
            has_score = SCORE_WEIGHT in reader.names
        if not has_score:
            spread = float(getattr(model.whole.config, "initializer_range", None) or _INITIAL_SPREAD)
            shape = (1, model.head.in_features)
            new[SCORE_WEIGHT] = spread * torch.randn(shape, generator=torch.Generator().manual_seed(config.seed))
    return new


@torch.no_grad()
def read_weights(folder: Path, pieces: Iterable[Piece], config: TrainEngineConfig, ranks: Ranks) -> None:
    """Fill pieces from a model folder, each rank its own boxes.

    A folder whose tensors have other names than the model's parameters is read by transformers, which knows how to
    convert it: by the leader alone, for that is a second copy of the model. Weights of single experts are read as rows
    of their stacks.

    Raises:
        ModelError: the folder is broken, or its weights are those of another model.
    """
    wanted = {piece.name: piece for piece in pieces}
    with TensorFolder(folder) as reader:
        reader.stack_experts()
        is_plain = set(wanted) <= reader.names and all(reader.shape(name) == wanted[name].shape for name in wanted)
        if all(ranks.exchange(is_plain)):
            for name, piece in wanted.items():
                if piece.packed:
                    piece.fill(reader.read(name, whole_box(piece.shape)))
                else:
                    piece.local.copy_(reader.read(name, piece.box))
            return
    found, problem = _convert(folder, wanted, config) if ranks.leader else ({}, "")
    if problem := ranks.exchange(problem)[0]:
        raise ModelError(problem)
    for name, piece in wanted.items():
        ranks.share_out(found.pop(name, None), piece)


def _convert(folder: Path, wanted: Mapping[str, Piece], config: TrainEngineConfig) -> tuple[dict[str, Tensor], str]:
    """Whole tensors by name, as transformers reads them; or what is wrong with them."""
    try:
        model = load_model(
            str(folder),
            device=torch.device("cpu"),
            trust_remote_code=config.trust_remote_code,
            scores=config.head == "score",
            in_bfloat16={name for name, piece in wanted.items() if piece.dtype == torch.bfloat16},
        )
    except ModelError as error:
        return {}, str(error)
    found = {piece.name: piece.local for piece in find_pieces(model) if piece.name in wanted or not model.scores}
    wrong = sorted(set(found) ^ set(wanted)) or [n for n, p in wanted.items() if tuple(found[n].shape) != p.shape]
    problem = f"{folder} is a checkpoint of another model: they differ first at {wrong[0]}" if wrong else ""
    return found, problem


def _choose_trained(model: CausalModel, config: TrainEngineConfig, options: TorchEngineOptions) -> None:
    """Freeze what is not to be trained, and put adapters where they are wanted."""
    tower = model.vision.tower if model.vision and options.train_vision else []
    for module in [] if model.vision is None else [*model.vision.unused, *(() if tower else model.vision.tower)]:
        module.requires_grad_(requires_grad=False)
    if config.lora_rank:
        model.whole.requires_grad_(False)
        for module in (model.decoder, *tower):
            add_lora(module, rank=config.lora_rank, alpha=config.lora_alpha or 2.0 * config.lora_rank)
    if model.scores:
        model.head.requires_grad_(True)  # it may be new: adapters alone would train a backbone for a random head


@torch.no_grad()
def _copy(whole: Mapping[str, Tensor], pieces: list[Piece]) -> None:
    """Copy each piece's box out of whole tensors; pieces without one stay."""
    for piece in pieces:
        if piece.name in whole:
            piece.local.copy_(whole[piece.name][slices(piece.box)])
