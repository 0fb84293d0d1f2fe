"""Memory of a data set of prompts: bytes a row, held and at most.

    python tools/bench/rows.py MODEL_FOLDER [NUM_ROWS]

Rows are as verl prepares DAPO-Math-17k: messages, reference answer and extra fields, about 850 bytes of JSON each.
"""

import json
import random
import resource
import sys
import tempfile
from pathlib import Path

from offbeat_data import DataConfig, load_prompts, load_tokenizer

WORDS = ("find", "the", "value", "of", "x", "such", "that", "integral", "matrix", "triangle", "modulo", "prime")
NUM_WORDS = 90


def row(draw: random.Random, number: int) -> dict[str, object]:
    """One row."""
    question = " ".join(draw.choice(WORDS) for _ in range(NUM_WORDS))
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Solve the following math problem step by step. {question}"}],
        "reward_model": {"ground_truth": str(number), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{number:032x}"},
    }


def main() -> None:
    """Load them, and print."""
    model, num_rows = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    tokenizer, draw = load_tokenizer(model), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as lines:
            lines.writelines(f"{json.dumps(row(draw, number))}\n" for number in range(num_rows))
        before = held_bytes()
        prompts = load_prompts(
            DataConfig(path=str(path), answer_column="reward_model.ground_truth", max_prompt_tokens=4096), tokenizer
        )
        after, peak = held_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    num_tokens = sum(len(prompt.ids) for prompt in prompts.train) / num_rows
    print(
        f"{num_rows} rows of {num_tokens:.0f} tokens: {(after - before) / num_rows:.0f} bytes a row held, "
        f"{(peak - before) / num_rows:.0f} at most"
    )


def held_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
