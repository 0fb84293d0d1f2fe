"""Memory of one device, estimated from the model's sizes: what a trainer rank and a rollout rank hold.

Estimates leave out what cannot be known beforehand: fragmentation, the runtime's own few hundred megabytes, workspaces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat_core import TrainEngineSettings, TrainLayout, read_model_json
from offbeat_placement._model_shape import NUMBER_BYTES, DeltaRule, LatentAttention, ModelShape

_HEAD_BYTES: Final = 512 * 2**20
"""Logits of a chunk in the default engine, whose chunks have 16 tokens at least, on a device with its own memory."""
_HEAD_BYTES_ON_CPU: Final = 64 * 2**20
_KEPT_BYTES: Final = 2 * 2**30
"""Most that the default engine keeps of the logits for the backward pass, on a device with its own memory."""
_KEPT_BYTES_ON_CPU: Final = 256 * 2**20
_CHUNK_TOKENS: Final = 64
"""Tokens of a chunk of the gated delta rule, by default in transformers and in flash-linear-attention."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what they are for.

    Args:
        parts: on its device.
        main: in main memory, where it is not its device: what waits there until the device has use for it.
    """

    parts: Mapping[str, int]
    main: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """All parts on the device together."""
        return sum(self.parts.values())

    @property
    def main_bytes(self) -> int:
        """All that waits in main memory."""
        return sum(self.main.values())


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Memory of a trainer's model, by how it is kept.

    Args:
        weight_bytes: of one weight; below 1, matrices are unpacked to compute with, those of a block at most at a time.
        held_vocabulary_bytes: of one weight of embedding and head, where they are held in another format.
        adapter_bytes: of one weight of an adapter.
        gradient_bytes: of one gradient.
        optimizer_bytes: of the optimizer's state of one weight: 8 for two float32 moments, 12 with a master copy, less
            for moments in other formats.
        vocabulary_optimizer_bytes: of that of embedding and head, where another rule updates them; 0: as any other.
        compute_bytes: of one number in the activations.
        vocabulary_bytes: of one number of embedding and head where ranks gather them, and of its gradient.
        whole_gradient_bytes: of one gradient of all weights that each data parallel rank holds between micro-batches.
        data_parallel: ranks over which the stage below spreads.
        tensor_parallel: ranks that share each matrix.
        whole_parameters: weights of all blocks that each of those ranks holds whole.
        pipeline_parallel: ranks that share the blocks.
        expert_parallel: ranks that share the experts, each whole; 1: experts are shared like everything else.
        zero_stage: what data-parallel ranks share out: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights
            too (FSDP). Source: arXiv:1910.02054, figure 1.
        tokens: of one micro-batch on one rank.
        recomputes: activations are recomputed block by block in the backward pass.
        offloads_optimizer: of the optimizer's state that of two parameters is on the device at a time.
        offloads_inputs: of the inputs of blocks that are recomputed those of two are on the device at a time.
        keeps_reference: a frozen copy of the first policy is held too.
        lora_rank: of adapters on all linear layers of the blocks; 0 trains all weights.
        head_tokens: tokens whose logits exist at the same time; 0: all of the micro-batch.
        kept_bytes: at most, of what is kept of the logits for the backward pass.
        fuses_recurrence: see `TrainLayout.fuses_recurrence`.
        copied_bytes: of copies of the ranks' states, of one weight that is trained, where they lie on the device.
    """

    weight_bytes: float = 4
    held_vocabulary_bytes: int = 0
    adapter_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: float = 8
    vocabulary_optimizer_bytes: float = 0
    whole_gradient_bytes: int = 0
    compute_bytes: int = 4
    vocabulary_bytes: int = 4
    data_parallel: int = 1
    tensor_parallel: int = 1
    whole_parameters: int = 0
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    zero_stage: int = 3
    tokens: int = 8192
    recomputes: bool = False
    offloads_optimizer: bool = False
    offloads_inputs: bool = False
    keeps_reference: bool = False
    lora_rank: int = 0
    head_tokens: int = 0
    kept_bytes: int = 0
    fuses_recurrence: bool = False
    copied_bytes: int = 0

    def estimate(self, shape: ModelShape) -> MemoryEstimate:
        """Bytes of one rank."""
        gathers = self.zero_stage == 3 and self.data_parallel > 1
        weights = self._weights(shape)
        adapters = self._trained(shape, 3) * self.adapter_bytes if self.lora_rank else 0
        parts = {
            "weights": weights + adapters,
            "gradients": self._trained(shape, 2) * self.gradient_bytes,
            "whole gradients": self._trained(shape, 0) * self.whole_gradient_bytes,
            "optimizer": self._optimizer(shape),
            "reference": weights if self.keeps_reference else 0,
            "copies": self._trained(shape, 3) * self.copied_bytes,
            "gathered": self._gathered(shape) / self.tensor_parallel if gathers else 0,
            "exchange": self._exchanged(shape),
            "unpacked": shape.block_parameters * self.compute_bytes if self.weight_bytes < 1 else 0,
            "activations": self._activations(shape),
            "logits": self._logits(shape),
        }
        main = {
            "optimizer": self._optimizer_states(shape) if self.offloads_optimizer else 0,
            "inputs of layers": self._inputs(shape) if self.recomputes and self.offloads_inputs else 0,
        }
        device_parts, main_parts = ({name: int(size) for name, size in each.items() if size} for each in (parts, main))
        return MemoryEstimate(device_parts, main_parts)

    def _gathered(self, shape: ModelShape) -> float:
        """Return what FSDP holds of whole tensors: a block while the one before it computes, and the vocabulary.

        Of a block in the backward pass: weights twice, its gradient, and that in float32 on its way to the ranks. The
        vocabulary head stays whole, and its gradient with it, until the end of the backward pass, where the float32
        gradient is copied to be added up; an embedding of its own is gathered there once more, with a gradient.
        """
        trains = not self.lora_rank
        weight = min(self.compute_bytes, self.weight_bytes)
        of_others = shape.block_experts * (1 - 1 / self.expert_parallel)  # experts that other ranks compute
        block = shape.block_parameters - of_others
        block *= 2 * weight + (self.compute_bytes + 4 if trains else 0)
        of_vocabulary = self.vocabulary_bytes + (self.vocabulary_bytes + 4 if trains else 0)
        if not shape.is_tied:
            of_vocabulary += self.vocabulary_bytes + (self.vocabulary_bytes if trains else 0)
        return block + shape.vocabulary * shape.hidden * of_vocabulary

    def _exchanged(self, shape: ModelShape) -> float:
        """Return the rows of one layer that ranks send each other's experts: those that leave, and those that arrive.

        So many arrive where routers choose evenly; what a layer keeps of them is counted with its activations.
        """
        sent = self.tokens * shape.num_experts_per_token * shape.hidden * self.compute_bytes
        return 2 * sent if self.expert_parallel > 1 else 0

    def _weights(self, shape: ModelShape) -> float:
        """Bytes of one rank's weights, without adapters."""
        num_bytes = self._held(shape, 3) * self.weight_bytes
        if self.held_vocabulary_bytes:
            num_bytes += self._vocabulary(shape, 3) * (self.held_vocabulary_bytes - self.weight_bytes)
        return num_bytes

    def _optimizer(self, shape: ModelShape) -> float:
        """Bytes of the optimizer's state on one rank's device."""
        num_bytes = self._optimizer_states(shape)
        if self.offloads_optimizer:  # no two parameters are larger than embedding and a block
            share = self.tensor_parallel * self._share(1, self.data_parallel)
            of_vocabulary = shape.vocabulary * shape.hidden * (self.vocabulary_optimizer_bytes or self.optimizer_bytes)
            num_bytes = min(num_bytes, (of_vocabulary + shape.block_parameters * self.optimizer_bytes) / share)
        return num_bytes

    def _optimizer_states(self, shape: ModelShape) -> float:
        """Bytes of the optimizer's state of one rank, wherever it is."""
        num_bytes = self._trained(shape, 1) * self.optimizer_bytes
        if self.vocabulary_optimizer_bytes and not self.lora_rank:
            num_bytes += self._vocabulary(shape, 1) * (self.vocabulary_optimizer_bytes - self.optimizer_bytes)
        return num_bytes

    def _vocabulary(self, shape: ModelShape, stage: int) -> float:
        """Weights of embedding and head on one rank, of what is shared out from a stage of ZeRO on."""
        share = self.tensor_parallel * self.pipeline_parallel * self._share(stage, self.data_parallel)
        return shape.vocabulary * shape.hidden * (1 if shape.is_tied else 2) / share

    def _held(self, shape: ModelShape, stage: int) -> float:
        """Numbers of one rank, one for each parameter, of what is shared out from a stage of ZeRO on; 0: by none."""
        width, replicas = self.tensor_parallel, self.data_parallel
        experts = shape.expert_parameters if self.expert_parallel > 1 else 0
        shared = shape.num_parameters - experts - self.whole_parameters
        held = (shared / width + self.whole_parameters) / self._share(stage, replicas)
        if experts:
            held += experts / self.expert_parallel / self._share(stage, replicas * width / self.expert_parallel)
        return held / self.pipeline_parallel

    def _trained(self, shape: ModelShape, stage: int) -> float:
        """Return the same as `_held` for what is trained."""
        if not self.lora_rank:
            return self._held(shape, stage)
        adapters = self.lora_rank * shape.adapted_width / (self.tensor_parallel * self.pipeline_parallel)
        return adapters / self._share(stage, self.data_parallel)

    def _share(self, stage: int, replicas: float) -> float:
        return replicas if stage and self.zero_stage >= stage else 1

    def _activations(self, shape: ModelShape) -> float:
        """Return what the forward pass keeps for the backward pass."""
        kept = block_bytes(shape, self.compute_bytes, fuses_recurrence=self.fuses_recurrence)
        blocks = [num_bytes / self.tensor_parallel for num_bytes in kept]
        # A pipeline's first rank holds as many micro-batches as there are stages.
        if not self.recomputes:
            return self.tokens * sum(blocks)
        here = min(1.0, 2 * self.pipeline_parallel / shape.num_layers) if self.offloads_inputs else 1
        return self._inputs(shape) * here + self.tokens * max(blocks) * self.pipeline_parallel

    def _inputs(self, shape: ModelShape) -> float:
        """Return the inputs of all blocks of one rank, of as many micro-batches as it holds."""
        return self.tokens * shape.num_layers * shape.hidden * self.compute_bytes

    def _logits(self, shape: ModelShape) -> float:
        """float32 logits and their gradient, and what is kept."""
        vocabulary = shape.vocabulary / self.tensor_parallel
        kept = min(self.kept_bytes, self.tokens * vocabulary * self.compute_bytes)
        return 2 * 4 * min(self.head_tokens or self.tokens, self.tokens) * vocabulary + kept


