"""The stream of prompts that groups are about: drawn from the sources by weights, and by what is known of success."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from grpo_async_app._config.resolved import Source
from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import Metric, Metrics, RunFolderError
from offbeat_data import EpochOrder, MixtureOrder, Prompt, SuccessRates


@dataclass(frozen=True, kw_only=True)
class PromptDraw:
    """The prompt drawn for a group.

    Args:
        number: of its source.
        source: the same.
        prompt: drawn.
        item: its number among the prompts of all sources, one after the other.
    """

    number: int
    source: Source
    prompt: Prompt
    item: int


@dataclass(kw_only=True)
class _Tally:
    """Tally of one source since it was last written down."""

    num_groups: int = 0
    num_samples: int = 0
    num_successes: int = 0
    rewards: float = 0.0


class PromptStream:
    """Says which prompt each group is about, and learns how its samples fared.

    The number of a group decides its source and, in the order of that source's own epochs, its prompt; with section
    `curriculum`, what is known of the prompts' success decides too. All of that knowledge is in `state`.

    Args:
        config: of the run.
        sources: at least one, with their prompts.
        known: what `state` gave in a run before; empty in a new one.

    Raises:
        RunFolderError: `known` is of other prompts.
    """

    def __init__(self, config: GrpoConfig, sources: Sequence[Source], known: Mapping[str, Any]) -> None:
        data, curriculum = config.data, config.curriculum
        self._sources = tuple(sources)
        self._firsts = list(accumulate((len(source.prompts) for source in sources), initial=0))
        self.prompts = tuple(prompt for source in sources for prompt in source.prompts)
        self._mixture = MixtureOrder([source.weight for source in sources], data.seed)
        self._orders = [EpochOrder(len(source.prompts), data.seed, data.shuffle) for source in sources]
        self._rates = [SuccessRates(len(source.prompts), curriculum, data.seed) for source in sources]
        self._has_curriculum, self._is_mixed = curriculum.is_set, bool(data.mix)
        self._tallies = [_Tally() for _ in sources]
        self._restore(known)

    def draw(self, group_id: int) -> PromptDraw:
        """Return the prompt of a group.

        The same each time it is asked for, unless success has become known in between.
        """
        number, position = self._mixture(group_id)
        _, item = self._orders[number](position)
        if self._has_curriculum:
            item = self._rates[number].choose(item, group_id)
        source = self._sources[number]
        return PromptDraw(number=number, source=source, prompt=source.prompts[item], item=self._firsts[number] + item)

    def record(self, draw: PromptDraw, rewards: Sequence[float]) -> None:
        """Take in how the samples of a group fared, whether or not they are trained on.

        Args:
            draw: of the group.
            rewards: one per sample, before the penalty for length; at least one.
        """
        tally, least = self._tallies[draw.number], draw.source.success_reward
        successes = sum(reward >= least for reward in rewards)
        tally.num_groups += 1
        tally.num_samples += len(rewards)
        tally.num_successes += successes
        tally.rewards += sum(rewards)
        self._rates[draw.number].record(draw.item - self._firsts[draw.number], successes / len(rewards))

    def take_metrics(self) -> Metrics:
        """Return how the sources fared since this was last asked; none without a mix or a curriculum."""
        values: dict[str, float] = {}
        tallies, self._tallies = self._tallies, [_Tally() for _ in self._sources]
        if self._is_mixed:
            num_groups = sum(tally.num_groups for tally in tallies)
            for source, tally in zip(self._sources, tallies, strict=True):
                values |= _source_values(f"mix/{source.name}", tally, num_groups)
        if self._has_curriculum:
            if self._is_mixed:
                for source, rates in zip(self._sources, self._rates, strict=True):
                    values |= _rate_values(f"mix/{source.name}", [rates], len(source.prompts))
            values |= _rate_values("curriculum", self._rates, len(self.prompts))
        return {name: Metric(value=value, how="last") for name, value in values.items()}

    def state(self) -> dict[str, Any]:
        """Return what is known of success, as plain data for JSON, by the name of the source.

        Empty without a curriculum.
        """
        if not self._has_curriculum:
            return {}
        return {source.name: rates.state() for source, rates in zip(self._sources, self._rates, strict=True)}

    def _restore(self, known: Mapping[str, Any]) -> None:
        rates = {source.name: rates for source, rates in zip(self._sources, self._rates, strict=True)}
        if unknown := sorted(known.keys() - rates.keys()):
            raise RunFolderError(f"the checkpoint knows success rates of {unknown[0]!r}, no source of this run")
        for name, state in known.items():
            rates[name].restore(state)


def _source_values(prefix: str, tally: _Tally, num_groups: int) -> dict[str, float]:
    values = {f"{prefix}/share": tally.num_groups / num_groups} if num_groups else {}
    if tally.num_samples:
        values[f"{prefix}/success_rate"] = tally.num_successes / tally.num_samples
        values[f"{prefix}/reward"] = tally.rewards / tally.num_samples
    return values


def _rate_values(prefix: str, rates: Sequence[SuccessRates], num_prompts: int) -> dict[str, float]:
    return {
        f"{prefix}/known": sum(each.num_known for each in rates) / num_prompts,
        f"{prefix}/too_easy": sum(each.num_too_easy for each in rates) / num_prompts,
        f"{prefix}/too_hard": sum(each.num_too_hard for each in rates) / num_prompts,
    }
