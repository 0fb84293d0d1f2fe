"""Makes the model of an engine: plain in one process, or cut over the mesh with each rank reading its own part."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from offbeat_engine_torch._load_checks import check_family
from offbeat_engine_torch._model import CausalModel, load_model, outline_model
from offbeat_engine_torch._options import TorchEngineOptions
from offbeat_engine_torch._pieces import Piece, find_pieces
from offbeat_engine_torch._policy import FORMATS, Policy
from offbeat_engine_torch._ranks import Ranks
from offbeat_engine_torch._sharding import free_gathered, shard_model
from offbeat_mesh import Device, Mesh
from offbeat_training import TensorFolder, adapter_shapes, add_lora, initial_adapters, slices
from offbeat_types import ModelError, TrainEngineConfig


def make_policy(
    config: TrainEngineConfig, options: TorchEngineOptions, device: Device, ranks: Ranks, mesh: Mesh | None
) -> Policy:
    """Load the model of `config`, with new adapters where `lora_rank` asks for them.

    Args:
        config: names the folder.
        options: how the policy is asked.
        device: of this rank.
        ranks: who shares it.
        mesh: to cut it over; None for the whole of it.
    """
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
    model = load_model(config.model_path, device=device, trust_remote_code=config.trust_remote_code)
    check_family(model, Path(config.model_path).expanduser())
    _choose_trained(model, config, options)
    pieces = find_pieces(model)
    _copy(dict(initial_adapters(adapter_shapes(model.whole), config.seed)), pieces)
    return model, pieces


def _load_parts(
    config: TrainEngineConfig, options: TorchEngineOptions, device: torch.device, mesh: Mesh, ranks: Ranks
) -> tuple[CausalModel, list[Piece]]:
    """Cut the model over the mesh; each rank only ever holds its own part and one layer."""
    model = outline_model(config.model_path, trust_remote_code=config.trust_remote_code)
    _choose_trained(model, config, options)
    autocast = FORMATS[config.dtype] if mesh.axes["dp"] > 1 else None
    shard_model(model, mesh, device, autocast)
    dp, tp = mesh.group("dp"), mesh.group("tp")
    pieces = find_pieces(model, dp=(dp.rank, dp.size), tp=(tp.rank, tp.size))
    folder = Path(config.model_path).expanduser()
    with torch.no_grad():
        _copy(dict(initial_adapters(adapter_shapes(model.whole), config.seed)), pieces)
        read_weights(folder, [piece for piece in pieces if not _is_adapter(piece)], config, ranks)
        check_family(model, folder, autocast)
    free_gathered(model)
    return model, pieces


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
        model = load_model(str(folder), device=torch.device("cpu"), trust_remote_code=config.trust_remote_code)
    except ModelError as error:
        return {}, str(error)
    found = {piece.name: piece.local for piece in find_pieces(model)}
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


def _is_adapter(piece: Piece) -> bool:
    return piece.name.endswith((".lora_A", ".lora_B"))


@torch.no_grad()
def _copy(whole: Mapping[str, Tensor], pieces: list[Piece]) -> None:
    """Copy each piece's box out of whole tensors; pieces without one stay."""
    for piece in pieces:
        if piece.name in whole:
            piece.local.copy_(whole[piece.name][slices(piece.box)])
