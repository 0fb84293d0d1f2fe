"""megatron-core's own way of training, to measure the engine against: its model, its loss, its schedule.

Sequences are padded to the longest and go through GPTModel with labels, a micro-batch of `MICRO_BATCH` rows at a time,
as Megatron-LM's pretrain_gpt.py does it. The weights are random: nothing here depends on them.
Source: Megatron-LM, examples/run_simple_mcore_train_loop.py.

Shapes: B rows of a micro-batch, T tokens of the longest sequence.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from offbeat_engine_megatron._groups import join_groups
from offbeat_engine_megatron._layout import MegatronEngineOptions, Parallel
from offbeat_engine_megatron._megatron import shim_for
from offbeat_engine_megatron._model import transformer_config
from offbeat_engine_megatron._optimizer import ClippedOptimizer, wrap_parts
from offbeat_engine_megatron._shape import read_model
from offbeat_mesh import Mesh
from offbeat_types import TrainEngineConfig, TrainSequence

MICRO_BATCH: Final = 4


class MegatronLoop:
    """Trains one layout of dp, tp and pp.

    Args:
        folder: whose config.json says the model's sizes.
        mesh: of the ranks.
        sequences: of every update.
    """

    def __init__(self, folder: Path, mesh: Mesh, sequences: Sequence[TrainSequence]) -> None:
        self._shim, self._device = shim_for(mesh.device.torch_device), mesh.device.torch_device
        options, config = MegatronEngineOptions(), TrainEngineConfig(model_path=str(folder))
        sizes: dict[str, Any] = {axis: mesh.axes[axis] for axis in ("dp", "tp", "pp")}
        parallel = Parallel(**sizes)
        _, shape = read_model(str(folder))
        with self._shim:
            groups = join_groups(parallel, mesh, mesh.device.kind, config.seed)
            settings = transformer_config(shape, parallel, options, torch.float32)
            settings.variable_seq_lengths = False
            stage, on_cpu = groups.coordinates["pp"], self._device.type == "cpu"
            make_spec = get_gpt_layer_local_spec if on_cpu else get_gpt_layer_with_transformer_engine_spec
            model = GPTModel(
                config=settings,
                transformer_layer_spec=make_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm"),
                vocab_size=shape.vocabulary,
                max_sequence_length=max(len(sequence.ids) for sequence in sequences),
                pre_process=stage == 0,
                post_process=stage == parallel.pp - 1,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="rope",
            )
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
            self._parts = wrap_parts([model], settings, options)
            self._optimizer = ClippedOptimizer(self._parts, config, options)
        own = sequences[groups.coordinates["dp"] :: parallel.dp]
        self._length = 8 * -(-max(len(sequence.ids) for sequence in sequences) // 8)
        self._batches = [self._batch(own[start : start + MICRO_BATCH]) for start in range(0, len(own), MICRO_BATCH)]

    def step(self) -> None:
        """Forward, backward and update."""
        with self._shim:
            get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[iter(self._batches)],
                model=self._parts,
                num_microbatches=len(self._batches),
                seq_length=self._length,
                micro_batch_size=MICRO_BATCH,
                forward_only=False,
            )
            self._optimizer.step(self._optimizer.grad_norm())
            self._optimizer.clear()

    def _batch(self, sequences: Sequence[TrainSequence]) -> dict[str, Tensor]:
        """[B, T] tokens, labels and positions, all of one length, and [1, 1, T, T] what must not be seen."""
        length = self._length
        tokens = torch.zeros(MICRO_BATCH, length + 1, dtype=torch.int64)
        mask = torch.zeros(MICRO_BATCH, length + 1)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence.ids)] = torch.from_numpy(sequence.ids)
            mask[row, : len(sequence.ids)] = torch.from_numpy(sequence.loss_mask)
        made = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": mask[:, 1:],
            "positions": torch.arange(length).repeat(MICRO_BATCH, 1),
            "unseen": torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
        }
        return {name: tensor.contiguous().to(self._device) for name, tensor in made.items()}


def _forward(batches: Any, part: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    answer = part(batch["tokens"], batch["positions"], batch["unseen"], labels=batch["labels"])
    return answer, partial(_report, batch["loss_mask"])


def _report(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (losses * loss_mask).sum() / loss_mask.sum()
    return loss, torch.zeros([], dtype=torch.int), {}
