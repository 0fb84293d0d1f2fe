"""Faults that make trainer and rollout engine differ, planted in this process and in those forked from it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import offbeat_engine_torch._policy as trainer_policy
import offbeat_rollout_torch._attention as engine_attention
import offbeat_rollout_torch._cache as cache
import offbeat_rollout_torch._decoder as decoder
import offbeat_rollout_torch._engine as engine
import offbeat_rollout_torch._model_runner as runner
import offbeat_rollout_torch._worker as worker

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be said of it.

    Args:
        plant: puts it in.
        kind: of the finding.
        where: part of the finding's place.
        says: part of the finding's text.
    """

    plant: Plant
    kind: str
    where: str
    says: str = ""


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Return a plant that gives `change` the function of this name, and puts what it returns in its place."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def result(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change what a function returns."""
    return lambda own: lambda *args, **named: change(own(*args, **named))


# ── the rollout engine ────────────────────────────────────────────────────────────────────────────────────────────────


def stretched(own: Any) -> Any:
    return lambda architecture, num_positions: own(architecture, 2 * num_positions)[::2]


def other_theta(own: Any) -> Any:
    def turned(architecture: Any, num_positions: int) -> Any:
        rope = {**architecture.rope, "rope_theta": architecture.rope["rope_theta"] / 50}
        return own(replace(architecture, rope=rope), num_positions)

    return turned


def coarse_norm(own: Any) -> Any:
    return lambda x, weight, a: own(x, weight, replace(a, norm_eps=0.3))


def with_gelu(own: Any) -> Any:
    def gated(layer: Any, h: Any, adapters: Any, index: int) -> Any:
        gate, up = layer.gate_up[0](h).chunk(2, -1)
        return functional.gelu(gate) * up

    return gated


def swapped(own: Any) -> Any:
    def gated(layer: Any, h: Any, adapters: Any, index: int) -> Any:
        gate, up = layer.gate_up[0](h).chunk(2, -1)
        return functional.silu(up) * gate

    return gated


def without_head_norm(own: Any) -> Any:
    return lambda qk, rotations, layer, a: own(qk, rotations, layer, replace(a, qk_norm=False))


def without_cause(patch: pytest.MonkeyPatch) -> None:
    """A prompt's tokens see those after them."""
    own = functional.scaled_dot_product_attention
    patch.setattr(
        engine_attention.F,
        "scaled_dot_product_attention",
        lambda *args, **named: own(*args, **{**named, "is_causal": False}),
    )


def heavier_head(own: Any) -> Any:
    return lambda self, x: own(self, x) * 1.2


def scaled_after_proof(name: str) -> Plant:
    """A tensor is changed when it is packed, after it was read back."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        own = decoder.DecoderWeights.freeze

        def freeze(self: Any) -> None:
            self.parameters[name].view().mul_(1.3)
            own(self)

        patch.setattr(decoder.DecoderWeights, "freeze", freeze)

    return plant


def one_behind(own: Any) -> Any:
    """Decoding writes keys and values a place too early, over those of the token before."""

    def plan(self: Any, block: Any, rows: Any, like: Any) -> Any:
        part = own(self, block, rows, like)
        store = part.store.clone()
        return replace(part, store=store - (store > 0).long())

    return plan


def mixed_rows(own: Any) -> Any:
    """Log-probabilities of samples that are computed together are given to their neighbours."""

    def push(self: Any, samples: Any, ids: Any, logprobs: Any) -> None:
        own(self, samples, ids, [*logprobs[1:], logprobs[0]])

    return push


def favoured(own: Any) -> Any:
    """One token is likelier, as by a logit_bias that was left in."""

    def draw(logits: Any, params: Any, uniforms: Any, **named: Any) -> Any:
        logits = logits.clone()
        logits[:, 50] += 4
        return own(logits, params, uniforms, **named)

    return draw


def in_bits(own: Any) -> Any:
    def push(self: Any, samples: Any, ids: Any, logprobs: Any) -> None:
        own(self, samples, ids, [each / 0.6931471805599453 for each in logprobs])

    return push


def one_place_early(own: Any) -> Any:
    """The first token of a sample is drawn from the place before the end of its prompt."""
    return lambda self, ended, hidden: own(self, [(sample, max(end - 1, 0)) for sample, end in ended], hidden)


def with_layers(chosen: slice) -> Callable[[Any], Any]:
    """The engine computes with these of its layers."""

    def change(own: Any) -> Any:
        def decode_hidden(weights: Any, *args: Any, **named: Any) -> Any:
            held, weights.layers = weights.layers, weights.layers[chosen]
            try:
                return own(weights, *args, **named)
            finally:
                weights.layers = held

        return decode_hidden

    return change


def at_another_temperature(own: Any) -> Any:
    """Reported at temperature 1."""

    def draw(logits: Any, params: Any, uniforms: Any, **named: Any) -> Any:
        whole = logits.clone().log_softmax(-1)
        drawn = own(logits, params, uniforms, **named)
        logprobs = whole.gather(-1, torch.tensor(drawn.ids)[:, None])[:, 0].tolist()
        return replace(drawn, logprobs=logprobs)

    return draw


def with_penalty(own: Any) -> Any:
    """Tokens that came before are less likely, as some models' generation_config.json has it."""

    def _draw(self: Any, samples: Any, hidden: Any) -> Any:
        decode = runner.decode_logits

        def penalised(*args: Any) -> Any:
            logits = decode(*args)
            for row, sample in enumerate(samples):
                seen = torch.tensor(sorted(set(sample.tokens)))
                before = logits[row, seen]
                logits[row, seen] = torch.where(before > 0, before / 1.2, before * 1.2)
            return logits

        runner.decode_logits = penalised
        try:
            return own(self, samples, hidden)
        finally:
            runner.decode_logits = decode

    return _draw


