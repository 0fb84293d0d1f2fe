"""`init`: a first my.toml, with the reason beside each line."""

from offbeat_core import parse_config, toml_value
from offbeat_run import MODEL_AND_DATA, CommandWords, Question, ask, write_first_config
from sft_app._config import SftConfig

QUESTIONS = (
    *MODEL_AND_DATA,
    Question(
        option="loss",
        key="preference.loss",
        text="sft, or a loss for pairs of answers: dpo, ipo, kto, orpo, simpo",
        default="sft",
    ),
)


def init_command(words: CommandWords) -> int:
    """Ask for a model, data and a loss where options do not say, and write the file."""
    answers = ask(words, QUESTIONS, SftConfig)
    is_sft = answers["loss"] == "sft"
    rate = "learning_rate = 1e-5      # usual for all weights; about 1e-4 with engine.lora_rank"
    if not is_sft:
        rate = "learning_rate = 1e-6      # preferences take small steps; about 1e-5 with engine.lora_rank"
    lines = [
        "# `sft-app --explain` describes every key, and plan shows what is chosen for those left out.",
        "[model]",
        f"path = {toml_value(answers['model'])}",
        "",
        "[data]",
        f"path = {toml_value(answers['data'])}",
        "eval_size = 64            # held out: shows what is learned beyond the rows that are trained on",
        "",
        *([] if is_sft else ["[preference]", f"loss = {toml_value(answers['loss'])}", ""]),
        "[engine]",
        rate,
        "batch_size = 32           # rows of an update",
        "",
        "[eval]",
        "every_updates = 50",
        "",
    ]
    text = "\n".join(lines)
    parse_config(text, SftConfig, name="my.toml")
    return write_first_config(text, words, "sft-app")
