"""A model and how it is asked: loaded whole or in parts, checked once, asked for log-probabilities and entropies.

Shapes: T tokens, N loss tokens, V vocabulary (of this rank, where it is cut).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_engine_torch._attention import AttentionPlan
from offbeat_engine_torch._layout import TorchEngineOptions
from offbeat_engine_torch._model import (
    SCORE_WEIGHT,
    CausalModel,
    HeadQuery,
    ImagePatches,
    load_model,
    one_line,
    outline_model,
)
from offbeat_engine_torch._pieces import Piece, find_pieces
from offbeat_engine_torch._ranks import Ranks
from offbeat_engine_torch._sharding import free_gathered, shard_model
from offbeat_mesh import Device, Mesh
from offbeat_training import (
    Family,
    ImageProcessor,
    MicroBatch,
    NoImages,
    Segment,
    TensorFolder,
    adapter_shapes,
    add_lora,
    initial_adapters,
    lay_out,
    logprobs_of_logits,
    slices,
)
from offbeat_types import ModelError, OffbeatError, TrainEngineConfig, TrainSequence

_INSTALL: Final = 'pip install "offbeat-engine-torch[vision]"'

_INITIAL_SPREAD: Final = 0.02
"""Standard deviation of a new score head, where the model's configuration has no `initializer_range`."""

FORMATS = {"float32": None, "bfloat16": torch.bfloat16}


class Policy:
    """One set of weights on one device, or this rank's part of it."""

    def __init__(
        self,
        model: CausalModel,
        pieces: Sequence[Piece],
        device: Device,
        config: TrainEngineConfig,
        options: TorchEngineOptions,
    ) -> None:
        self.model, self.pieces = model, pieces
        backbone: Any = model.backbone
        self.images = (
            NoImages()
            if model.tower is None
            else ImageProcessor(backbone.config, config.model_path, backbone.get_rope_index, _INSTALL)
        )
        self.kernel: str = getattr(device, "packed_attention", "rows")
        self._device, self._options = device.torch_device, options
        self._autocast = FORMATS[config.dtype]

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        return self.model.vocabulary_size

    def weights_converted_once(self) -> AbstractContextManager[Any]:
        """Within it autocast converts each weight once for all packs; weights must not be updated within it.

        Autocast forgets what it has converted when the outermost of its contexts ends, and this is one around those
        of all packs, though it changes no format itself.
        """
        return torch.autocast(self._device.type, enabled=False) if self._autocast else nullcontext()

    def ask(self, pack: MicroBatch, *, through_tower: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] and entropies [N] of a pack's loss tokens.

        With `through_tower` the vision tower runs though the pack has no image, because another rank's has one.
        """
        query = HeadQuery(
            predictor_N=self.tensor(pack.predictor_N),
            target_N=self.tensor(pack.target_N),
            temperature=self._options.temperature,
            coarse=self._options.head_dtype == "bfloat16",
            entropy_gradient=self._options.entropy_gradient,
        )
        ids, positions = self.tensor(pack.ids_T), self.tensor(pack.positions_T)
        plan = AttentionPlan(pack.segments, self._device)
        patches = self._patches(pack) if pack.images or through_tower else None
        answer: tuple[Tensor, Tensor] = self.model(ids, positions, plan, self.kernel, query, self._autocast, patches)
        return answer

    def _patches(self, pack: MicroBatch) -> ImagePatches:
        assert isinstance(self.images, ImageProcessor), "a model without a vision tower was asked to look"
        pixels, grid = self.images.pixels(pack.images)
        return ImagePatches(
            pixels_PC=pixels.to(self._device), grid_I3=grid.to(self._device), place_M=self.tensor(pack.place_M)
        )

    def lay_out(self, sequences: Sequence[TrainSequence], families: Sequence[Family]) -> MicroBatch:
        """Lay out one micro-batch for this model."""
        return lay_out(sequences, families, self.images)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Put an array onto the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def make_policy(
    config: TrainEngineConfig, options: TorchEngineOptions, device: Device, ranks: Ranks, mesh: Mesh | None
) -> Policy:
    """Load the model of `config`, or this rank's part of it, with new adapters where `lora_rank` asks for them."""
    with ranks.together("load model"):
        if mesh is None:
            model, pieces = _load_whole(config, options, device.torch_device)
        else:
            model, pieces = _load_parts(config, options, device.torch_device, mesh, ranks)
        device.adapt(model.whole)
    return Policy(model, pieces, device, config, options)


