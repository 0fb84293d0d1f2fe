"""`quickstart`: a small model made on the spot, warmed up on addition, then trained with asynchronous GRPO."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import fmean

import numpy as np

from grpo_async_app._config import GrpoConfig
from offbeat_data import EpochOrder, Prompt, Tokenizer, build_character_tokenizer, load_tokenizer
from offbeat_objectives import sft_loss
from offbeat_run import parse_config
from offbeat_types import TrainEngine, TrainEngineConfig, TrainSequence, load_backend

WARMUP_BATCH = 128
WARMUP_LEARNING_RATE = 1e-3
WARMUP_CHECK_STEPS = 5
WARMUP_CHANCE = 0.28
"""Mean probability of the whole right answer at which the warm-up ends: greedily about 4 of 10 are then right."""
WARMUP_MAX_STEPS = 500
MODEL_VARIABLE = "OFFBEAT_QUICKSTART_MODEL"


def quickstart_config(model_folder: Path, seed: int, overrides: tuple[str, ...]) -> GrpoConfig:
    """The quickstart's configuration, with a seed for everything random."""
    os.environ[MODEL_VARIABLE] = str(model_folder)
    text = files("grpo_async_app").joinpath("quickstart.toml").read_text()
    config = parse_config(text, GrpoConfig, overrides, name="quickstart.toml")
    return replace(
        config,
        data=replace(config.data, seed=seed),
        rollout=replace(config.rollout, seed=seed),
        engine=replace(config.engine, seed=seed),
    )


def make_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 with random weights and a tokenizer of characters, in Hugging Face format."""
    import torch  # imported late: only the quickstart's driver needs it
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_character_tokenizer(folder)
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
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def warm_up(folder: Path, warm_folder: Path, prompts: Sequence[Prompt], seed: int) -> None:
    """Supervised learning on the training problems, until the model begins to add.

    Args:
        folder: of the model.
        warm_folder: where the model goes that has begun to.
        prompts: training problems with their answers.
        seed: of the order of problems.
    """
    tokenizer, order = load_tokenizer(folder), EpochOrder(len(prompts), seed)
    settings = TrainEngineConfig(
        model_path=str(folder),
        learning_rate=WARMUP_LEARNING_RATE,
        warmup_steps=20,
        seed=seed,
        num_threads=1,  # a model this small gains nothing from more
    )
    engine: TrainEngine = load_backend("offbeat.engine", "torch").create(settings)
    for step in range(WARMUP_MAX_STEPS):
        places = range(step * WARMUP_BATCH, (step + 1) * WARMUP_BATCH)
        batch = [_solved(prompts[order(place)[1]], tokenizer) for place in places]
        if step % WARMUP_CHECK_STEPS == 0:
            chance = fmean(math.exp(logprobs.sum()) for logprobs in engine.logprobs(batch))
            if step % 50 == 0:
                print(f"warm-up step {step}: a right answer has probability {chance:.3f}, until {WARMUP_CHANCE}")
            if chance >= WARMUP_CHANCE:
                break
        engine.forward_backward(batch, sft_loss)
        engine.step()
    engine.save_weights(warm_folder)
    engine.close()


def _solved(prompt: Prompt, tokenizer: Tokenizer) -> TrainSequence:
    [answer] = tokenizer.encode([prompt.answer or ""], add_special_tokens=False)
    ids = np.concatenate([prompt.ids, answer, [tokenizer.eos_id]]).astype(np.int32)
    return TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt.ids))
