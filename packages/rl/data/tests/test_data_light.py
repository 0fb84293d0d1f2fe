"""The package and everything it does by default stay free of torch and transformers; a missing extra is named."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from offbeat_core import METADATA_KEY
from offbeat_data import ConversationConfig, DataConfig, EnvironmentConfig, RewardConfig

BY_DEFAULT = """
data = DataConfig(path="arithmetic:2", num_items=20, eval_size=5)
prompts = load_prompts(data, tokenizer)
sums = ConversationConfig(path="arithmetic:2", num_items=20, completion_column="answer")
sequences = load_conversations(sums, tokenizer)
reward = build_reward(RewardConfig(name="number_match"))
assert reward.score(prompts.train[0], prompts.train[0].answer).value == 1.0
ConversationConfig(path="reasoning-gym:chain_sum")
build_environment(EnvironmentConfig(name="calculator"))()
"""
READERS_AND_VERIFIERS = """
import pyarrow.parquet
load_prompts(DataConfig(path="reasoning-gym:chain_sum", num_items=2), tokenizer)
build_reward(RewardConfig(name="math_verify"))
"""
ROWS_WITHOUT_IMAGES = """
load_prompts(DataConfig(path="rows.jsonl"), load_tokenizer(sys.argv[1]))
"""
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "reasoning_gym",
    "math_verify",
    "pyarrow",
    "sympy",
    "verifiers",
    "PIL",
    "websockets",
}


def run_python(folder, code, *words):
    """Run code in a fresh interpreter, in a folder, after the package and a tokenizer of characters."""
    begin = "import sys\nfrom offbeat_data import *\ntokenizer = build_character_tokenizer('characters')\n"
    command = [sys.executable, "-c", begin + code, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize(
    ("work", "absent"),
    [
        (BY_DEFAULT, HEAVY),
        (READERS_AND_VERIFIERS, {"torch"}),
        (ROWS_WITHOUT_IMAGES, {"PIL", "torch", "transformers"}),  # of a model that sees
    ],
)
def test_what_is_not_asked_for_is_not_loaded(work, absent, vision_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "1"}\n')
    done = run_python(tmp_path, f"{work}\nprint(sorted({absent} & set(sys.modules)))", vision_folder)
    assert done.stdout == "[]\n", done.stderr


VERIFIERS = 'pip install "verifiers>=0.3,<0.3.2"'


@pytest.mark.parametrize(
    ("missing", "work", "line"),
    [
        ("reasoning_gym", "load_prompts(DataConfig(path='reasoning-gym:chain_sum'), tokenizer)", "reasoning-gym"),
        # Imported when the reward is built, and so never within the deadline of the first completion.
        ("reasoning_gym", "build_reward(RewardConfig(name='reasoning_gym'))", "reasoning-gym"),
        ("math_verify", "build_reward(RewardConfig(name='math_verify'))", "math"),
        ("transformers", "load_tokenizer('older')", "transformers"),
        ("verifiers", "build_environment(EnvironmentConfig(name='verifiers'))", VERIFIERS),
        ("verifiers", "load_prompts(DataConfig(path='verifiers:x'), None)", VERIFIERS),
        ("", "load_prompts(DataConfig(path='verifiers:x'), None)", VERIFIERS),  # a later one, without turns
        ("websockets", "build_environment(EnvironmentConfig(name='openenv', options={'url': 'http://x'}))", "openenv"),
        ("websockets", "load_prompts(DataConfig(path='openenv:http://x'), None)", "openenv"),
    ],
)
def test_a_missing_extra_names_its_install_line(missing, work, line, tmp_path):
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "vocab.json").write_text("{}")
    (tmp_path / "verifiers.py").write_text("__version__ = '0.4.0'")
    hide = f"sys.modules[{missing!r}] = None\n" if missing else ""
    guarded = "from offbeat_core import BackendError\ntry: {}\nexcept BackendError as error: print(error)\n"
    done = run_python(tmp_path, hide + guarded.format(work))
    assert (line if "pip" in line else f'pip install "offbeat-data[{line}]"') in done.stdout, done.stderr


def test_sections_keep_to_25_documented_keys():
    for section in (ConversationConfig, DataConfig, EnvironmentConfig, RewardConfig):
        declared = fields(section)
        assert len(declared) <= 25
        assert all(field.metadata[METADATA_KEY].doc.endswith(".") for field in declared)


def test_the_examples_of_the_readme_work(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = [block.split("```")[0] for block in readme.split("```python\n")[1:]]
    assert len(examples) == 2
    done = run_python(tmp_path, "".join(examples))
    assert done.returncode == 0, done.stderr


def test_a_section_has_no_key_without_effect():
    prompts, conversations = ({field.name for field in fields(each)} for each in (DataConfig, ConversationConfig))
    assert prompts - conversations == {"answer_column", "max_prompt_tokens"}