def _load_whole(
    config: TrainEngineConfig, options: TorchEngineOptions, device: torch.device
) -> tuple[CausalModel, list[Piece]]:
    model = load_model(
        config.model_path, device=device, trust_remote_code=config.trust_remote_code, scores=config.head == "score"
    )
    check_family(model, Path(config.model_path).expanduser())
    _choose_trained(model, config, options)
    pieces = find_pieces(model)
    _copy(_new_weights(model, config), pieces)
    return model, pieces


def _load_parts(
    config: TrainEngineConfig, options: TorchEngineOptions, device: torch.device, mesh: Mesh, ranks: Ranks
) -> tuple[CausalModel, list[Piece]]:
    """Cut the model over the mesh; each rank only ever holds its own part and one layer."""
    model = outline_model(config.model_path, trust_remote_code=config.trust_remote_code, scores=config.head == "score")
    _choose_trained(model, config, options)
    autocast = FORMATS[config.dtype] if mesh.axes["dp"] > 1 else None
    shard_model(model, mesh, device, autocast)
    dp, tp = mesh.group("dp"), mesh.group("tp")
    pieces = find_pieces(model, dp=(dp.rank, dp.size), tp=(tp.rank, tp.size))
    folder = Path(config.model_path).expanduser()
    with torch.no_grad():
        new = _new_weights(model, config)
        _copy(new, pieces)
        read_weights(folder, [piece for piece in pieces if piece.name not in new], config, ranks)
        check_family(model, folder, autocast)
    free_gathered(model)
    return model, pieces


def _new_weights(model: CausalModel, config: TrainEngineConfig) -> dict[str, Tensor]:
    """What the model folder does not hold, whole and alike on all ranks: adapters, and a score head on a base model."""
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

    A folder whose tensors have other names than the model's parameters, as those of most mixtures of experts, is read
    by transformers, which knows how to convert it: by the leader alone, for that is a second copy of the model.

    Raises:
        ModelError: the folder is broken, or its weights are those of another model.
    """
    wanted = {piece.name: piece for piece in pieces}
    with TensorFolder(folder) as reader:
        is_plain = set(wanted) <= reader.names and all(reader.shape(name) == wanted[name].shape for name in wanted)
        if all(ranks.exchange(is_plain)):
            for name, piece in wanted.items():
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
        )
    except ModelError as error:
        return {}, str(error)
    found = {piece.name: piece.local for piece in find_pieces(model) if piece.name in wanted or not model.scores}
    wrong = sorted(set(found) ^ set(wanted)) or [n for n, p in wanted.items() if tuple(found[n].shape) != p.shape]
    problem = f"{folder} is a checkpoint of another model: they differ first at {wrong[0]}" if wrong else ""
    return found, problem


def _choose_trained(model: CausalModel, config: TrainEngineConfig, options: TorchEngineOptions) -> None:
    """Freeze what is not to be trained, and put adapters where they are wanted."""
    tower = model.tower
    if tower is not None and not options.train_vision:
        tower.requires_grad_(requires_grad=False)
    if config.lora_rank:
        model.whole.requires_grad_(False)
        trained = model.backbone if tower is None or options.train_vision else model.decoder
        add_lora(trained, rank=config.lora_rank, alpha=config.lora_alpha or 2.0 * config.lora_rank)
    if model.scores:
        model.head.requires_grad_(True)  # it may be new: adapters alone would train a backbone for a random head


@torch.no_grad()
def _copy(whole: Mapping[str, Tensor], pieces: list[Piece]) -> None:
    """Copy each piece's box out of whole tensors; pieces without one stay."""
    for piece in pieces:
        if piece.name in whole:
            piece.local.copy_(whole[piece.name][slices(piece.box)])


