"""Gathers evidence: starts trainer, engine and reference, and has the engine sample the run's prompts."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from grpo_async_app._diagnosis.causes import Diagnosis, Side, find_causes
from grpo_async_app._diagnosis.evidence import Evidence, ExaminedSample, LaggedTokens, Occasion
from grpo_async_app._diagnosis.inputs import add_input_findings
from grpo_async_app._diagnosis.settings import Examined
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._roles.groups import SampledGroup, load_groups
from grpo_async_app._run.backend import LOOP_FOLDER
from grpo_async_app._run.interruption import run_interruptible
from grpo_async_app._run.log.activity import describe_start, following
from grpo_async_app._run.session import watched_driver
from offbeat_actors import ActorHandle, gather_or_cancel
from offbeat_core import (
    EMBEDDING,
    Fingerprint,
    Floats,
    GenerateRequest,
    Ids,
    Image,
    Inspection,
    SamplingParams,
    TrainSequence,
    fingerprint,
    layer_point,
    read_eos_ids,
    read_model_json,
)
from offbeat_run import doing
from offbeat_training import TensorFolder, whole_box

_MAX_TOKENS: Final = 128
"""Sampled of each prompt: two sequences of 4,096 numbers in 128 places and 36 layers are 150 MB."""
_PER_PROMPT: Final = 2
_PICTURED: Final = 4
"""Prompts with images that are sampled."""
_REPLY_TOKENS: Final = 8
"""Tokens, of another prompt, that a later turn reads after the one before."""
_SCORED_SINGLY: Final = 4
"""Samples that the trainer scores by themselves as well."""
_PROMPTS_OF_SEEDS: Final = 3
_SEED: Final = 1_000_003
_IMAGE_TOKENS: Final = (
    *("image_token_id", "image_token_index", "vision_start_token_id", "vision_end_token_id"),
    *("boi_token_id", "eoi_token_id", "boi_token_index", "eoi_token_index"),
)
"""Keys of config.json under which families name the tokens of an image."""


def examine(asked: Examined) -> Diagnosis:
    """Start the roles, gather the evidence, and name the causes."""
    preflight = asked.preflight
    asked.log_folder.mkdir(parents=True, exist_ok=True)
    with watched_driver(preflight.config.liveness, asked.log_folder):
        fleet = Fleet(preflight.run, str(preflight.model.path), asked.log_folder)
        return run_interruptible(_examine(asked, fleet), fleet.kill)


async def _examine(asked: Examined, fleet: Fleet) -> Diagnosis:
    async with fleet:
        async with following(lambda: describe_start(fleet.places())):
            await fleet.start_training(asked.preflight.placement, asked.preflight.num_updates, asked.checkpoint)
            reference = await fleet.start_reference(asked.weights)
        examination = _Examination(asked, fleet, reference)
        evidence = await examination.gather()
        doing("comparing")
        found = await find_causes(evidence, examination.inspect, examination.inspect_other, examination.explain)
        await add_input_findings(evidence, found, examination.explain_images, examination.explain_drawn)
        return found


class _Examination:
    """Calls of the roles.

    Args:
        asked: settings.
        fleet: whose trainer and engine are up.
        reference: the process of transformers' model.
    """

    def __init__(self, asked: Examined, fleet: Fleet, reference: ActorHandle) -> None:
        self._asked, self._fleet, self._reference = asked, fleet, reference
        self._config = config = asked.preflight.config
        self._deadline_s = config.async_.update_deadline_s
        [self._engine] = fleet.engines.names
        self._ids: Ids = np.zeros(0, np.int32)
        self._between: dict[Side, Inspection] = {}

    # ── gathering ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def gather(self) -> Evidence:
        """Have the engine sample on four occasions, score what it sampled on all sides, and compare weights."""
        drawn = await self._sample()
        samples, seeded = await self._score(drawn), await self._draw_by_seed()
        self._ids = max((sample.ids for sample in samples), key=len)
        trainer, saved, engine = await self._fingerprints()
        begun_with = self._saved(list(trainer), self._asked.preflight.model.path)
        ends = read_eos_ids(self._asked.preflight.model.path)
        return Evidence(
            samples=samples,
            pictured=await self._pictured(),
            num_past_end=sum(bool(np.isin(each.ids[each.num_prompt : -1], list(ends)).any()) for each in samples),
            num_cut_short=self._num_cut_short(samples, ends),
            lagged=await self._lagged(),
            engine_weights=engine,
            trainer_weights=trainer,
            saved_weights=saved,
            template_changes=self._template_changes(),
            earlier_weights=begun_with if self._has_two_versions else {},
            seeded=seeded,
            has_adapter=bool(self._config.engine.lora_rank),
            kv_format=str(self._config.rollout.options.get("kv_cache_dtype", "")),
            had_other_weights=self._has_two_versions
            # An adapter that goes alone leaves the model's weights as they were.
            and (
                bool(self._config.engine.lora_rank)
                or any(not np.array_equal(trainer[name], marks) for name, marks in begun_with.items())
            ),
        )

    def _num_cut_short(self, samples: Sequence[ExaminedSample], ends: Collection[int]) -> int:
        """Count the samples that ended before their limit without a token that ends them.

        All at one token is no limit: engines may know a tokenizer's end besides the model's.
        """
        params, longest = self._params, self._config.rollout.max_model_len - 1
        known = {*ends, *params.stop_token_ids}
        early = [each for each in samples if len(each.ids) < min(each.num_prompt + params.max_tokens, longest)]
        last = [int(each.ids[-1]) for each in early if int(each.ids[-1]) not in known]
        return len(last) if len(set(last)) > 1 and not params.stop else 0

    @property
    def _has_two_versions(self) -> bool:
        return self._asked.checkpoint is not None and self._asked.step > 0

    async def _sample(self) -> list[tuple[Occasion, Ids, int, Floats]]:
        """Sample: prompts again after an update of weights; others alone, and later turns; others together, twice."""
        engines, prompts = self._fleet.engines, self._prompts()
        third = max(1, len(prompts) // 3)
        again, alone, together = prompts[:third], prompts[third : 2 * third], prompts[2 * third :]
        if self._has_two_versions:  # the engine has started with the weights that the run began with
            engines.serve()
            doing("sampling", "under the weights before")
            await self._draw("before", again, num_samples=1)
        await engines.sync(self._fleet.offer_weights(max(self._asked.step, 1)), interrupt=False)
        doing("sampling")
        # Single samples: engines may reuse what they hold of a prompt for these, and not for groups.
        again_drawn = await self._draw("again", again, num_samples=1)
        drawn = [("before and after the update", *one) for one in again_drawn]
        first_turns = []
        for number, prompt in enumerate(alone):
            first_turns += await self._draw(f"alone-{number}", [prompt], num_samples=1)
        drawn += [("alone", *one) for one in first_turns]
        later = [np.concatenate([ids, alone[0][:_REPLY_TOKENS]]) for ids, _, _ in first_turns]
        later = [ids for ids in later if len(ids) + self._params.max_tokens <= self._config.rollout.max_model_len]
        drawn += [("a later turn", *one) for one in await self._draw("later", later, num_samples=1)]
        drawn += [("with others", *one) for one in await self._draw("together", together)]
        drawn += [("once more", *one) for one in await self._draw("repeated", together, num_samples=1)]
        return drawn  # type: ignore[return-value]

    def _prompts(self) -> list[Ids]:
        """Token ids of prompts of the run, each with another second token: no two begin alike.

        What a cache holds of one is then of no use to another, and each occasion shows what it alone does.
        """
        train = self._asked.preflight.prompts.train
        prompts = [prompt.ids for prompt in train if not prompt.pictures]
        prompts = prompts or [self._text_of(prompt.ids) for prompt in train]
        wanted = max(3, self._asked.num_samples // (2 * _PER_PROMPT))
        chosen = [prompts[index * len(prompts) // wanted % len(prompts)].copy() for index in range(wanted)]
        known = np.unique(np.concatenate(chosen))
        for number, ids in enumerate(chosen):
            ids[min(1, len(ids) - 1)] = known[number % len(known)]
        return chosen

    def _text_of(self, ids: Ids) -> Ids:
        """Return a prompt without its images: their placeholders, and the tokens around them."""
        return ids[~np.isin(ids, list(self._image_tokens))]

    @property
    def _image_tokens(self) -> set[int]:
        about = read_model_json(self._asked.preflight.model.path / "config.json")
        return {about[name] for name in _IMAGE_TOKENS if about.get(name) is not None}

    @property
    def _params(self) -> SamplingParams:
        params = self._config.rollout.sampling(self._config.engine.seed)
        return replace(params, max_tokens=min(params.max_tokens, _MAX_TOKENS))

    async def _draw_by_seed(self) -> list[tuple[Ids, Ids, Ids]]:
        """Sample prompts, one at a time, by one seed, by the same once more, and by another one."""
        if self._params.temperature == 0:
            return []
        doing("sampling", "by seeds")
        completions = []
        for number, prompt in enumerate(self._prompts()[:_PROMPTS_OF_SEEDS]):
            drawn = []
            for name, seed in (("first", _SEED), ("same", _SEED), ("other", 2 * _SEED)):
                params = replace(self._params, seed=seed)
                drawn += await self._draw(f"seed-{number}-{name}", [prompt], num_samples=1, params=params)
            if len(drawn) == 3:
                first, same, other = (ids[start:] for ids, start, _ in drawn)
                completions.append((first, same, other))
        return completions

    async def _draw(
        self,
        name: str,
        prompts: Sequence[Ids],
        *,
        num_samples: int = _PER_PROMPT,
        params: SamplingParams | None = None,
        images: tuple[Image, ...] = (),
    ) -> list[tuple[Ids, int, Floats]]:
        """Sample prompts at once: ids of prompt and completion, tokens of the prompt, log-probabilities."""
        requests = [
            GenerateRequest(
                request_id=f"{name}-{number}",
                prompt_ids=ids,
                num_samples=num_samples,
                params=params or self._params,
                images=images,
            )
            for number, ids in enumerate(prompts)
        ]
        calls = [self._fleet.engines.generate(self._engine, request, self._deadline_s) for request in requests]
        return [
            (np.concatenate([ids, one.ids]), len(ids), one.logprobs)
            for ids, completions in zip(prompts, await gather_or_cancel(calls), strict=True)
            for one in completions
            if len(one.ids)
        ]

    async def _score(self, drawn: Sequence[tuple[Occasion, Ids, int, Floats]]) -> list[ExaminedSample]:
        doing("scoring", "by the trainer")
        sequences = [TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= start) for _, ids, start, _ in drawn]
        trained: list[Floats] = await self._fleet.trainer.call(
            "logprobs", sequences, returns=list[Floats], deadline_s=self._deadline_s
        )
        singly = [
            (await self._fleet.trainer.call("logprobs", [one], returns=list[Floats], deadline_s=self._deadline_s))[0]
            for one in sequences[:_SCORED_SINGLY]
        ]
        samples = list[ExaminedSample]()
        for (occasion, ids, start, sampled), scores in zip(drawn, trained, strict=True):
            doing("scoring", f"{len(samples)} of {len(drawn)} samples, by engine and reference")
            alone = await self._call_engine("score_alone", ids, self._temperature, returns=Floats | None)
            by_dtype = {
                dtype: await self._score_by_reference(ids, dtype) for dtype in {"float32", *self._formats.values()}
            }
            samples.append(
                ExaminedSample(
                    ids=ids,
                    num_prompt=start,
                    occasion=occasion,
                    sampled=sampled,
                    alone=None if alone is None else alone[start:],
                    trained=scores[start:],
                    reference=by_dtype["float32"][start:],
                    rounded_engine=by_dtype[self._formats["rollout engine"]][start:],
                    rounded_trainer=by_dtype[self._formats["trainer"]][start:],
                    trained_alone=singly[len(samples)][start:] if len(samples) < len(singly) else None,
                )
            )
        return samples

    async def _pictured(self) -> list[ExaminedSample]:
        """Sample prompts with images, and have what was sampled scored by trainer and reference."""
        prompts = [prompt for prompt in self._asked.preflight.prompts.train if prompt.pictures][:_PICTURED]
        samples, image_tokens = list[ExaminedSample](), list(self._image_tokens)
        for number, prompt in enumerate(prompts):
            doing("sampling", "prompts with images")
            images = await asyncio.to_thread(getattr, prompt, "images")
            drawn = await self._draw(f"pictured-{number}", [prompt.ids], images=images)
            for ids, start, sampled in drawn:
                # A model may sample a placeholder, which stands for no image.
                strange = np.flatnonzero(np.isin(ids[start:], image_tokens))
                whole = start + int(strange[0]) if len(strange) else len(ids)
                if whole > start:
                    samples.append(await self._score_pictured(ids[:whole], start, sampled[: whole - start], images))
        return samples

    async def _score_pictured(self, ids: Ids, start: int, sampled: Floats, images: tuple[Image, ...]) -> ExaminedSample:
        sequence = TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= start, images=images)
        [trained] = await self._fleet.trainer.call(
            "logprobs", [sequence], returns=list[Floats], deadline_s=self._deadline_s
        )
        dtypes = {"float32", *self._formats.values()}
        by_dtype = {dtype: await self._score_by_reference(ids, dtype, images) for dtype in dtypes}
        return ExaminedSample(
            ids=ids,
            num_prompt=start,
            occasion="with images",
            sampled=sampled,
            alone=None,
            trained=trained[start:],
            reference=by_dtype["float32"][start:],
            rounded_engine=by_dtype[self._formats["rollout engine"]][start:],
            rounded_trainer=by_dtype[self._formats["trainer"]][start:],
            images=images,
        )

    async def _score_by_reference(self, ids: Ids, dtype: str, images: tuple[Image, ...] = ()) -> Floats:
        args = ("logprobs", ids, dtype, self._temperature, images)
        found: Floats = await self._reference.call(*args, returns=Floats, deadline_s=self._deadline_s)
        return found

    async def _call_engine(self, method: str, *args: object, returns: Any) -> Any:
        return await self._fleet.engines.call(self._engine, method, *args, returns=returns, deadline_s=self._deadline_s)

    @property
    def _formats(self) -> dict[Side, str]:
        return {"rollout engine": self._config.rollout.dtype, "trainer": self._config.engine.dtype}

    async def _fingerprints(self) -> tuple[dict[str, Fingerprint], dict[str, Fingerprint], dict[str, Fingerprint]]:
        """Return those of the trainer, the files and the engine; none of an engine that holds other numbers."""
        doing("comparing weights")
        marks = dict[str, Fingerprint]
        trainer: dict[str, Fingerprint] = await self._fleet.trainer.call(
            "fingerprints", returns=marks, deadline_s=self._deadline_s
        )
        saved = {} if self._config.engine.lora_rank else self._saved(list(trainer), self._asked.weights)
        if self._config.rollout.weight_format != "dtype":
            return trainer, saved, {}
        return trainer, saved, await self._call_engine("fingerprints", list(trainer), returns=marks)

    def _saved(self, names: Sequence[str], folder: Path) -> dict[str, Fingerprint]:
        dtype, found = getattr(torch, self._config.rollout.dtype), {}
        with TensorFolder(folder) as reader:
            reader.stack_experts()
            for name in names:
                if name in reader.names:
                    tensor = reader.read(name, whole_box(reader.shape(name)))
                    found[name] = fingerprint(tensor.to(dtype).float().numpy())
        return found

    # ── what the run holds ────────────────────────────────────────────────────────────────────────────────────────

    def _groups(self) -> list[SampledGroup]:
        """Groups that wait in the checkpoint to be trained on."""
        folder = self._asked.checkpoint
        if folder is None or not (folder / LOOP_FOLDER).is_dir():
            return []
        return list(load_groups(folder / LOOP_FOLDER).values())

    async def _lagged(self) -> list[LaggedTokens]:
        groups = [group for group in self._groups() if not group.pictures]
        pairs = [(group, each) for group in groups for each in group.trajectories][: self._asked.num_samples]
        if not pairs:
            return []
        sequences = [trajectory.to_sequence(group.prompt_ids) for group, trajectory in pairs]
        scores: list[Floats] = await self._fleet.trainer.call(
            "logprobs", sequences, returns=list[Floats], deadline_s=self._deadline_s
        )
        errors: dict[tuple[int, bool], list[Floats]] = {}
        for (_, trajectory), sequence, scored in zip(pairs, sequences, scores, strict=True):
            distance, start = np.abs(scored[sequence.loss_mask] - trajectory.logprobs), 0
            for turn, completion in enumerate(trajectory.turns):
                for segment in completion.segments:
                    key = (self._asked.step - segment.version, turn > 0)
                    errors.setdefault(key, []).append(distance[start : start + segment.num_tokens])
                    start += segment.num_tokens
        return [
            LaggedTokens(lag=lag, is_later_turn=is_later, errors=np.concatenate(parts))
            for (lag, is_later), parts in sorted(errors.items())
        ]

    def _template_changes(self) -> list[str]:
        """Prompts of the run that are rendered otherwise now."""
        prompts, changes = self._asked.preflight.prompts.train, dict[int, str]()
        for group in self._groups():
            if not 0 <= group.item < len(prompts) or np.array_equal(prompts[group.item].ids, group.prompt_ids):
                continue
            shared = min(len(prompts[group.item].ids), len(group.prompt_ids))
            differing = np.flatnonzero(prompts[group.item].ids[:shared] != group.prompt_ids[:shared])
            place = int(differing[0]) if len(differing) else shared
            changes[group.item] = f"prompt {group.item} differs from token {place} on"
        return list(changes.values())

    # ── layers ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def inspect(self, side: Side, layer: int | None) -> tuple[Inspection, Inspection, Inspection]:
        """Return the values of a side, of the reference, and of the reference in the side's format.

        Those of the reference within a layer come of what the side itself gave to that layer.
        """
        doing("looking into", side if layer is None else f"{side}, layer {layer}")
        found = await self._ask(side, self._ids, layer)
        if layer is None:
            self._between[side] = found
        given = None if layer is None else self._given(side, layer)
        if layer is not None and layer_point(layer) in self._between[side]:
            found = {**found, layer_point(layer): self._between[side][layer_point(layer)]}
        wanted = await self._refer(self._ids, layer, "float32", given=given)
        return found, wanted, await self._refer(self._ids, layer, self._formats[side], given=given)

    def _given(self, side: Side, layer: int) -> Floats | None:
        """[T, width] of what a side gave to a layer; None where it is the embedding, or where it did not say."""
        return self._between[side].get(layer_point(layer - 1))

    async def inspect_other(self, side: Side, layer: int, scale: float, other: int) -> Inspection:
        """Return the reference's values of another layer, or with other positions, for a side's inputs of one."""
        num_layers = sum(layer_point(number) in self._between[side] for number in range(len(self._between[side])))
        given = self._given(side, layer)
        if other != layer and layer == 0:
            given = self._between[side].get(EMBEDDING)
        if not 0 <= other < num_layers or (other != layer and given is None):
            return {}
        return await self._refer(self._ids, other, "float32", scale, given=given)

    async def explain(self, samples: Sequence[ExaminedSample], what: str) -> Mapping[str, float]:
        sequences = [(sample.ids, sample.num_prompt) for sample in samples]
        reported = [getattr(sample, what) for sample in samples]
        found: dict[str, float] = await self._reference.call(
            "sampling_errors", sequences, reported, self._params, returns=dict[str, float], deadline_s=self._deadline_s
        )
        return found

    async def explain_images(self, samples: Sequence[ExaminedSample], side: Side) -> Mapping[str, float]:
        doing("looking into", f"{side}, images")
        sequences = [(sample.ids, sample.num_prompt, sample.images) for sample in samples]
        reported = [sample.sampled if side == "rollout engine" else sample.trained for sample in samples]
        args, returns = ("image_errors", sequences, reported, self._temperature), dict[str, float]
        found: dict[str, float] = await self._reference.call(*args, returns=returns, deadline_s=self._deadline_s)
        return found

    async def explain_drawn(self, samples: Sequence[ExaminedSample]) -> Mapping[str, float]:
        """Return nothing where the engine does not draw."""
        if self._params.temperature == 0:
            return {}
        sequences = [(sample.ids, sample.num_prompt) for sample in samples]
        args, returns = ("drawn_likelihoods", sequences, self._params), dict[str, float]
        found: dict[str, float] = await self._reference.call(*args, returns=returns, deadline_s=self._deadline_s)
        return found

    async def _ask(self, side: Side, ids: Ids, layer: int | None) -> Inspection:
        returns = dict[str, Floats]
        if side == "rollout engine":
            found: Inspection = await self._call_engine("inspect", ids, layer, self._temperature, returns=returns)
        else:
            found = await self._fleet.trainer.call("inspect", ids, layer, returns=returns, deadline_s=self._deadline_s)
        return found

    async def _refer(
        self, ids: Ids, layer: int | None, dtype: str, scale: float = 1.0, given: Floats | None = None
    ) -> Inspection:
        args, returns = ("inspect", ids, layer, dtype, scale, given), dict[str, Floats]
        found: Inspection = await self._reference.call(*args, returns=returns, deadline_s=self._deadline_s)
        return found

    @property
    def _temperature(self) -> float:
        return self._config.rollout.temperature or 1.0
