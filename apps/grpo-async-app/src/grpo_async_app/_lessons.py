"""What a quickstart can teach: a configuration, and the transcripts that a fresh model is warmed up on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from offbeat_data import ARITHMETIC_ALPHABET, DataConfig, Prompt, Tokenizer, TurnTemplate
from offbeat_types import Completion, TrainSequence, Trajectory, VersionSegment

Transcript = Callable[[Prompt, Tokenizer], TrainSequence]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One thing to learn.

    Args:
        config_file: in this package.
        alphabet: characters that the model reads and writes.
        transcripts: shown in the warm-up in turn, one for each problem.
        wanted: the transcript whose probability is watched.
        enough: its mean probability at which the warm-up ends, so that there is something left to learn.
    """

    config_file: str
    alphabet: str
    transcripts: tuple[Transcript, ...]
    wanted: Transcript
    enough: float


def answered(prompt: Prompt, tokenizer: Tokenizer) -> TrainSequence:
    """The answer at once."""
    return Trajectory.of(_said(prompt.answer or "", tokenizer)).to_sequence(prompt.ids)


def calculated(prompt: Prompt, tokenizer: Tokenizer) -> TrainSequence:
    """The calculator asked in brackets, and its answer copied; what the calculator says is not learned."""
    answer = prompt.answer or ""
    call = _said(f"[{prompt.text.rstrip('=')}]", tokenizer)
    told = _template(tokenizer).reply(call, [{"role": "tool", "content": answer}])
    return Trajectory(turns=(call, _said(answer, tokenizer)), replies=(told,)).to_sequence(prompt.ids)


@lru_cache(maxsize=1)
def _template(tokenizer: Tokenizer) -> TurnTemplate:
    return TurnTemplate(tokenizer, DataConfig(path=""))


def _said(text: str, tokenizer: Tokenizer) -> Completion:
    """A turn as a model would have sampled it."""
    [ids] = tokenizer.encode([text], add_special_tokens=False)
    assert tokenizer.eos_id is not None
    ids = np.append(ids, np.int32(tokenizer.eos_id))
    return Completion(
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        segments=(VersionSegment(version=0, num_tokens=len(ids)),),
        stop_reason="eos",
        text=text,
    )


LESSONS: Final[dict[str, Lesson]] = {
    "addition": Lesson(
        config_file="quickstart.toml",
        alphabet=ARITHMETIC_ALPHABET,
        transcripts=(answered,),
        wanted=answered,
        enough=0.28,  # greedily about 4 of 10 are then right
    ),
    # One transcript in eight asks the calculator, so a model that says what it was shown is right about as often.
    "calculator": Lesson(
        config_file="quickstart_calculator.toml",
        alphabet=ARITHMETIC_ALPHABET + "*[]",
        transcripts=(calculated, *[answered] * 7),
        wanted=calculated,
        enough=0.1,
    ),
}
"""By the name that `quickstart --lesson` takes."""
