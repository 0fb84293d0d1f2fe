"""The reference role: plain transformers in a process of its own, which trainer and engines are compared with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.reference_images import ImageInputs
from offbeat_core import Floats, Ids, Image, Inspection, ModelError, SamplingParams, layer_point
from offbeat_run import log_line, log_start
from offbeat_training import record_points

AS_SET: Final = "as set"
"""Name of the reading that is the run's own."""
CUT_FIRST: Final = "a cut before the temperature is applied"
SOFT_CAP: Final = "a soft cap on logits"
"""Beginning of the names of readings that change the head."""
_SAMPLES_OF_OTHER_PROMPTS: Final = 2
_TEMPERATURES: Final = tuple(round(0.05 * step, 2) for step in range(1, 41))
_DRAWN_TEMPERATURES: Final = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Fewer: samples tell temperatures less exactly than log-probabilities do."""
_BEYOND_CUT_NATS: Final = 5.0
_MOST_LEFT_OUT: Final = 16
"""Tokens at the beginning of a prompt, of which each number is tried."""
_SOFT_CAPS: Final = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0)
_PENALTIES: Final = (0.9, 1.05, 1.1, 1.2, 1.3)
_SUBTRACTED: Final = (0.1, 0.2, 0.5, 1.0, 1.5)
"""Presence and frequency penalties."""
_MOST_CUT_OFF: Final = 4
"""Tokens at the end of a prompt, likewise."""
ONE_TOKEN: Final = "another logit of token"
"""Beginning of the names of readings that change one token of the vocabulary."""


class ReferenceRole:
    """One model of transformers, in float32 and rounded to the formats that the two sides compute in.

    Args:
        config: of the run.
        model_path: folder with the weights that are compared.
        num_threads: of the process.
    """

    def __init__(self, *, config: GrpoConfig, model_path: str, num_threads: int) -> None:
        log_start("cpu", num_threads)
        self._config, self._folder = config, Path(model_path)
        self._models: dict[str, Any] = {}
        torch.set_num_threads(num_threads)
        log_line("ready")

    def _model(self, dtype: str) -> Any:
        if dtype not in self._models:
            trusts = self._config.model.trust_remote_code
            try:
                config = AutoConfig.from_pretrained(self._folder, trust_remote_code=trusts)
                sees = getattr(config, "vision_config", None) is not None
                model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
                    self._folder,
                    dtype=getattr(torch, dtype),
                    attn_implementation="sdpa",
                    trust_remote_code=trusts,
                )
            except (OSError, ValueError, KeyError) as error:
                raise ModelError(f"{self._folder}: transformers does not load it: {error}") from error
            self._models[dtype] = model.eval()
            log_line(f"loaded {self._folder} in {dtype}")
        return self._models[dtype]

    @torch.no_grad()
    def inspect(
        self, ids: Ids, layer: int | None, dtype: str, position_scale: float = 1.0, given: Floats | None = None
    ) -> Inspection:
        """See `InspectedEngine.inspect`; what would be computed in `dtype`, with positions times a number.

        `given` [T, width], or without the last token, takes the place of the hidden states that enter the layer.
        """
        model = self._model(dtype)
        with record_points(model, layer) as found, _entering(model, layer, given), _leaving(model, layer) as left:
            self._logits(ids if given is None else ids[: len(given)], dtype, position_scale)
        return {point: values.numpy() for point, values in (found | left).items()}

    @torch.no_grad()
    def logprobs(self, ids: Ids, dtype: str, temperature: float, images: Sequence[Image] = ()) -> Floats:
        """[T] of each token after those before it, nats, 0 for the first, computed in `dtype`."""
        given = self._image_inputs(ids, images) if images else {}
        scored = _chosen(self._logits(ids, dtype, given=given)[:-1] / temperature, ids, 1)
        return np.concatenate(([0.0], scored)).astype(np.float32)

    def _logits(
        self, ids: Ids, dtype: str, position_scale: float = 1.0, given: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """[T, V] float32; `given` are arguments for images, of which the model makes positions by itself."""
        tokens = torch.from_numpy(ids).long()[None]
        if given:
            pictured: Tensor = self._model(dtype)(tokens, use_cache=False, **given).logits[0]
            return pictured.float()
        places = torch.arange(len(ids))[None]
        # Rotation takes any number; a table of positions would not, and no family of today's has one.
        places = places if position_scale == 1 else places * position_scale
        logits: Tensor = self._model(dtype)(tokens, use_cache=False, position_ids=places).logits[0]
        return logits.float()

    @torch.no_grad()
    def sampling_errors(
        self, sequences: list[tuple[Ids, int]], reported: list[Floats], params: SamplingParams
    ) -> dict[str, float]:
        """Mean distance of reported log-probabilities from those of several readings of the sampling settings, nats.

        Where none of these explains what was reported, prompts are tried that an engine may have read instead.

        Args:
            sequences: [T] token ids, and how many of them are the prompt.
            reported: [T - prompt] of each, by the engine.
            params: as the run has them.
        """
        pairs, temperature = list(zip(sequences, reported, strict=True)), params.temperature or 1.0
        errors, right = dict[str, list[Floats]](), list[Floats]()
        for (ids, num_prompt), logprobs in pairs:
            every = self._logits(ids, "float32")
            logits = every[num_prompt - 1 : -1]
            right.append(_chosen(logits / temperature, ids, num_prompt))
            ranked_2N = (logits / temperature).log_softmax(-1).topk(2).values.T.numpy()
            for name, other in zip(("likeliest", "second likeliest"), ranked_2N, strict=True):
                of_other = f"each token has the log-probability of the {name} one"
                errors.setdefault(of_other, []).append(np.abs(other - logprobs))
            for name, changed in _readings(logits, ids, num_prompt, params):
                errors.setdefault(name, []).append(np.abs(_chosen(changed, ids, num_prompt) - logprobs))
            if num_prompt > 1:
                for name, scored in _misplaced(every / temperature, ids, num_prompt):
                    errors.setdefault(name, []).append(np.abs(scored - logprobs)[1:])  # the first has none before
        if right:
            joined = np.concatenate(reported)
            for name, scored in _as_numbers(np.concatenate(right), joined):
                errors[name] = [np.abs(scored - joined)]
        as_set = _mean(errors.get(AS_SET, []))
        if min(map(_mean, errors.values()), default=0.0) >= 0.1 * as_set:
            errors |= self._one_token(pairs, temperature)
        if min(map(_mean, errors.values()), default=0.0) >= 0.1 * as_set:
            for (ids, num_prompt), logprobs in pairs[:_SAMPLES_OF_OTHER_PROMPTS]:  # dozens of passes for each
                prompts = self._other_prompts(ids[:num_prompt])
                found = {name: self._after(prompt, ids, num_prompt, temperature) for name, prompt in prompts.items()}
                for name, scored in found.items():
                    errors.setdefault(name, []).append(np.abs(scored - logprobs))
                others = [other[:start] for other, start in sequences if not np.array_equal(other, ids)]
                distances = [np.abs(self._after(each, ids, num_prompt, temperature) - logprobs) for each in others]
                if distances:
                    name = "the prompt of another sample"
                    errors.setdefault(name, []).append(min(distances, key=lambda distance: float(distance.mean())))
        return {name: _mean(parts) for name, parts in errors.items()}

    def _after(self, prompt: Ids, ids: Ids, num_prompt: int, temperature: float) -> Floats:
        """[N] log-probabilities of what was sampled, after another prompt."""
        logits = self._logits(np.concatenate([prompt, ids[num_prompt:]]), "float32")[len(prompt) - 1 : -1]
        return _chosen(logits / temperature, ids, num_prompt)

    def _one_token(
        self, pairs: Sequence[tuple[tuple[Ids, int], Floats]], temperature: float
    ) -> dict[str, list[Floats]]:
        """Find the token whose logit, changed by a number b, gives what was reported; left out, b is -inf.

        All other tokens are then exp(right - reported) = 1 + (e^b - 1) p times less likely, with p of that token.
        """
        products, squares, left = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        for (ids, num_prompt), logprobs in pairs:
            p_NV = (self._logits(ids, "float32")[num_prompt - 1 : -1] / temperature).softmax(-1).double()
            token_N = torch.from_numpy(ids[num_prompt:]).long()
            p_N = p_NV.gather(-1, token_N[:, None])[:, 0]
            less_N = torch.expm1((p_N.log() - torch.from_numpy(logprobs)).clamp(max=20.0))
            # A token that was sampled says nothing of itself.
            products = products + (less_N @ p_NV).index_add(0, token_N, -less_N * p_N)
            squares = squares + p_NV.square().sum(0).index_add(0, token_N, -p_N.square())
            left = left + less_N.square().sum().expand(len(products)).index_add(0, token_N, -less_N.square())
        change = products / squares.clamp_min(1e-9)
        token = int((left - change * products).argmin())
        factor = 1 + float(change[token].clamp_min(-1.0))
        shift = float(np.log(factor)) if factor > 1e-3 else -np.inf
        name, parts = f"{ONE_TOKEN} {token} ({shift * temperature:+.2g})", list[Floats]()
        for (ids, num_prompt), logprobs in pairs:
            logits = self._logits(ids, "float32")[num_prompt - 1 : -1] / temperature
            logits[:, token] += shift
            parts.append(np.abs(_chosen(logits, ids, num_prompt) - logprobs))
        return {name: parts}

    @cached_property
    def _image_inputs(self) -> ImageInputs:
        return ImageInputs(self._folder, self._model("float32").config)

    @torch.no_grad()
    def image_errors(
        self, sequences: list[tuple[Ids, int, tuple[Image, ...]]], reported: list[Floats], temperature: float
    ) -> dict[str, float]:
        """Mean distance of log-probabilities from those of several readings of the images, nats.

        Args:
            sequences: [T] token ids, how many of them are the prompt, and its images.
            reported: [T - prompt] of each.
            temperature: of sampling.
        """
        errors = dict[str, list[Floats]]()
        for (ids, num_prompt, images), logprobs in zip(sequences, reported, strict=True):
            right = (AS_SET, self._image_inputs(ids, images))
            for name, given in (right, *self._image_inputs.readings(ids, images)):
                scored = _chosen(
                    self._logits(ids, "float32", given=given)[num_prompt - 1 : -1] / temperature, ids, num_prompt
                )
                errors.setdefault(name, []).append(np.abs(scored - logprobs))
        return {name: _mean(parts) for name, parts in errors.items()}

    @torch.no_grad()
    def drawn_likelihoods(self, sequences: list[tuple[Ids, int]], params: SamplingParams) -> dict[str, float]:
        """Log-likelihood of what was sampled under several readings of the sampling settings, nats.

        Args:
            sequences: [T] token ids, and how many of them are the prompt.
            params: as the run has them.
        """
        found, expected, seen = dict[str, float](), torch.zeros(1), list[Ids]()
        for ids, num_prompt in sequences:
            logits = self._logits(ids, "float32")[num_prompt - 1 : -1]
            # What should have been cut costs something more than it does uncut: rounding moves the border of a cut.
            least = _chosen(logits / (params.temperature or 1.0), ids, num_prompt) - _BEYOND_CUT_NATS
            for name, reading in _drawn_readings(params):
                scored = _chosen(_cut(logits / (reading.temperature or 1.0), reading), ids, num_prompt)
                found[name] = found.get(name, 0.0) + float(np.maximum(scored, least).sum())
            if params.is_cut and params.temperature not in (0.0, 1.0):
                scored = _chosen(_cut(logits, params) / params.temperature, ids, num_prompt)
                found[CUT_FIRST] = found.get(CUT_FIRST, 0.0) + float(np.maximum(scored, least).sum())
            expected = expected + _cut(logits / (params.temperature or 1.0), params).softmax(-1).double().sum(0)
            seen.append(ids[num_prompt:])
        if seen:
            count = torch.from_numpy(np.bincount(np.concatenate(seen), minlength=len(expected))).double()
            # The least that its best logit gains, less what the best of a whole vocabulary gains by chance.
            gain = count * (count / expected.clamp_min(1e-9)).clamp_min(1e-9).log() - count + expected
            gain = gain * (expected > 1e-3) - np.log(len(expected))
            token = int(gain.argmax())
            often = float(count[token] / expected[token])
            found[f"{ONE_TOKEN} {token}, {often:.2g} times as frequent,"] = found[AS_SET] + float(gain[token])
        return found

    def _other_prompts(self, prompt: Ids) -> dict[str, Ids]:
        """Return prompts that an engine may have read in place of this one."""
        config = self._model("float32").config.get_text_config()
        special = {getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        first = {each for each in special if isinstance(each, int)} | {0, 1, 2, int(prompt[0])}
        found = {
            f"a token before the prompt ({token})": np.concatenate(([np.int32(token)], prompt)).astype(np.int32)
            for token in sorted(first)
        }
        for number in range(1, min(len(prompt), _MOST_LEFT_OUT + 1)):
            found[f"the prompt without its first {number} tokens"] = prompt[number:]
        for number in range(1, min(len(prompt), _MOST_CUT_OFF + 1)):
            cut = "token" if number == 1 else f"{number} tokens"
            found[f"the prompt without its last {cut}"] = prompt[:-number]
        for number in (2**power for power in range(2, 14)):
            if len(prompt) - number > _MOST_LEFT_OUT:
                found[f"the last {number} tokens of the prompt"] = prompt[-number:]
        for token in sorted(first | {int(prompt[-1])}):
            found[f"a token behind the prompt ({token})"] = np.append(prompt, np.int32(token))
        return found

    def close(self) -> None:
        log_line("ended")


@contextmanager
def _entering(model: Any, layer: int | None, given: Floats | None) -> Iterator[None]:
    """Give a layer these hidden states in place of its own, where they are as wide."""
    if layer is None or given is None or given.shape[1] != model.config.get_text_config().hidden_size:
        yield
        return

    def put(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = positional[0] if positional else named["hidden_states"]
        states = torch.from_numpy(given).to(own.dtype).reshape(own.shape)
        return ((states, *positional[1:]), named) if positional else ((), {**named, "hidden_states": states})

    hook = model.get_decoder().layers[layer].register_forward_pre_hook(put, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _leaving(model: Any, layer: int | None) -> Iterator[dict[str, Tensor]]:
    """Record what a layer gives to the next one."""
    left = dict[str, Tensor]()
    if layer is None:
        yield left
        return

    def note(_: Any, __: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        left[layer_point(layer)] = states.reshape(-1, states.shape[-1]).float()

    hook = model.get_decoder().layers[layer].register_forward_hook(note)
    try:
        yield left
    finally:
        hook.remove()


def _mean(parts: Sequence[Floats]) -> float:
    return float(np.concatenate(parts).mean()) if parts else 0.0


def _chosen(logits: Tensor, ids: Ids, num_prompt: int) -> Floats:
    """[N] log-probabilities of the tokens after the prompt."""
    target = torch.from_numpy(ids[num_prompt:, None]).long()
    found: Floats = logits.log_softmax(-1).gather(-1, target)[:, 0].numpy()
    return found


def _misplaced(logits_TV: Tensor, ids: Ids, num_prompt: int) -> Iterator[tuple[str, Floats]]:
    """Yield log-probabilities that come of an index which is off by one."""
    before = logits_TV[num_prompt - 2 : -2]
    yield "each token has the log-probability of the one before", _chosen(before, ids[:-1], num_prompt - 1)
    yield "each token is scored by the logits of the place before", _chosen(before, ids, num_prompt)
    yield "each token is scored by the logits of the place behind", _chosen(logits_TV[num_prompt:], ids, num_prompt)
    here = logits_TV[num_prompt - 1 : -1]
    for name, places in ("before", 1), ("behind", -1):
        other = np.concatenate([ids[:num_prompt], np.roll(ids[num_prompt:], places)])
        yield f"each place scores the token {name} the right one", _chosen(here, other, num_prompt)


def _as_numbers(right: Floats, reported: Floats) -> Iterator[tuple[str, Floats]]:
    """Yield what may have been made of right log-probabilities as numbers: a factor, a bound, a coarser format."""
    times = float((reported * right).sum() / max(float(np.square(right).sum()), 1e-30))
    base = next((base for base in (2, 10) if abs(times * np.log(base) - 1) < 1e-3), None)
    if abs(times - 1) > 1e-2:
        yield f"{times:.3g} times the right ones" if base is None else f"logarithms to base {base}", times * right
    yield f"none is below {reported.min():.3g}", np.maximum(right, reported.min())
    for name in ("bfloat16", "float16"):
        yield f"rounded to {name}", torch.from_numpy(right).to(getattr(torch, name)).float().numpy()


def _readings(logits: Tensor, ids: Ids, num_prompt: int, params: SamplingParams) -> Iterator[tuple[str, Tensor]]:
    """Yield readings of the settings, each with the logits that it makes of the model's."""
    temperature = params.temperature or 1.0
    scaled = logits / temperature
    yield AS_SET, scaled
    for other in (*_TEMPERATURES, 1 / temperature):
        if other != temperature:
            yield f"temperature = {other:g} in place of {temperature:g}", logits / other
    if params.is_cut:
        yield "top_k, top_p and min_p cut what is reported", _cut(scaled, params)
    for top_k in (1, 20, 50) if not params.top_k else ():
        yield f"top_k = {top_k} in place of none", _cut(scaled, SamplingParams(top_k=top_k))
    for top_p in (0.8, 0.9, 0.95) if params.top_p == 1 else ():
        yield f"top_p = {top_p:g} in place of 1", _cut(scaled, SamplingParams(top_p=top_p))
    for cap in _SOFT_CAPS:
        yield f"{SOFT_CAP} of {cap:g}", cap * torch.tanh(logits / cap) / temperature
    for penalty in _PENALTIES:
        yield f"a repetition penalty of {penalty:g}", _penalised(logits, ids, num_prompt, penalty) / temperature
        of_reply = _penalised(logits, ids[num_prompt:], 0, penalty) / temperature
        yield f"a repetition penalty of {penalty:g} on what was sampled", of_reply
    counts = torch.nn.functional.one_hot(torch.from_numpy(ids[num_prompt:-1]).long(), logits.shape[-1])
    counts = torch.cat([torch.zeros_like(logits[:1]), counts.cumsum(0).to(logits.dtype)])
    for penalty in _SUBTRACTED:
        yield f"a frequency penalty of {penalty:g}", (logits - penalty * counts) / temperature
        yield f"a presence penalty of {penalty:g}", (logits - penalty * counts.clamp(max=1)) / temperature