def block_bytes(shape: ModelShape, compute_bytes: int, *, fuses_recurrence: bool = False) -> list[int]:
    """Return the bytes that each decoder block keeps of one token for its backward pass, blocks with attention first.

    Args:
        shape: of the model.
        compute_bytes: of one number in the activations.
        fuses_recurrence: see `TrainLayout.fuses_recurrence`.
    """
    of_attention = compute_bytes * block_activations(shape)
    of_rule = _kept_by_rule(shape, shape.rule, compute_bytes, fused=fuses_recurrence) if shape.rule else 0
    return [of_attention] * shape.num_attention_layers + [of_rule] * shape.num_rule_layers


def block_activations(shape: ModelShape) -> int:
    """Numbers that one decoder block with attention keeps of one token for its backward pass.

    Counted as in arXiv:2205.05198, section 4.1, for a block with RMS norms, flash attention, rotary positions and a
    gated feed-forward part, without dropout: see `_around_attention`; attention keeps queries, keys, values and its
    output (twice: as made, and as the output projection reads it), and of gates their activations at least. Tests
    count what torch keeps.
    """
    if shape.latent:
        return _around_attention(shape) + shape.attentions_per_block * _kept_by_latent(shape, shape.latent)
    attention = (3 + shape.gate_numbers) * shape.query_width + 2 * shape.kv_width
    attention += shape.head_norm_numbers * (shape.query_width + shape.kv_width)
    return _around_attention(shape) + attention


