"""The package and everything it does by default stay free of torch and transformers."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from offbeat_data import ConversationConfig, DataConfig, EnvironmentConfig, RewardConfig
from offbeat_types import METADATA_KEY

WORK = """
import sys
from offbeat_data import *
tokenizer = build_character_tokenizer({folder!r})
data = DataConfig(path="arithmetic:2", num_items=20, eval_size=5)
prompts = load_prompts(data, tokenizer)
sums = ConversationConfig(path="arithmetic:2", num_items=20, completion_column="answer")
sequences = load_conversations(sums, tokenizer)
reward = build_reward(RewardConfig(name="number_match"))
assert reward.score(prompts.train[0], prompts.train[0].answer).value == 1.0
ConversationConfig(path="reasoning-gym:chain_sum")
build_environment(EnvironmentConfig(name="calculator"))()
heavy = {{"torch", "transformers", "datasets", "reasoning_gym", "math_verify", "pyarrow", "sympy", "verifiers"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
print("light")
"""


def test_importing_and_working_loads_nothing_heavy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(folder=str(tmp_path / "tokenizer"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "light\n", done.stderr


def test_readers_and_verifiers_bring_no_torch(tmp_path):
    script = (
        "import sys, pyarrow.parquet\n"
        "from offbeat_data import *\n"
        f"tokenizer = build_character_tokenizer({str(tmp_path)!r})\n"
        "load_prompts(DataConfig(path='reasoning-gym:chain_sum', num_items=2), tokenizer)\n"
        "build_reward(RewardConfig(name='math_verify'))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "False\n", done.stderr


def test_sections_keep_to_25_documented_keys():
    for section in (ConversationConfig, DataConfig, EnvironmentConfig, RewardConfig):
        declared = fields(section)
        assert len(declared) <= 25
        assert all(field.metadata[METADATA_KEY].doc.endswith(".") for field in declared)


def test_the_examples_of_the_readme_work():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = [block.split("```")[0] for block in readme.split("```python\n")[1:]]
    assert len(examples) == 2
    done = subprocess.run(
        [sys.executable, "-c", "".join(examples)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_section_has_no_key_without_effect():
    prompts, conversations = ({field.name for field in fields(each)} for each in (DataConfig, ConversationConfig))
    assert prompts - conversations == {"answer_column", "max_prompt_tokens"}
