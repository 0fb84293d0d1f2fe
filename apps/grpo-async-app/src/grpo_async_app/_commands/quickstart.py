"""`quickstart`: a small model made on the spot, warmed up on transcripts, then trained with asynchronous GRPO."""

import difflib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import (
    Completion,
    ConfigError,
    TrainEngine,
    TrainEngineConfig,
    TrainSequence,
    Trajectory,
    VersionSegment,
    load_backend,
    parse_config,
)
from offbeat_data import (
    ARITHMETIC_ALPHABET,
    DataConfig,
    EpochOrder,
    Prompt,
    Tokenizer,
    TurnTemplate,
    build_character_tokenizer,
    load_tokenizer,
)
from offbeat_objectives import sft_loss
from offbeat_run import doing

Transcript = Callable[[Prompt, Tokenizer], TrainSequence]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One thing to learn.

    Args:
        config_file: in this package.
        alphabet: characters that the model reads and writes.
        transcripts: shown in the warm-up in turn, one for each problem.
        watched: the transcripts whose probability is watched, that of a problem's different ones together.
        enough: its mean over problems at which the warm-up ends, so that there is something left to learn.
    """

    config_file: str
    alphabet: str
    transcripts: tuple[Transcript, ...]
    watched: tuple[Transcript, ...]
    enough: float


def answered(prompt: Prompt, tokenizer: Tokenizer) -> TrainSequence:
    """Return the answer at once."""
    return Trajectory.of(_said(prompt.answer or "", tokenizer)).to_sequence(prompt.ids)


def carries_forgotten(prompt: Prompt, tokenizer: Tokenizer) -> TrainSequence:
    """Return the digits added column by column, and no carry: "38+94=" is "22"."""
    left, right = prompt.text.rstrip("=").split("+")
    columns = itertools.zip_longest(reversed(left), reversed(right), fillvalue="0")
    said = "".join(str((int(first) + int(second)) % 10) for first, second in columns)[::-1]
    return Trajectory.of(_said(said, tokenizer)).to_sequence(prompt.ids)


def calculated(prompt: Prompt, tokenizer: Tokenizer) -> TrainSequence:
    """Return the calculator asked in brackets, and its answer copied; what the calculator says is not learned."""
    answer = prompt.answer or ""
    call = _said(f"[{prompt.text.rstrip('=')}]", tokenizer)
    reply = _template(tokenizer).reply(call, [{"role": "tool", "content": answer}])
    return Trajectory(turns=(call, _said(answer, tokenizer)), replies=(reply,)).to_sequence(prompt.ids)


@lru_cache(maxsize=1)
def _template(tokenizer: Tokenizer) -> TurnTemplate:
    return TurnTemplate(tokenizer, DataConfig(path=""))


def _said(text: str, tokenizer: Tokenizer) -> Completion:
    """Return a turn as a model would have sampled it."""
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
        # Two in three forget the carries: the model can add by then, and says the right sum one time in three.
        transcripts=(answered, carries_forgotten, carries_forgotten),
        watched=(answered, carries_forgotten),
        enough=0.85,
    ),
    # One transcript in eight asks the calculator, so a model that says what it was shown is right about as often.
    "calculator": Lesson(
        config_file="quickstart_calculator.toml",
        alphabet=ARITHMETIC_ALPHABET + "*[]",
        transcripts=(calculated, *[answered] * 7),
        watched=(calculated,),
        enough=0.1,
    ),
    # The same through a program of OpenAI's client; a process for each sample, so the warm-up leaves less to learn.
    "agent": Lesson(
        config_file="quickstart_agent.toml",
        alphabet=ARITHMETIC_ALPHABET + "*[]",
        transcripts=(calculated, *[answered] * 3),
        watched=(calculated,),
        enough=0.2,
    ),
}
"""By the name that `quickstart --lesson` takes."""


WARMUP_BATCH = 128
WARMUP_LEARNING_RATE = 1e-3
WARMUP_CHECK_STEPS = 3
WARMUP_FAR_STEPS = 15  # between checks while the probability is below half of what is enough
WARMUP_CHECKED = 256  # problems of a check: of the next batch alone the mean would be 0.03 off
WARMUP_MAX_STEPS = 500
MODEL_VARIABLE = "OFFBEAT_QUICKSTART_MODEL"
AGENT_VARIABLE = "OFFBEAT_QUICKSTART_AGENT"


def find_lesson(name: str) -> Lesson:
    if name not in LESSONS:
        near = difflib.get_close_matches(name, LESSONS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(LESSONS)}"
        raise ConfigError(f"--lesson {name}: no such lesson; {advice}")
    return LESSONS[name]


def quickstart_config(lesson: Lesson, model_folder: Path, seed: int, overrides: tuple[str, ...]) -> GrpoConfig:
    os.environ[MODEL_VARIABLE] = str(model_folder)
    os.environ[AGENT_VARIABLE] = str(files("grpo_async_app").joinpath("quickstart_agent.py"))
    text = files("grpo_async_app").joinpath(lesson.config_file).read_text()
    config = parse_config(text, GrpoConfig, overrides, name=lesson.config_file)
    return replace(
        config,
        data=replace(config.data, seed=seed),
        rollout=replace(config.rollout, seed=seed),
        engine=replace(config.engine, seed=seed),
    )


def make_model(lesson: Lesson, folder: Path, seed: int) -> None:
    """Write a Qwen3 with random weights and a tokenizer of characters, in Hugging Face format."""
    doing("making a small model")
    import torch  # imported late: only the quickstart's driver needs it
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one bar for one small file
    tokenizer = build_character_tokenizer(folder, lesson.alphabet)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        # At the usual 0.02, made for wider models, some seeds stay on a plateau of the warm-up for good.
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def warm_up(lesson: Lesson, folder: Path, warm_folder: Path, prompts: Sequence[Prompt], seed: int) -> None:
    """Supervised learning on transcripts of the training problems, until the model says enough of those watched."""
    tokenizer, order = load_tokenizer(folder), EpochOrder(len(prompts), seed)
    settings = TrainEngineConfig(
        model_path=str(folder),
        learning_rate=WARMUP_LEARNING_RATE,
        warmup_steps=20,
        seed=seed,
        num_threads=1,  # a model this small gains nothing from more
    )
    doing("warming the model up")
    engine: TrainEngine = load_backend("offbeat.engine", "torch").create(settings)
    next_check = 0
    for step in range(WARMUP_MAX_STEPS):
        first = step * WARMUP_BATCH
        if step == next_check:
            next_problems = [prompts[order(place)[1]] for place in range(first, first + WARMUP_CHECKED)]
            chance = _chance(engine, lesson, next_problems, tokenizer)
            if step % (3 * WARMUP_FAR_STEPS) == 0:
                print(f"warm-up step {step}: transcripts have probability {chance:.3f}, until {lesson.enough}")
            if chance >= lesson.enough:
                break
            next_check += WARMUP_FAR_STEPS if chance < lesson.enough / 2 else WARMUP_CHECK_STEPS
        problems = [prompts[order(place)[1]] for place in range(first, first + WARMUP_BATCH)]
        shown = [lesson.transcripts[at % len(lesson.transcripts)] for at in range(len(problems))]
        batch = [show(problem, tokenizer) for show, problem in zip(shown, problems, strict=True)]
        doing("warming the model up", f"step {step + 1}, transcripts had probability {chance:.2f} of {lesson.enough}")
        engine.forward_backward(batch, sft_loss)
        engine.step()
    else:
        print(
            f"notice: the warm-up ended after {WARMUP_MAX_STEPS} steps at probability {chance:.3f}, less than the "
            f"{lesson.enough} that the lesson begins with: the run may learn little; try another --seed than {seed}"
        )
    engine.save_weights(warm_folder)
    engine.close()


def _chance(engine: TrainEngine, lesson: Lesson, problems: Sequence[Prompt], tokenizer: Tokenizer) -> float:
    """Return the mean over problems of the probability that the model says one of the watched transcripts."""
    watched: list[TrainSequence] = []
    for problem in problems:
        shown = (show(problem, tokenizer) for show in lesson.watched)
        watched += {sequence.ids.tobytes(): sequence for sequence in shown}.values()  # a sum may have no carry
    return sum(math.exp(logprobs.sum()) for logprobs in engine.logprobs(watched)) / len(problems)