def with_first_token(own: Any) -> Any:
    """A token is put before each prompt, as tokenizers do that add a beginning of their own."""
    import numpy as np

    async def generate(self: Any, request: Any) -> Any:
        ids = np.concatenate(([np.int32(1)], request.prompt_ids)).astype(np.int32)
        return await own(self, replace(request, prompt_ids=ids))

    return generate


def of_four_tokens(own: Any) -> Any:
    """The limit of a sample is lost on the way."""

    async def generate(self: Any, request: Any) -> Any:
        return await own(self, replace(request, params=replace(request.params, max_tokens=4)))

    return generate


def without_first_tokens(own: Any) -> Any:
    """A long prompt loses its beginning."""

    async def generate(self: Any, request: Any) -> Any:
        return await own(self, replace(request, prompt_ids=request.prompt_ids[3:]))

    return generate


def keep_computed(patch: pytest.MonkeyPatch) -> None:
    """An update leaves keys and values of finished samples, also of short ones."""
    patch.setattr(worker.Worker, "_drop_computed", lambda self: None)
    patch.setattr(cache, "REUSE_FROM_TOKENS", 4)


def lost_between_turns(patch: pytest.MonkeyPatch) -> None:
    """What goes on after a reply finds zeros in place of the last keys and values of the turn before."""
    own = cache.KVCache.reuse

    def reuse(self: Any, tokens: Any, row: Any, adapter: str = "") -> None:
        own(self, tokens, row, adapter)
        if row.cached and len(tokens) - row.cached > 4:
            row.kv[..., max(row.cached - 4, 0) : row.cached, :] = 0

    patch.setattr(cache.KVCache, "reuse", reuse)
    patch.setattr(cache, "REUSE_FROM_TOKENS", 4)


def among_the_likeliest(own: Any) -> Any:
    """Samples are drawn from 20 tokens, and what is reported of them is right."""
    return lambda logits, params, uniforms, **named: own(
        logits, [replace(each, top_k=20) for each in params], uniforms, **named
    )


def mirror_images(patch: pytest.MonkeyPatch) -> None:
    """The engine sees images as in a mirror."""
    own = engine.TorchRolloutEngine.generate

    async def generate(self: Any, request: Any) -> Any:
        return await own(self, replace(request, images=tuple(image[:, ::-1].copy() for image in request.images)))

    patch.setattr(engine.TorchRolloutEngine, "generate", generate)


def at_temperature_one(own: Any) -> Any:
    return lambda **named: own(**{**named, "temperature": 1.0})


def same_seed(own: Any) -> Any:
    return lambda seeds, numbers: own([seeds[0]] * len(seeds), numbers)


