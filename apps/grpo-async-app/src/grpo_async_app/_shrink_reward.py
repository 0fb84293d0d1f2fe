"""The reward of a rehearsal, apart from the rest: the process that scores imports nothing else of the application."""

from offbeat_data import Prompt

REWARD = "grpo_async_app._shrink_reward:variety"
_ENOUGH = 8.0


def variety(_: Prompt, completion: str) -> float:
    """Return how many different characters a completion has, as a share of eight.

    A model that knows nothing earns something else with every sample, so groups have something to compare; where all
    answers are wrong they would have nothing, and with `algorithm.filter_groups` no update would ever begin.
    """
    return min(len(set(completion)) / _ENOUGH, 1.0)
