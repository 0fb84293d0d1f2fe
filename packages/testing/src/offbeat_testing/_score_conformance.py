"""What an engine promises that scores tokens sampled by others; a part of `RolloutConformance`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_testing._engine_suite import EngineSuite
from offbeat_testing._reference import reference_logprobs
from offbeat_types import ConfigError, DataError, RolloutEngine, ScoreRequest, ScoringEngine

_DRAW = np.random.default_rng(3)
_PROMPT = _DRAW.integers(3, 250, 9).astype(np.int32)
_CONTINUATIONS = tuple(_DRAW.integers(3, 250, length).astype(np.int32) for length in (12, 0, 1, 40))


class ScoreConformance(EngineSuite):
    """For engines that declare `scores`; the others skip it."""

    def test_scores_are_those_of_transformers(self, model_folder: Path, reference: Any) -> None:
        """Given tokens have the reference's log-probabilities, at 1 and, where the engine can, another temperature."""

        async def check(engine: RolloutEngine) -> None:
            scorer = _scorer(engine)
            for temperature in (1.0, 0.7):
                request = ScoreRequest(
                    request_id=f"s{temperature}",
                    prompt_ids=_PROMPT,
                    continuations=_CONTINUATIONS,
                    temperature=temperature,
                )
                try:
                    scores = await scorer.score(request)
                except ConfigError:
                    if temperature == 1.0:
                        raise
                    continue
                for ids, found in zip(_CONTINUATIONS, scores, strict=True):
                    whole = np.concatenate([_PROMPT, ids])
                    expected = reference_logprobs(reference, whole, temperature=temperature)[len(_PROMPT) :]
                    np.testing.assert_allclose(found, expected, atol=self.tolerance, rtol=0)

        self.run(model_folder, check)

    def test_what_no_model_can_score_is_refused(self, model_folder: Path) -> None:
        """Unknown ids and sequences that are too long."""

        async def check(engine: RolloutEngine) -> None:
            scorer = _scorer(engine)
            for ids, words in (([10**7], "tokenizer"), ([5] * 600, "max_model_len")):
                request = ScoreRequest(request_id="s", prompt_ids=_PROMPT, continuations=(np.asarray(ids, np.int32),))
                with pytest.raises(DataError, match=words):
                    await scorer.score(request)

        self.run(model_folder, check)


def _scorer(engine: RolloutEngine) -> ScoringEngine:
    if not engine.capabilities.scores:
        pytest.skip("the engine does not score")
    return engine  # type: ignore[return-value]
