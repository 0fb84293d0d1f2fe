"""`init`: a first my.toml, with the reason beside each line."""

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import parse_config, toml_value
from offbeat_data import DataConfig, RewardConfig, fill_known_reward
from offbeat_run import MODEL_AND_DATA, CommandWords, Question, ask, write_first_config

OF_REWARD = Question(
    option="reward",
    key="reward.name",
    text="What scores answers: math_verify, exact_match, or your own my_reward.py:score",
)


def init_command(words: CommandWords) -> int:
    """Ask for a model, data and a reward where options do not say, and write the file."""
    answers = ask(words, MODEL_AND_DATA, GrpoConfig)
    data = answers["data"]
    reward, _ = fill_known_reward(RewardConfig(), DataConfig(path=data))
    is_known = reward.is_set and "reward" not in words.options
    name = reward.name if is_known else ask(words, [OF_REWARD], GrpoConfig)["reward"]
    lines = [
        "# `grpo-async-app --explain` describes every key, and plan shows what is chosen for those left out.",
        "[model]",
        f"path = {toml_value(answers['model'])}",
        "",
        "[data]",
        f"path = {toml_value(data)}"
        + ("   # columns, instruction and reward are known by its name" if is_known else ""),
        "eval_size = 64            # held out: shows what is learned beyond the rows that are trained on",
        "",
        *([] if is_known else ["[reward]", f"name = {toml_value(name)}", ""]),
        "[rollout]",
        "samples_per_prompt = 8    # a group: each sample is compared with its mean",
        "max_tokens = 512          # of an answer; a longer one is cut off, and mostly wrong",
        "",
        "[engine]",
        "learning_rate = 1e-6      # usual for all weights; about 1e-5 with engine.lora_rank",
        "max_updates = 200         # 0: one pass over the data",
        "",
        "[eval]",
        "every_updates = 20",
        "",
    ]
    text = "\n".join(lines)
    parse_config(text, GrpoConfig, name="my.toml")
    return write_first_config(text, words, "grpo-async-app")
