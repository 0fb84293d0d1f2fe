"""Functions of the user's own, tried on random data before a run starts: faults are reported early and in one line."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_core import ConfigError, as_written
from offbeat_objectives._advantages.advantages import find_advantage
from offbeat_objectives._advantages.estimators import Advantages, RewardedSamples
from offbeat_objectives._config.algorithm import AlgorithmConfig
from offbeat_objectives._losses import find_objective
from offbeat_objectives._packing import sequence_of_tokens
from offbeat_objectives._surrogates import PolicyTokens, Surrogate

LENGTHS: Final = (5, 1, 7, 3)
"""Tokens of the sequences that a loss is tried on; the second has no token left."""
GROUP_SIZES: Final = (4, 4, 3, 1)
"""Samples of the prompts that an advantage is tried on; the second's rewards are all equal."""
TOLERANCE: Final = 1e-5


def try_functions(config: AlgorithmConfig, weights: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Try `algorithm.loss` and `algorithm.advantage` where they are functions of the user's own.

    A loss is checked for: one finite number a token, a gradient, also where the old policy is that of now, no influence
    of rejected tokens, and an end without error where all tokens are rejected or there is none. An advantage for: one
    finite number a token, also for equal rewards, a sample alone and one without tokens, and not 0 everywhere.

    Args:
        config: that `check_algorithm` has passed.
        weights: the run's rewards by name, for the samples' parts.

    Returns:
        What was tried and found, a sentence for each function.

    Raises:
        ConfigError: a check failed; the text names it.
    """
    found = []
    if config.has_own_loss:
        _try_loss(config)
        found.append(
            f"{as_written(config.loss)}: finite, with a gradient, rejected tokens without influence (random data)"
        )
    if config.has_own_advantage:
        _try_advantage(config, dict(weights or {"reward": 1.0}))
        found.append(f"{as_written(config.advantage)}: finite, also for equal rewards and a sample alone (random data)")
    return tuple(found)


class _Trial:
    """Calls one function, and says which check it failed."""

    def __init__(self, key: str, name: str) -> None:
        self._called = f"algorithm.{key} {name}"

    def fail(self, check: str, found: str, advice: str) -> ConfigError:
        return ConfigError(f"{self._called} failed the check {check!r} on random data: {found}; {advice}")

    @contextmanager
    def reported(self, case: str) -> Iterator[None]:
        """Turn an error of the user's code into a failed check, with its place in that code."""
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).partition("\n")[0]
            found = f"{type(error).__name__}: {text} ({place.filename}, line {place.lineno})"
            raise self.fail("runs", f"{case}: {found}", "mend the function") from error

    def check_result(self, result: Any, kind: type, num_tokens: int) -> None:
        """Check a result: of the right class, its tensors in the right shape and finite."""
        if not isinstance(result, kind):
            raise self.fail("returns", f"a {type(result).__name__}", f"return a {kind.__name__} of offbeat_objectives")
        named = {each.name: getattr(result, each.name) for each in fields(result)}  # type: ignore[arg-type]
        named |= {f"metrics_N[{name!r}]": values for name, values in named.pop("metrics_N").items()}
        for name, values_N in named.items():
            if values_N is None:
                continue
            if not isinstance(values_N, Tensor) or values_N.shape != (num_tokens,):
                got = tuple(values_N.shape) if isinstance(values_N, Tensor) else type(values_N).__name__
                raise self.fail("shape", f"{name} is {got}", f"return one number a token: ({num_tokens},)")
            if not bool(values_N.isfinite().all()):
                raise self.fail("finite", f"{name} has {values_N[~values_N.isfinite()][0]:g}", "bound what can grow")


