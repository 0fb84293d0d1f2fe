"""The reference role: plain transformers in a process of its own, which trainer and engines are compared with."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import LOGPROB, Floats, Ids, Inspection, ModelError, SamplingParams
from offbeat_run import log_line, log_start
from offbeat_training import record_points

_TEMPERATURES: Final = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
_MOST_LEFT_OUT: Final = 16
"""Tokens at the beginning of a prompt, of which each number is tried."""
_PENALTIES: Final = (0.9, 1.05, 1.1, 1.2, 1.3)


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
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    self._folder,
                    dtype=getattr(torch, dtype),
                    attn_implementation="sdpa",
                    trust_remote_code=self._config.model.trust_remote_code,
                )
            except (OSError, ValueError, KeyError) as error:
                raise ModelError(f"{self._folder}: transformers does not load it: {error}") from error
            self._models[dtype] = model.eval()
            log_line(f"loaded {self._folder} in {dtype}")
        return self._models[dtype]

    @torch.no_grad()
    def inspect(
        self,
        ids: Ids,
        layer: int | None,
        dtype: str,
        temperature: float,
        position_scale: float = 1.0,
        position_offset: float = 0.0,
    ) -> Inspection:
        """See `InspectedEngine.inspect`; what would be computed in `dtype`, with positions changed as asked."""
        places = (torch.arange(len(ids)) * position_scale + position_offset)[None]
        # Rotation takes any number; a table of positions would not, and no family of today's has one.
        positions = places.long() if (position_scale, position_offset) == (1, 0) else places
        with record_points(self._model(dtype), layer) as found:
            logits = self._logits(ids, dtype, positions)
        logprobs = (logits / temperature).log_softmax(-1)[:-1].gather(-1, torch.from_numpy(ids[1:, None]).long())
        scored = np.concatenate(([[0.0]], logprobs.numpy())).astype(np.float32)
        return {**{point: values.numpy() for point, values in found.items()}, LOGPROB: scored}

    def _logits(self, ids: Ids, dtype: str, positions: Tensor | None = None) -> Tensor:
        """[T, V] float32."""
        tokens = torch.from_numpy(ids).long()[None]
        named = {} if positions is None else {"position_ids": positions}
        logits: Tensor = self._model(dtype)(tokens, use_cache=False, **named).logits[0]
        return logits.float()

    @torch.no_grad()
    def sampling_errors(
        self, sequences: list[tuple[Ids, int]], reported: list[Floats], params: SamplingParams
    ) -> dict[str, float]:
        """Mean distance of reported log-probabilities from those of several readings of the sampling settings, nats.

        Args:
            sequences: [T] token ids, and how many of them are the prompt.
            reported: [T - prompt] of each, by the engine.
            params: as the run has them.
        """
        sums: dict[str, float] = {}
        for (ids, num_prompt), found in zip(sequences, reported, strict=True):
            logits = self._logits(ids, "float32")[num_prompt - 1 : -1]
            target = torch.from_numpy(ids[num_prompt:, None]).long()
            readings = _readings(logits, target, ids, num_prompt, params)
            for name, prompt in self._other_prompts(ids[:num_prompt]).items():
                seen = self._logits(np.concatenate([prompt, ids[num_prompt:]]), "float32")[len(prompt) - 1 : -1]
                scaled = seen / (params.temperature or 1.0)
                readings[name] = scaled.log_softmax(-1).gather(-1, target)[:, 0].numpy()
            for name, logprobs in readings.items():
                sums[name] = sums.get(name, 0.0) + float(np.abs(logprobs - found).sum())
        return {name: total / max(sum(map(len, reported)), 1) for name, total in sums.items()}

    def _other_prompts(self, prompt: Ids) -> dict[str, Ids]:
        """Return prompts that an engine may have read in place of this one."""
        config = self._model("float32").config.get_text_config()
        special = {getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        first = {each for each in special if isinstance(each, int)} | {0, 1, 2}
        found = {
            f"a token before the prompt ({token})": np.concatenate(([np.int32(token)], prompt)).astype(np.int32)
            for token in sorted(first)
        }
        for number in range(1, min(len(prompt), _MOST_LEFT_OUT + 1)):
            found[f"the prompt without its first {number} tokens"] = prompt[number:]
        if len(prompt) > 1:
            found["the prompt without its last token"] = prompt[:-1]
        return found

    def close(self) -> None:
        log_line("ended")


def _readings(logits: Tensor, target: Tensor, ids: Ids, num_prompt: int, params: SamplingParams) -> dict[str, Floats]:
    """[N] log-probabilities under each reading of the settings."""

    def chosen(changed: Tensor) -> Floats:
        found: Floats = changed.log_softmax(-1).gather(-1, target)[:, 0].numpy()
        return found

    temperature = params.temperature or 1.0
    found = {"as set": chosen(logits / temperature)}
    for other in (1.0, *_TEMPERATURES, 1 / temperature):
        if other != temperature:
            found[f"temperature = {other:g} in place of {temperature:g}"] = chosen(logits / other)
    if params.is_cut:
        cut = _cut(logits / temperature, params)
        found["top_k, top_p and min_p cut what is reported"] = chosen(cut)
    for top_k in (1, 20, 50) if not params.top_k else ():
        found[f"top_k = {top_k} in place of none"] = chosen(_cut(logits / temperature, SamplingParams(top_k=top_k)))
    for top_p in (0.8, 0.9, 0.95) if params.top_p == 1 else ():
        found[f"top_p = {top_p:g} in place of 1"] = chosen(_cut(logits / temperature, SamplingParams(top_p=top_p)))
    for penalty in _PENALTIES:
        found[f"a repetition penalty of {penalty:g}"] = chosen(
            _penalised(logits, ids, num_prompt, penalty) / temperature
        )
    return found


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