NUM_TOKENS: Final = 12
TOLERANCE_NATS: Final = {None: 0.01, torch.bfloat16: 0.5}
"""By the format of the layers. Two kernels of attention that sum float32 in different orders are 1e-6 (tiny models) to
1e-3 nats apart (deep ones); a forgotten scale, mask or layer is 0.1 to 20. Bfloat16 rounds logits of 16 to 32 to
multiples of 0.125, so that there only what is far off can be told."""
TOLERANCE_OF_STATES: Final = {None: 1e-2, torch.bfloat16: 5e-2}
"""By the format of the layers, as a share of the largest hidden state: bfloat16 keeps 8 bits, and errors of layers add
up. Sequences that see each other differ by 0.1 to 1."""
TOKENS_WITHIN: Final = 0.75
"""Share of the tokens that must agree: rounding may send a token to another expert, whose log-probability then jumps.
"""


@torch.no_grad()
def check_family(model: CausalModel, folder: Path, autocast: torch.dtype | None = None) -> None:
    """Ask a model in ways that its family answers alike if the engine can train it. All ranks of a mesh take part.

    Args:
        model: as it will be trained.
        folder: named in errors.
        autocast: format of the layers' products, where their weights are gathered in it; None for float32.
    """
    with _as_refusal(model, folder):
        _check_isolation(model, folder, autocast)
        _check_logprobs(model, folder, autocast)


@contextmanager
def _as_refusal(model: CausalModel, folder: Path) -> Iterator[None]:
    """Name the family where its code raises."""
    try:
        yield
    except (OffbeatError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{folder}: {_name(model)} does not run on packed sequences: family not supported "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error


def _check_isolation(model: CausalModel, folder: Path, autocast: torch.dtype | None) -> None:
    """Run two sequences packed and alone."""
    device = model.head.weight.device
    ids = torch.tensor([1, 2, 3, 2, 1], device=device) % model.vocabulary_size
    positions = torch.tensor([0, 1, 2, 2, 0], device=device)
    segments = (Segment(start=0, length=2), Segment(start=2, length=1, parent=0), Segment(start=3, length=1, parent=0))
    together = (*segments, Segment(start=4, length=1))
    share = TOLERANCE_OF_STATES[autocast]
    packed = model(ids, positions, AttentionPlan(together, device), autocast=autocast)
    for real in ([0, 1, 2], [0, 1, 3], [4]):
        index = torch.tensor(real, device=device)
        plan = AttentionPlan((Segment(start=0, length=len(real)),), device)
        alone = model(ids[index], positions[index], plan, autocast=autocast)
        if not torch.allclose(packed[index], alone, rtol=share, atol=share * float(alone.abs().max())):
            raise ModelError(f"{folder}: {_name(model)} gives other results for packed sequences: family not supported")


def _check_logprobs(model: CausalModel, folder: Path, autocast: torch.dtype | None) -> None:
    """Compare one sequence's log-probabilities with the model's own logits, under the model's own attention."""
    device, index_T = model.head.weight.device, torch.arange(NUM_TOKENS)
    ids_T = ((7 * index_T) % 61 + 3).to(device) % model.vocabulary_size
    positions_T = index_T.to(device)
    plan = AttentionPlan((Segment(start=0, length=NUM_TOKENS),), device)
    query = HeadQuery(predictor_N=positions_T[:-1], target_N=ids_T[1:])
    found_N: Tensor = model(ids_T, positions_T, plan, query=query, autocast=autocast)[0]
    with model.own_attention():
        logits_TV: Tensor = model(ids_T, autocast=autocast)
    wanted_N = logits_TV[:-1, 0] if model.scores else logprobs_of_logits(logits_TV[:-1], ids_T[1:], model.part)
    error = float((found_N - wanted_N).abs().quantile(TOKENS_WITHIN))
    if not error <= TOLERANCE_NATS[autocast]:
        raise ModelError(
            f"{folder}: {_name(model)} computes other log-probabilities than this engine does: family not supported "
            f"({error:.2g} nats apart, {TOLERANCE_NATS[autocast]} allowed)"
        )


def _name(model: CausalModel) -> str:
    return type(model.whole).__name__