def _try_loss(config: AlgorithmConfig) -> None:
    trial, function = _Trial("loss", as_written(config.loss)), find_objective(config)
    tokens = _random_tokens()

    def objective(case: str, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        """[N] the objective of kept tokens, and [N] the gradient of its sum."""
        logprobs_N = tokens.logprobs_N.clone().requires_grad_()
        with trial.reported(case):
            result = function(replace(tokens, logprobs_N=logprobs_N), config)
        trial.check_result(result, Surrogate, len(logprobs_N))
        kept_N = torch.where(tokens.keep_N > 0, result.objective_N, 0.0)
        if not kept_N.requires_grad:
            raise trial.fail("gradient", f"{case}: the objective has none", "make it of tokens.logprobs_N")
        (gradient_N,) = torch.autograd.grad(kept_N.sum(), logprobs_N)
        if not bool(gradient_N.isfinite().all()):
            raise trial.fail("finite", f"{case}: the gradient is not", "bound what can grow before it is divided by")
        return kept_N.detach(), gradient_N

    for case, old_N in (("old policy", tokens.old_N), ("one step", tokens.logprobs_N.clone())):
        plain_N, gradient_N = objective(case, replace(tokens, old_N=old_N))
        if not bool((gradient_N != 0).any()):
            raise trial.fail("gradient", f"{case}: it is 0 everywhere", "make the objective of tokens.logprobs_N")
        changed = _with_other_rejected(replace(tokens, old_N=old_N))
        _compare(trial, (plain_N, gradient_N), objective(case, changed))
    objective("every token rejected", replace(tokens, keep_N=torch.zeros_like(tokens.keep_N)))
    objective("no token", _random_tokens(lengths=()))


def _compare(trial: _Trial, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
    for name, first_N, second_N in zip(("objective", "gradient"), before, after, strict=True):
        difference = float((first_N - second_N).abs().max())
        if difference > TOLERANCE:
            raise trial.fail(
                "rejected tokens without influence",
                f"the {name} changed by {difference:.2g} with the values of tokens whose keep_N is 0",
                "weigh sums by tokens.keep_N, or use tokens.mean and tokens.sequence_mean",
            )


def _random_tokens(lengths: tuple[int, ...] = LENGTHS) -> PolicyTokens:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    sequence_N = sequence_of_tokens(torch.tensor(lengths, dtype=torch.long))
    logprobs_N = -3 * torch.rand(num_tokens, generator=generator) - 0.01
    keep_N = ((torch.rand(num_tokens, generator=generator) > 0.3) & (sequence_N != 1)).float()
    return PolicyTokens(
        logprobs_N=logprobs_N * keep_N,
        old_N=(logprobs_N + 0.3 * torch.randn(num_tokens, generator=generator)) * keep_N,
        advantages_N=torch.randn(max(len(lengths), 1), generator=generator)[sequence_N],
        keep_N=keep_N,
        sequence_N=sequence_N,
        num_sequences=len(lengths),
    )


def _with_other_rejected(tokens: PolicyTokens) -> PolicyTokens:
    """Return the same, but for the values of rejected tokens."""
    is_kept_N = tokens.keep_N > 0
    return replace(
        tokens,
        logprobs_N=torch.where(is_kept_N, tokens.logprobs_N, -2.0),
        old_N=torch.where(is_kept_N, tokens.old_N, -1.0),
        advantages_N=torch.where(is_kept_N, tokens.advantages_N, 3.0),
    )


def _try_advantage(config: AlgorithmConfig, weights: dict[str, float]) -> None:
    trial, function = _Trial("advantage", as_written(config.advantage)), find_advantage(config)
    for case, samples in (
        ("rewards of 0 and 1", _random_samples(weights, lambda size, of: torch.rand(size, generator=of).round())),
        ("any rewards", _random_samples(weights, lambda size, of: torch.randn(size, generator=of))),
        ("rewards of 0", _random_samples(weights, lambda size, _: torch.zeros(size))),
    ):
        with trial.reported(case), torch.no_grad():
            result = function(samples, config)
        trial.check_result(result, Advantages, len(samples.sequence_N))
        if case == "any rewards" and not bool((result.advantages_N != 0).any()):
            raise trial.fail("learns", "the advantage of every token is 0", "make it of samples.rewards_S or parts_S")


def _random_samples(weights: dict[str, float], draw: Callable[[int, torch.Generator], Tensor]) -> RewardedSamples:
    generator, num_samples = torch.Generator().manual_seed(0), sum(GROUP_SIZES)
    prompts_S = sequence_of_tokens(torch.tensor(GROUP_SIZES))
    lengths_S = torch.randint(0, 7, (num_samples,), generator=generator)
    lengths_S[0], lengths_S[1] = 0, 4
    parts_S = {name: draw(num_samples, generator).double() for name in weights}
    for values_S in parts_S.values():
        values_S[prompts_S == 1] = 1.0
    rewards_S = torch.stack([weight * parts_S[name] for name, weight in weights.items()]).sum(0)
    token_rewards_N = torch.zeros(int(lengths_S.sum()), dtype=torch.float64)
    token_rewards_N[(lengths_S.cumsum(0) - 1)[lengths_S > 0]] = rewards_S[lengths_S > 0]
    return RewardedSamples(
        rewards_S=rewards_S,
        parts_S=parts_S,
        weights=weights,
        prompts_S=prompts_S,
        num_prompts=len(GROUP_SIZES),
        sequence_N=sequence_of_tokens(lengths_S),
        trajectory_N=sequence_of_tokens(lengths_S[lengths_S > 0]),
        lengths_S=lengths_S,
        token_rewards_N=token_rewards_N,
    )
