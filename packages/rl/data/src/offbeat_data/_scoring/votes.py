"""The answer that a completion gives to its question, as majorities are counted: what a reward would look at."""

from offbeat_data._scoring.answers import last_number
from offbeat_data._scoring.config import RewardConfig
from offbeat_data._scoring.rewards import answer_of


def vote_of(completion: str, config: RewardConfig) -> str | None:
    """Return what a completion votes for when the answers of several are counted.

    Args:
        completion: what the model wrote; of an episode its last turn.
        config: of the reward, whose `extract` finds the answer. With `number_match` it is the last number there, so
            that 7, 7.0 and 1,000 and 1000 are the same votes; of others it is the text, blanks as one.

    Returns:
        None where there is no answer.
    """
    answer = answer_of(completion, config)
    if answer is None:
        return None
    if config.is_set and "number_match" in config.all_weights:
        number = last_number(answer)
        return None if number is None else f"{number.normalize():f}"
    text = " ".join(answer.split())
    return (text.casefold() if config.ignore_case else text) or None
