"""Runs in vLLM's workers: notes of what its model computes on the way, by the points of `offbeat_core.Inspection`.

vLLM's modules have names like those of transformers and are cut otherwise: projections of queries, keys and values are
one product, and layers hand on the residual stream as two summands, which the next norm adds. Modules of a compiled
model run unseen; its hidden states are seen all the same, and with them the log-probabilities.

Source: vllm 0.32.0, vllm/model_executor/models/ (llama.py, qwen3.py, qwen3_moe.py, gemma3.py), vllm/compilation/
decorators.py (do_not_compile), vllm/model_executor/layers/fused_moe/router/base_router.py (set_capture_fn).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from offbeat_core import EMBEDDING, FINAL_NORM, LAYER_POINTS, LOGPROB, POSITIONS, TOKEN_IDS, layer_point

_EMBEDDINGS: Final = ("embed_tokens", "embedding")
_MIXERS: Final = ("self_attn", "linear_attn", "attn")
_MLPS: Final = ("mlp", "block_sparse_moe", "feed_forward")
_HIDDEN: Final = "hidden states"
"""Input of the head. It is no point: only the workers keep it."""
_LOGITS_ROWS: Final = 256
"""Rows of logits at once: of 150,000 words they are 150 MB."""


class WorkerNotes:
    """Values of one sequence, which runs alone, chunk by chunk.

    Ranks hold parts of heads and of the MLP, so these points are left out where there are several. Of a model without
    the usual names there are log-probabilities alone.

    Args:
        runner: vLLM's, of this worker.
        layer: whose inner points are kept; None: what lies between layers.
        num_tokens: T, of the sequence.
    """

    def __init__(self, runner: Any, layer: int | None, num_tokens: int) -> None:
        self._runner, self._num_tokens = runner, num_tokens
        self._model: Any = runner.get_model()
        self._is_whole = runner.vllm_config.parallel_config.tensor_parallel_size == 1
        self._found: dict[str, Tensor] = {}
        self._is_seen = torch.zeros(num_tokens, dtype=torch.bool)
        self._values: dict[str, Tensor] = {}
        decoder = _decoder(self._model)
        self.num_layers = 0 if decoder is None else len(decoder.layers)
        with ExitStack() as hooks:
            self._hooks = hooks
            self._after(self._model, self._note_pass)
            if decoder is not None and getattr(decoder, "do_not_compile", True):
                if layer is None:
                    self._between_layers(decoder)
                elif 0 <= layer < self.num_layers:
                    self._within(decoder.layers[layer])
            self._hooks = hooks.pop_all()

    def close(self) -> None:
        """Watch no further."""
        self._hooks.close()

    def _between_layers(self, decoder: Any) -> None:
        self._before(self._model, self._note_inputs)
        self._takes(decoder.layers[0], EMBEDDING)  # not of the module: some models scale what it gives
        for number, layer in enumerate(decoder.layers):
            self._after(layer, partial(self._note_residual, layer_point(number)))
        self._after(decoder.norm, lambda output: self._note(FINAL_NORM, _first(output)))

    def _within(self, layer: Any) -> None:
        mixer, mlp = _part(layer, _MIXERS), _part(layer, _MLPS)
        if mixer is None or mlp is None:
            return
        self._takes(mixer, "attention input")
        norm = _norm_before_mlp(layer)
        self._before(mlp if norm is None else norm, lambda *given: self._note_residual("after attention", given))
        self._takes(mlp, "mlp input")
        router = getattr(getattr(mlp, "experts", None), "router", None)
        if router is not None:
            self._watch_router(router)
        if not self._is_whole:
            return
        if hasattr(mixer, "qkv_proj") and hasattr(mixer, "q_size"):
            sizes = [mixer.q_size, mixer.kv_size, mixer.kv_size]
            self._after(mixer.qkv_proj, lambda output: self._note_projections(_first(output), sizes))
        if hasattr(mixer, "attn"):
            self._before(mixer.attn, self._note_heads)
        last = getattr(mixer, "o_proj", None) or getattr(mixer, "out_proj", None)
        if last is not None:
            self._takes(last, "attention")
        if router is None and hasattr(mlp, "down_proj"):
            self._takes(mlp.down_proj, "activation")

    # Notes

    def _note_pass(self, output: Any) -> None:
        hidden = _first(output)
        self._note(_HIDDEN, hidden)
        self._is_seen[self._rows(len(hidden))] = True

    def _note_inputs(self, *_: Tensor, **named: Any) -> None:
        if (ids := named.get("input_ids")) is not None:
            self._note(TOKEN_IDS, ids)
        if (positions := named.get("positions")) is not None:
            self._note(POSITIONS, positions.T if positions.ndim == 2 else positions)  # [N], or [axes, N]

    def _note_residual(self, point: str, values: Any) -> None:
        """Note the residual stream: of a pair the sum, not rounded."""
        if isinstance(values, tuple):
            hidden, residual = (*values, None)[:2]
            values = hidden if residual is None else hidden.float() + residual.float()
        self._note(point, values)

    def _note_projections(self, qkv: Tensor, sizes: Sequence[int]) -> None:
        if qkv.shape[-1] == sum(sizes):  # not where gates lie between heads
            points = ("query projection", "key projection", "value projection")
            for point, part in zip(points, torch.functional.split(qkv, list(sizes), -1), strict=True):
                self._note(point, part)

    def _note_heads(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        self._note("query", query.flatten(1))
        self._note("key", key.flatten(1))

    def _watch_router(self, router: Any) -> None:
        """Note the experts taken, and let vLLM's own notes of them be."""
        theirs = getattr(router, "capture_fn", None)

        def capture(ids_NK: Tensor) -> None:
            self._note("experts", ids_NK.sort(-1).values)
            if theirs is not None:
                theirs(ids_NK)

        if hasattr(router, "set_capture_fn"):
            router.set_capture_fn(capture)
            self._hooks.callback(router.set_capture_fn, theirs)

    def _note(self, point: str, values: Any) -> None:
        if not isinstance(values, Tensor):
            return
        rows = values.detach().reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
        whole = self._found.setdefault(point, torch.zeros(self._num_tokens, rows.shape[1]))
        places = self._rows(len(rows))
        whole[places] = rows[: places.stop - places.start].float().cpu()  # vLLM writes to its own afterwards

    def _rows(self, count: int) -> slice:
        """Places of the rows of this pass: padding at the end of one lies where the next ones are, or beyond all."""
        batch = self._runner.input_batch
        if batch.num_reqs != 1:
            raise RuntimeError("other samples came while a sequence was inspected; ask again when none are in flight")
        start = int(batch.num_computed_tokens_cpu[0])
        return slice(start, max(start, min(start + count, self._num_tokens)))

    # Hooks

    def _before(self, module: nn.Module, note: Callable[..., None]) -> None:
        def hook(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            note(*positional, **named)

        self._hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _takes(self, module: nn.Module, point: str) -> None:
        def note(*positional: Any, **named: Any) -> None:
            given = named.get("hidden_states", named.get("x"))
            self._note(point, next(filter(_is_hidden, positional), None) if given is None else given)

        self._before(module, note)

    def _after(self, module: nn.Module, note: Callable[[Any], None]) -> None:
        self._hooks.callback(module.register_forward_hook(lambda _, __, output: note(output)).remove)

    # Results

    def measure(self, ids: Sequence[int], temperature: float) -> list[tuple[str, int, int]]:
        """Compute log-probabilities, and return (point, rows, width) in the order of computation.

        Args:
            ids: the sequence, and the token after it if that is to have a log-probability too.
            temperature: of the log-probabilities.
        """
        if not bool(self._is_seen.all()):
            raise RuntimeError(f"vLLM computed {int(self._is_seen.sum())} of {self._num_tokens} tokens")
        hidden = self._found.pop(_HIDDEN)
        order = {name: place for place, name in enumerate(LAYER_POINTS)}
        self._values = {name: self._found[name] for name in sorted(self._found, key=lambda name: order.get(name, -1))}
        self._values[LOGPROB] = self._logprobs(hidden, torch.tensor(ids), temperature)
        return [(name, *values.shape) for name, values in self._values.items()]

    @torch.inference_mode()
    def _logprobs(self, hidden_TE: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """[len(ids), 1] nats, 0 for the first; ranks compute logits together, and the first one gets them."""
        scored, dtype, device = torch.zeros(len(ids), 1), self._runner.model_config.dtype, self._runner.device
        with self._plain_logits():
            for start in range(0, len(ids) - 1, _LOGITS_ROWS):
                wanted = ids[start + 1 : start + 1 + _LOGITS_ROWS, None]
                rows = hidden_TE[start : start + len(wanted)].to(device, dtype)
                if (logits := self._model.compute_logits(rows)) is not None:
                    chosen = (logits.float() / temperature).log_softmax(-1).gather(-1, wanted.to(device))
                    scored[start + 1 : start + 1 + len(wanted)] = chosen.cpu()
        return scored

    @contextmanager
    def _plain_logits(self) -> Iterator[None]:
        """Leave out the layer for adapters of the head, which this package refuses: it has one row for each request."""
        owner: Any = next((each for each in self._model.modules() if hasattr(each, "logits_processor")), None)
        layer = getattr(owner, "logits_processor", None)
        if layer is None or not hasattr(layer, "base_layer"):
            yield
            return
        owner.logits_processor = layer.base_layer
        try:
            yield
        finally:
            owner.logits_processor = layer

    def read(self) -> Tensor:
        """Return all values behind one another."""
        return torch.cat([values.flatten() for values in self._values.values()])


def _decoder(model: nn.Module) -> Any:
    """Return the module with the decoder layers; None where it has no usual names."""
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and _part(module, _EMBEDDINGS) is not None:
            return module
    return None


def _part(module: nn.Module, names: Sequence[str]) -> Any:
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def _norm_before_mlp(layer: Any) -> Any:
    """Return the norm whose input is the residual stream after attention; None where the MLP takes that itself."""
    if (norm := getattr(layer, "pre_feedforward_layernorm", None)) is not None:
        return norm
    # Families that have no norm before attention have none before the MLP.
    return getattr(layer, "post_attention_layernorm", None) if hasattr(layer, "input_layernorm") else None


def _is_hidden(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.ndim >= 2


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