def turned_in(number: int, turn: Callable[[Any], Any]) -> Plant:
    """One layer turns queries and keys by other angles."""

    def attend_by(own: Any) -> Any:
        def attend(qkv: Any, turns: Any, attention: Any, place: int, *rest: Any) -> Any:
            return own(qkv, turn(turns) if place == number else turns, attention, place, *rest)

        return attend

    return changed(decoder, "_attend", attend_by)


def _doubled(turns: Any) -> Any:
    angles = torch.view_as_complex(turns.contiguous())
    return torch.view_as_real(angles * angles)


def _in_part(turns: Any) -> Any:
    turns, half = turns.clone(), turns.shape[-2] // 2
    turns[..., half:, 0], turns[..., half:, 1] = 1, 0
    return turns


def windowed(own: Any) -> Any:
    """Layer 1 sees 8 tokens."""

    def attend(self: Any, layer: int, qkv: Any, num_heads: int) -> Any:
        kept = self._mask
        if layer == 1:
            starts = torch.tensor(self._starts)
            mask = self._causal_mask(starts, qkv)
            seen = starts[:, None] + torch.arange(self._width)
            far = torch.arange(mask.shape[-1]) < seen[:, :, None] - 7
            self._mask = mask.masked_fill(far[:, None], -torch.inf)
        mixed = own(self, layer, qkv, num_heads)
        self._mask = kept
        return mixed

    return attend


def in_8_bits(patch: pytest.MonkeyPatch) -> None:
    """Keys and values are kept in 8 bits."""

    def keep(own: Any) -> Any:
        def attend(self: Any, layer: int, qkv: Any, *rest: Any) -> Any:
            num_heads, qkv = rest[0] if rest and isinstance(rest[0], int) else self._num_heads, qkv.clone()
            qkv[:, num_heads:] = qkv[:, num_heads:].to(torch.float8_e4m3fn).to(qkv.dtype)
            return own(self, layer, qkv, *rest)

        return attend

    changed(engine_attention._PrefillGroup, "attend", keep)(patch)
    changed(engine_attention.DecodeAttention, "_attend", keep)(patch)


def never_updated(part: str) -> Plant:
    """Tensors are again what they were at first when they are packed, after an update was read back."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        own, first = decoder.DecoderWeights.freeze, dict[Any, Any]()

        def freeze(self: Any) -> None:
            for name, parameter in self.parameters.items():
                if part in name:
                    parameter.view().copy_(first.setdefault((id(self), name), parameter.view().clone()))
            own(self)

        patch.setattr(decoder.DecoderWeights, "freeze", freeze)

    return plant


def old_tied_head(own: Any) -> Any:
    first = dict[int, Any]()
    return lambda self, x: functional.linear(x, first.setdefault(id(self), self.weight().clone()))


def capped(own: Any) -> Any:
    return lambda self, x: 5 * torch.tanh(own(self, x) / 5)


def one_late(own: Any) -> Any:
    """Each token comes with the log-probability of the one before."""
    before = dict[int, float]()

    def push(self: Any, samples: Any, ids: Any, logprobs: Any) -> None:
        late = [before.get(id(sample), -0.5) for sample in samples]
        before.update(zip(map(id, samples), logprobs, strict=True))
        own(self, samples, ids, late)

    return push


def without_its_seed(own: Any) -> Any:
    async def generate(self: Any, request: Any) -> Any:
        return await own(self, replace(request, params=replace(request.params, seed=7)))

    return generate


def at_random(own: Any) -> Any:
    return lambda seeds, counts: own([random.getrandbits(60) for _ in seeds], counts)


def coarse_norms(own: Any) -> Any:
    return lambda x, weight, a: own(x.bfloat16(), weight.bfloat16(), a).to(x.dtype)


# ── the trainer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def far_apart(own: Any) -> Any:
    def lay_out(*args: Any) -> Any:
        pack = own(*args)
        return replace(pack, positions_T=2 * pack.positions_T)

    return lay_out


def other_tokens(own: Any) -> Any:
    def lay_out(*args: Any) -> Any:
        pack = own(*args)
        ids = pack.ids_T.copy()
        ids[0] = 3
        return replace(pack, ids_T=ids)

    return lay_out


def trained_model(change: Callable[[Any], None]) -> Plant:
    """Change the model that the trainer has made."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        own = trainer_policy._load_whole

        def load(*args: Any) -> Any:
            model, pieces = own(*args)
            change(model.whole)
            return model, pieces

        patch.setattr(trainer_policy, "_load_whole", load)

    return plant