def _around_attention(shape: ModelShape) -> int:
    """Numbers that the norms and the feed-forward part of a block keep of one token.

    An RMS norm keeps its input, the scaled input and what the matrices after it read (3h), one of torch's own first and
    last; a feed-forward part with gates keeps gate, its activation, up, and their product.
    """
    routed = 2 * shape.num_experts_per_token * shape.hidden
    return shape.norm_numbers * shape.hidden + shape.mlp_numbers * shape.mlp_width + routed


def _kept_by_latent(shape: ModelShape, latent: LatentAttention) -> int:
    """Numbers that one attention with compressed keys and values keeps of one token.

    What is compressed is kept like the input of any norm, and with it the part of keys that all heads share; then
    queries and keys, what values are cut from, and the output twice.
    """
    compressed = 3 * (latent.query_rank + latent.kv_rank) + latent.rope_dim
    of_head = 2 * (latent.nope_dim + latent.rope_dim) + latent.nope_dim + 3 * latent.value_dim
    return compressed + shape.num_kv_heads * of_head


def _kept_by_rule(shape: ModelShape, rule: DeltaRule, compute_bytes: int, *, fused: bool) -> int:
    """Bytes that one block with the gated delta rule keeps of one token, by transformers' torch functions or kernels.

    The functions compute the rule in float32 whatever the rest is in. It keeps queries and keys, each repeated for its
    heads of values, as given, normalised, and for each of its products; values as given, solved for, and corrected; of
    each token five rows of its chunk: decays, the systems before and after them, and scores twice; and the states of
    each chunk. The convolution keeps its input, and its output before the activation. The norm of the output keeps that
    and its gate, in the format of the rest and in float32.

    Kernels keep queries, keys, values and one row of a chunk in the format of the rest, and the convolution's input.
    Source: fla-core 0.6.0, fla/ops/gated_delta_rule/chunk.py; causal-conv1d, causal_conv1d_interface.py.
    """
    of_norm = (4 + compute_bytes) * 3 * rule.value_width
    around = compute_bytes * (_around_attention(shape) + rule.num_channels) + of_norm
    if fused:
        row = rule.num_value_heads * _CHUNK_TOKENS
        return around + compute_bytes * (2 * rule.num_value_heads * rule.key_dim + rule.value_width + row)
    keys = 11 * rule.num_value_heads * rule.key_dim
    chunks = 5 * rule.num_value_heads * _CHUNK_TOKENS + rule.state_size // _CHUNK_TOKENS
    return around + compute_bytes * rule.num_channels + 4 * (keys + 3 * rule.value_width + chunks)


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Memory of a rollout engine's model, by how it is kept.

    Args:
        weight_bytes: of one weight.
        matrix_bytes: of one weight of the decoder blocks; 0: `weight_bytes`. Scales of FP8 blocks are not counted: they
            add 4 bytes to 16384.
        kv_bytes: of one number in the KV cache.
        state_bytes: of one number in the states of layers with the gated delta rule; 0: as the model's config.json has
            it, or `weight_bytes`.
        states_per_sample: states of each such layer that a sample holds at a time.
        tensor_parallel: ranks that share each matrix and the heads.
        pipeline_parallel: ranks that share the blocks.
        max_running: samples decoded together.
        max_model_len: tokens of the longest.
        sync_bytes: buffers of a weight sync.
        cache_bytes: what the engine sets aside for its cache, in which samples wait for room; 0 where that depends on
            a device whose memory is unknown; None: all running samples may grow to their longest.
    """

    weight_bytes: int = 2
    matrix_bytes: int = 0
    kv_bytes: int = 2
    state_bytes: int = 0
    states_per_sample: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_running: int = 64
    max_model_len: int = 4096
    sync_bytes: int = 0
    cache_bytes: int | None = None

    def estimate(self, shape: ModelShape) -> MemoryEstimate:
        """Bytes of one rank, with a KV cache for one sample of the longest at least."""
        longest = self.max_model_len * self.kv_bytes_per_token(shape) + self.state_bytes_per_sample(shape)
        wanted = self.max_running * longest if self.cache_bytes is None else self.cache_bytes
        cache = "KV cache and states" if shape.rule else "KV cache"
        parts = {
            "weights": self.held_weights(shape),
            cache if wanted else f"{cache} of one sample": max(wanted, longest),
            "weight sync": self.sync_bytes,
        }
        return MemoryEstimate({name: int(size) for name, size in parts.items() if size})

    def held_weights(self, shape: ModelShape) -> int:
        """Bytes of the weights on one rank."""
        in_blocks = shape.decoder_parameters * (self.matrix_bytes or self.weight_bytes)
        others = (shape.num_parameters - shape.decoder_parameters) * self.weight_bytes
        return int((in_blocks + others) / (self.tensor_parallel * self.pipeline_parallel))

    def kv_bytes_per_token(self, shape: ModelShape) -> float:
        """Keys and values of one token on one rank; with more ranks than heads each head is held several times.

        What is compressed belongs to all heads, so each rank holds all of it.
        Source: arXiv:2309.06180, section 3; vllm 0.32.0, transformers_utils/model_arch_config_convertor.py.
        """
        width = 2 * max(1.0, shape.num_kv_heads / self.tensor_parallel) * shape.head_dim
        if shape.latent and shape.latent.is_kept:
            width = shape.latent.kv_rank + shape.latent.rope_dim
        num_attentions = shape.num_attention_layers * shape.attentions_per_block / self.pipeline_parallel
        return width * num_attentions * self.kv_bytes

    def state_bytes_per_sample(self, shape: ModelShape) -> float:
        """Bytes on one rank, however long the sample is, of layers with the gated delta rule; 0 without such layers.

        They hold the rule's states, and what the convolution reads again: all tokens of its window but the newest.
        Source: vllm 0.32.0, model_executor/layers/mamba/mamba_utils.py, without what fills pages.
        """
        if not (rule := shape.rule):
            return 0
        window = rule.num_channels * (rule.window - 1) * self.weight_bytes
        states = rule.state_size * (self.state_bytes or rule.state_bytes or self.weight_bytes)
        num_states = shape.num_rule_layers * self.states_per_sample
        return num_states * (window + states) / (self.tensor_parallel * self.pipeline_parallel)


@dataclass(frozen=True, kw_only=True)
class ClassifierMemory:
    """Memory of a model that only reads texts, with a score in place of a row of logits for each token.

    Args:
        weight_bytes: of one weight, and of one number in the activations.
        tokens: that it reads at once at most.
    """

    weight_bytes: int = 4
    tokens: int = 4096

    def estimate(self, shape: ModelShape) -> MemoryEstimate:
        """Bytes of one replica: its weights, and what one block computes with, since nothing is kept.

        Args:
            shape: of the model, read with `has_head=False`.
        """
        activations = self.tokens * max(block_bytes(shape, self.weight_bytes))
        return MemoryEstimate({"weights": shape.num_parameters * self.weight_bytes, "activations": activations})


def train_memory(
    engine: TrainEngineSettings,
    layout: TrainLayout,
    shape: ModelShape,
    *,
    on_cpu: bool,
    keeps_reference: bool = False,
) -> TrainMemory:
    """Return how a trainer keeps a model.

    Args:
        engine: its settings.
        layout: how its ranks share the model.
        shape: of the model.
        on_cpu: it computes on processors, over fewer tokens' logits at a time.
        keeps_reference: a frozen copy of the first policy is held too, where all weights are trained.
    """
    head_bytes = _HEAD_BYTES_ON_CPU if on_cpu else _HEAD_BYTES
    frozen_bytes = layout.frozen_weight_bytes if engine.lora_rank else 0
    return TrainMemory(
        weight_bytes=frozen_bytes or layout.weight_bytes,
        held_vocabulary_bytes=layout.vocabulary_bytes if frozen_bytes else 0,
        adapter_bytes=layout.weight_bytes,
        gradient_bytes=layout.gradient_bytes,
        optimizer_bytes=layout.optimizer_bytes,
        vocabulary_optimizer_bytes=layout.vocabulary_optimizer_bytes,
        whole_gradient_bytes=layout.whole_gradient_bytes,
        compute_bytes=NUMBER_BYTES[engine.dtype],
        vocabulary_bytes=layout.vocabulary_bytes,
        data_parallel=layout.dp * layout.cp // layout.replicas,
        tensor_parallel=layout.tp,
        whole_parameters=layout.whole_parameters,
        pipeline_parallel=layout.pp,
        expert_parallel=layout.ep,
        zero_stage=layout.zero_stage,
        tokens=engine.max_tokens_per_microbatch // layout.cp,
        recomputes=engine.activation_checkpointing,
        offloads_optimizer=layout.offloads_optimizer,
        offloads_inputs=layout.offloads_inputs,
        keeps_reference=keeps_reference and not engine.lora_rank,
        lora_rank=engine.lora_rank,
        head_tokens=max(16, head_bytes // (4 * shape.vocabulary)),
        kept_bytes=_KEPT_BYTES_ON_CPU if on_cpu else _KEPT_BYTES,
        fuses_recurrence=layout.fuses_recurrence and not on_cpu,
        copied_bytes=layout.copied_bytes if on_cpu else 0,
    )


def train_advice(engine: TrainEngineSettings, estimate: MemoryEstimate) -> str:
    """Return what to change where a rank of a trainer holds too much: what most of it is made of."""
    if "whole gradients" in estimate.parts:
        return 'engine.options.reduce_once = "auto"'
    states = sum(estimate.parts.get(name, 0) for name in ("weights", "gradients", "optimizer", "reference"))
    if states > estimate.num_bytes - states:
        return "more engine.num_ranks" + ("" if engine.lora_rank else ", or adapters alone (engine.lora_rank)")
    checkpointing = "" if engine.activation_checkpointing else "engine.activation_checkpointing = true, or "
    return f"{checkpointing}fewer engine.max_tokens_per_microbatch"


def read_shape(folder: str, *, has_head: bool = True) -> ModelShape:
    """Sizes of the model in a folder.

    Args:
        folder: with its config.json.
        has_head: whether it predicts tokens; without, no row for each token is counted beside the embeddings.

    Raises:
        ModelError: no config.json, not readable, or of a family that is not known.
    """
    config = read_model_json(Path(folder).expanduser() / "config.json")
    return ModelShape.from_config(config if has_head else {**config, "tie_word_embeddings": True})
