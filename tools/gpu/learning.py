"""Sums of three digits, learned on one device by a wider model that is made, fine-tuned and trained here.

`sft-app` shows the model sums, two in three without their carries, as the quickstart does. Then GRPO trains it with the
application's defaults, trainer and engine on one device at once. It passes with a held-out accuracy of 0.9.
"""

import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import Figures, Place, main, reach
from gpu.whole_run import GRPO, learning_curve, require_ended, run_application, write_toml

from offbeat_data import build_character_tokenizer

DIGITS, SHOWN, HELD_OUT = 3, 40_000, 512
SFT_BATCH, SFT_UPDATES, SFT_LEARNING_RATE = 256, 600, 1e-3
"""Fine-tuning that a model of this width needs until it adds the columns and forgets most carries."""
UPDATES, LEARNING_RATE = 150, 2e-4
GOALS: Final = {"accuracy_after": 0.9, "accuracy_gained": 0.3}
LIMIT_S: Final = 200.0
"""Longest time of each of the two runs."""


def make_model(folder: Path, place: Place) -> Path:
    """Write a Qwen3 with random weights, of 25 million parameters unless tiny, and a tokenizer of characters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir()
    tokenizer = build_character_tokenizer(folder)
    hidden_size = place.pick(64, 512)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=place.pick(2, 8),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=place.pick(16, 64),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def shown_sums(seed: int) -> list[dict[str, str]]:
    """Return sums for the fine-tuning: one in three is right, and two forget their carries, "38+94=" is "22"."""
    draw, rows = random.Random(seed), []
    for number in range(SHOWN):
        left, right = (str(draw.randrange(10**DIGITS)) for _ in range(2))
        columns = itertools.zip_longest(reversed(left), reversed(right), fillvalue="0")
        without_carries = "".join(str((int(one) + int(other)) % 10) for one, other in columns)[::-1]
        completion = str(int(left) + int(right)) if number % 3 == 0 else without_carries
        rows.append({"prompt": f"{left}+{right}=", "completion": completion})
    return rows


def fine_tune(folder: Path, model: Path, place: Place) -> Path:
    """Run `sft-app` on the sums, and return the folder of the weights that it leaves."""
    data = folder / "sums.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in shown_sums(seed=0)))
    settings: dict[str, dict[str, object]] = {
        "model": {"path": str(model)},
        "data": {"path": str(data), "epochs": 0},
        "engine": {
            "device": place.name,
            "learning_rate": SFT_LEARNING_RATE,
            "batch_size": place.pick(8, SFT_BATCH),
            "max_updates": place.pick(2, SFT_UPDATES),
        },
        "checkpoint": {"every": 0},
    }
    config, out = write_toml(folder / "sft.toml", settings), folder / "sft"
    require_ended(*run_application("sft_app", place, ["train", str(config), "--out", str(out)], LIMIT_S))
    [weights] = (out / "checkpoints").glob("step-*")
    return weights


def run(place: Place) -> Figures:
    """Fine-tune, train, and note the accuracies by update and by second."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        warm = fine_tune(folder, make_model(folder / "model", place), place)
        settings: dict[str, dict[str, Any]] = {
            "model": {"path": str(warm)},
            "data": {
                "path": f"arithmetic:{DIGITS}",
                "eval_size": place.pick(8, HELD_OUT),
                "max_prompt_tokens": 2 * DIGITS + 2,
                "epochs": 0,
            },
            "reward": {"name": "exact_match"},
            "rollout": {"device": place.name, "samples_per_prompt": 8, "max_tokens": DIGITS + 2, "max_model_len": 16},
            "engine": {
                "device": place.name,
                "learning_rate": LEARNING_RATE,
                "max_updates": place.pick(2, UPDATES),
            },
            "algorithm": {"filter_groups": not place.tiny},
            "async": {"mini_batch_size": place.pick(2, 64)},
            "eval": {"every_updates": 10},
            "checkpoint": {"every": 0, "save_optimizer": False},
        }
        config, out = write_toml(folder / "grpo.toml", settings), folder / "grpo"
        ended, said = run_application(GRPO, place, ["train", str(config), "--out", str(out)], LIMIT_S)
        figures = learning_curve(out)
        place.note(figures)
        require_ended(ended, said)
    return reach(place, figures, GOALS)


if __name__ == "__main__":
    main(run)