def _hooked(module: Any, factor: float) -> None:
    module.register_forward_hook(lambda _, __, output: output * factor)


def _scale_attention(whole: Any) -> None:
    whole.model.layers[0].self_attn.scaling *= 1.5


def _grow_norm(whole: Any) -> None:
    _hooked(whole.model.layers[1].post_attention_layernorm, 1.1)


def _grow_down(whole: Any) -> None:
    _hooked(whole.model.layers[0].mlp.down_proj, 1.3)


def _grow_embedding(whole: Any) -> None:
    _hooked(whole.model.embed_tokens, 1.2)


def _grow_last_norm(whole: Any) -> None:
    _hooked(whole.model.norm, 1.2)


def _grow_value(whole: Any) -> None:
    _hooked(whole.model.layers[1].self_attn.v_proj, 1.3)


def _grow_output(whole: Any) -> None:
    _hooked(whole.model.layers[1].self_attn.o_proj, 1.5)


def _forget_head_norm(whole: Any) -> None:
    whole.model.layers[1].self_attn.q_norm.forward = lambda x: x


def _use_gelu(whole: Any) -> None:
    whole.model.layers[1].mlp.act_fn = torch.nn.GELU()


def one_row_early(own: Any) -> Any:
    """A token is scored by the logits of the place before the right one."""

    def lay_out(*args: Any) -> Any:
        pack = own(*args)
        return replace(pack, predictor_N=(pack.predictor_N - 1).clip(0))

    return lay_out