def _drawn_readings(params: SamplingParams) -> Iterator[tuple[str, SamplingParams]]:
    """Yield readings of the settings that samples may have been drawn by."""
    yield AS_SET, params
    if params.is_cut:
        none: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = [name for name in none if getattr(params, name) != none[name]]
        for name in given:
            yield f"{name} not heeded", replace(params, **{name: none[name]})  # type: ignore[arg-type]
        if len(given) > 1:
            yield " and ".join(given) + " not heeded", replace(params, top_k=0, top_p=1.0, min_p=0.0)
    for other in _DRAWN_TEMPERATURES:
        if other != params.temperature:
            yield f"temperature = {other:g} in place of {params.temperature:g}", replace(params, temperature=other)
    for top_k in (1, 5, 10, 20, 50, 100) if not params.top_k else ():
        yield f"top_k = {top_k} in place of none", replace(params, top_k=top_k)
    for top_p in (0.5, 0.7, 0.8, 0.9, 0.95) if params.top_p == 1 else ():
        yield f"top_p = {top_p:g} in place of 1", replace(params, top_p=top_p)
    for min_p in (0.02, 0.05, 0.1, 0.2) if not params.min_p else ():
        yield f"min_p = {min_p:g} in place of none", replace(params, min_p=min_p)


def _cut(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return logits with those at -inf that are cut; top_k, then top_p, then min_p."""
    logits = logits.clone()
    if params.top_k:
        least = logits.topk(params.top_k, -1).values[:, -1:]
        logits[logits < least] = -torch.inf
    if params.top_p < 1:
        ordered, places = logits.softmax(-1).sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        logits[torch.zeros_like(beyond).scatter(-1, places, beyond)] = -torch.inf
    if params.min_p:
        probabilities = logits.softmax(-1)
        logits[probabilities < params.min_p * probabilities.amax(-1, keepdim=True)] = -torch.inf
    return logits


def _penalised(logits: Tensor, ids: Ids, num_prompt: int, penalty: float) -> Tensor:
    """Return logits with those of tokens that came before divided (or, below 0, multiplied) by a penalty."""
    logits = logits.clone()
    for row in range(len(logits)):
        seen = torch.from_numpy(np.unique(ids[: num_prompt + row])).long()
        before = logits[row, seen]
        logits[row, seen] = torch.where(before > 0, before / penalty, before * penalty)
    return logits