FAULTS: dict[str, Fault] = {
    "engine: positions scaled": Fault(
        changed(runner, "rotations", stretched), "layers", "rollout engine: layer 0: query"
    ),
    "engine: another theta": Fault(changed(runner, "rotations", other_theta), "layers", "layer 0: query"),
    "engine: epsilon of norms": Fault(changed(decoder, "_normed", coarse_norm), "layers", "layer 0: attention input"),
    "engine: heads are not normed": Fault(changed(decoder, "_rotate", without_head_norm), "layers", "layer 0: query"),
    "engine: prompts see ahead": Fault(without_cause, "layers", "layer 0: attention"),
    "engine: output of attention": Fault(
        changed(decoder, "_attend", result(lambda mixed: mixed * 1.1)), "layers", "layer 0: attention"
    ),
    "engine: gelu": Fault(changed(decoder, "_gated", with_gelu), "layers", "layer 0: activation"),
    "engine: gate and up": Fault(changed(decoder, "_gated", swapped), "layers", "layer 0: activation"),
    "engine: head": Fault(changed(decoder.Linear, "in_float32", heavier_head), "layers", "rollout engine: head"),
    "engine: a weight": Fault(
        scaled_after_proof("model.layers.1.self_attn.o_proj.weight"), "weights", "layers.1.self_attn.o_proj"
    ),
    "engine: the last norm's weight": Fault(scaled_after_proof("model.norm.weight"), "weights", "model.norm"),
    "engine: keys of tokens sampled": Fault(
        changed(engine_attention.DecodeAttention, "_plan", one_behind), "state", "decoding"
    ),
    "engine: samples mixed": Fault(changed(runner.ModelRunner, "_push", mixed_rows), "state", "batch"),
    "engine: old keys and values": Fault(keep_computed, "state", "cache of another version"),
    "engine: one seed": Fault(changed(runner, "uniforms", same_seed), "state", "seeds"),
    "engine: lost between turns": Fault(lost_between_turns, "state", "turns"),
    "engine: 20 tokens": Fault(changed(runner, "draw", among_the_likeliest), "inputs", "draws: top_k = 20"),
    "engine: temperature": Fault(changed(runner, "draw", at_another_temperature), "inputs", "temperature = 1"),
    "engine: a penalty": Fault(changed(runner.ModelRunner, "_draw", with_penalty), "inputs", "penalty of 1.2"),
    "engine: a token before": Fault(
        changed(engine.TorchRolloutEngine, "generate", with_first_token), "inputs", "a token before the prompt"
    ),
    "engine: a prompt cut off": Fault(
        changed(engine.TorchRolloutEngine, "generate", without_first_tokens), "inputs", "without its first 3 tokens"
    ),
    "trainer: scale of attention": Fault(trained_model(_scale_attention), "layers", "trainer: layer 0: attention"),
    "trainer: positions": Fault(changed(trainer_policy, "lay_out", far_apart), "inputs", "trainer: positions"),
    "trainer: tokens": Fault(changed(trainer_policy, "lay_out", other_tokens), "inputs", "trainer: tokens"),
    "trainer: temperature": Fault(
        changed(trainer_policy, "HeadQuery", at_temperature_one), "inputs", "trainer: temperature = 1"
    ),
    "trainer: norm before the MLP": Fault(trained_model(_grow_norm), "layers", "trainer: layer 1: mlp input"),
    "trainer: last product of the MLP": Fault(trained_model(_grow_down), "layers", "trainer: layer 0: output"),
    "trainer: embedding": Fault(trained_model(_grow_embedding), "layers", "trainer: embedding"),
    "trainer: last norm": Fault(trained_model(_grow_last_norm), "layers", "trainer: final norm"),
    "trainer: values": Fault(trained_model(_grow_value), "layers", "trainer: layer 1: value projection"),
    "trainer: output of attention": Fault(trained_model(_grow_output), "layers", "trainer: layer 1: after attention"),
    "engine: positions scaled in one layer": Fault(
        turned_in(1, _doubled), "layers", "engine: layer 1: query", says="positions scaled by 2"
    ),
    "engine: turned in part": Fault(turned_in(1, _in_part), "layers", "engine: layer 1: query"),
    "engine: factor of turned heads": Fault(
        turned_in(1, lambda turns: turns * 1.1), "layers", "engine: layer 1: query", says="1.1 times the right values"
    ),
    "engine: a window": Fault(
        changed(engine_attention._PrefillGroup, "attend", windowed), "layers", "layer 1: attention", says="of 8 tokens"
    ),
    "engine: cache in 8 bits": Fault(in_8_bits, "state", "layer 0: attention", says="rounded to 8 bits (e4m3)"),
    "engine: norms in bfloat16": Fault(
        changed(decoder, "_normed", coarse_norms), "layers", "engine: layer 0: attention input"
    ),
    "engine: a layer of older weights": Fault(
        never_updated("layers.1."), "weights", "engine: model.layers.1", says="as they were before the update"
    ),
    "engine: a tied head of older weights": Fault(
        changed(decoder.Linear, "in_float32", old_tied_head), "layers", "rollout engine: head"
    ),
    "engine: a soft cap": Fault(
        changed(decoder.Linear, "in_float32", capped),
        "layers",
        "rollout engine: head",
        says="a soft cap on logits of 5",
    ),
    "engine: scores of the token before": Fault(
        changed(runner.ModelRunner, "_push", one_late), "inputs", "the log-probability of the one before"
    ),
    "engine: a seed not heeded": Fault(
        changed(engine.TorchRolloutEngine, "generate", without_its_seed), "state", "seeds", says="two seeds"
    ),
    "engine: other samples each time": Fault(
        changed(runner, "uniforms", at_random), "state", "seeds", says="each time"
    ),
    "engine: a bias for a token": Fault(changed(runner, "draw", favoured), "inputs", "another logit of token 50 (+4)"),
    "engine: logarithms to base 2": Fault(
        changed(runner.ModelRunner, "_push", in_bits), "inputs", "rollout engine: logarithms to base 2"
    ),
    "engine: first token": Fault(changed(runner.ModelRunner, "_draw_along", one_place_early), "state", "first token"),
    "engine: layers in another order": Fault(
        changed(runner, "decode_hidden", with_layers(slice(None, None, -1))),
        "layers",
        "engine: layer 0: attention input",
        says="the weights of layer 1",
    ),
    "engine: a layer left out": Fault(
        changed(runner, "decode_hidden", with_layers(slice(-1))),
        "layers",
        "rollout engine: layer 1",
        says="leaves the layer",
    ),
    "engine: stops early": Fault(
        changed(engine.TorchRolloutEngine, "generate", of_four_tokens), "inputs", "rollout engine: stop"
    ),
    "trainer: heads are not normed": Fault(trained_model(_forget_head_norm), "layers", "trainer: layer 1: query"),
    "trainer: gelu": Fault(trained_model(_use_gelu), "layers", "trainer: layer 1: activation"),
    "trainer: logits of the place before": Fault(
        changed(trainer_policy, "lay_out", one_row_early), "inputs", "trainer: each token is scored by the logits"
    ),
}
