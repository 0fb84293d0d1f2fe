"""Token budget of a micro-batch and activation checkpointing, chosen by the memory of the trainer's devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Self, TypeVar

from offbeat_core import ConfigError, ModelError, TrainEngineSettings, setting

FILLED_SHARE: Final = 0.85
"""Share of a device's memory up to which its roles stay where they are: estimates leave out the runtime's own memory,
workspaces and fragmentation."""
_BUDGETS: Final = (8192, 16384, 32768)
"""Tokens: the engines' own default, and its doubles. Beyond these a pass gains little: of a model of 0.6B parameters on
an H200, 4,900 kernel launches of 6 µs are 14 % of a pass over 8192 tokens and 4 % of one over 32768."""
_SMALLEST: Final = 16
"""Tokens: the smallest budget that engines take."""
_SAFE: Final = "recomputing makes a run a third slower, and a run out of memory ends"


@dataclass(frozen=True, kw_only=True)
class BudgetSettings(TrainEngineSettings):
    """Settings of a trainer that leaves its token budget and activation checkpointing open by default.

    An engine is given settled values alone: see `choose_budget`.
    """

    max_tokens_per_microbatch: int = setting(
        0,
        "Token budget of one forward and backward pass: bounds memory, changes no result; 0: the largest of 32768, "
        "16384 and 8192 for which the trainer's devices have memory, 8192 on CPUs and where their memory is not known.",
        "tokens",
        ge=0,
    )
    activation_checkpointing: bool | Literal["auto"] = setting(  # type: ignore[assignment]  # wider until it is settled
        "auto",
        "Recompute activations in the backward pass to save memory; auto: on accelerators whose memory holds no micro-"
        "batch without it or is not known.",
    )

    def __post_init__(self) -> None:
        if 0 < self.max_tokens_per_microbatch < _SMALLEST:
            raise ConfigError(
                f"max_tokens_per_microbatch = {self.max_tokens_per_microbatch} is too small for a pass: set it to "
                f"{_SMALLEST} or more, or to 0 for what memory has room for"
            )

    def settle_budget(self, tokens: int = _BUDGETS[0], *, recomputes: bool) -> Self:
        """Return the same with what is open of the two filled in."""
        is_open = self.activation_checkpointing == "auto"
        return replace(
            self,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch or tokens,
            activation_checkpointing=recomputes if is_open else self.activation_checkpointing,
        )

    def settle_budget_as(self, settled: "BudgetSettings") -> Self:
        """Return the same with what is open filled in from settled settings."""
        return self.settle_budget(
            settled.max_tokens_per_microbatch, recomputes=settled.activation_checkpointing is True
        )


SettingsT = TypeVar("SettingsT", bound=BudgetSettings)


def choose_budget(
    engine: SettingsT,
    held: Mapping[str, Callable[[SettingsT], int]],
    total_bytes: int,
    *,
    on_cpu: bool,
    longest_tokens: int = 0,
    step_tokens: int = 0,
) -> tuple[SettingsT, tuple[str, ...]]:
    """Settle `engine.max_tokens_per_microbatch = 0` and `engine.activation_checkpointing = "auto"`.

    On an accelerator the first of these that leaves `FILLED_SHARE` of the memory or less in use: a budget from the
    largest to the smallest without checkpointing, then with it, then the smallest with it although it may not fit.

    Args:
        engine: the trainer's section.
        held: bytes of the fullest of the trainer's devices under settled settings, by the roles that are loaded there
            at the same time, such as "trainer + rollout"; earlier ones are preferred. They raise ModelError for a model
            without an estimate.
        total_bytes: memory of the smallest of the trainer's devices; 0 if unknown.
        on_cpu: the trainer computes on processors.
        longest_tokens: of one sample, for which a budget has room where memory does; 0 if unknown.
        step_tokens: of all samples of one optimizer step on a rank at most: no budget is tried beyond the first that
            holds them; 0 if unknown.

    Returns:
        The section without open choices, and the choice with its reason; none where nothing was open.
    """
    if engine == engine.settle_budget(recomputes=False):
        return engine, ()
    if on_cpu:
        settled, why = engine.settle_budget(recomputes=False), "trains on CPUs"
    elif not total_bytes:
        settled = engine.settle_budget(recomputes=True)
        why = f"the memory of the devices is not known: {_SAFE}"
    else:
        sizes = _sizes(longest_tokens, step_tokens)
        try:
            settled, why = _find_largest(engine, held, total_bytes, sizes)
        except ModelError:
            settled = engine.settle_budget(recomputes=True)
            why = f"the memory of the model cannot be estimated: {_SAFE}"
    return settled, (f"engine.{_difference(engine, settled)} ({why})",)


def _sizes(longest_tokens: int, step_tokens: int) -> list[int]:
    """Return the budgets to try, from the largest on."""
    sizes = sorted({max(size, longest_tokens) for size in _BUDGETS})
    enough = next((size for size in sizes if size >= step_tokens > 0), sizes[-1])
    return [size for size in reversed(sizes) if size <= enough]


def _find_largest(
    engine: SettingsT, held: Mapping[str, Callable[[SettingsT], int]], total_bytes: int, sizes: list[int]
) -> tuple[SettingsT, str]:
    """Return the settled section, and how much of the memory it takes."""
    room = FILLED_SHARE * total_bytes
    for roles, held_bytes in held.items():
        for recomputes in (False, True):
            for tokens in sizes:
                tried = engine.settle_budget(tokens, recomputes=recomputes)
                if (needed := held_bytes(tried)) <= room:
                    return tried, f"{roles} {_gib(needed)} of {_gib(room)} GiB"
    smallest = engine.settle_budget(recomputes=True)
    roles, held_bytes = list(held.items())[-1]
    least, total = _gib(held_bytes(smallest)), _gib(total_bytes)
    return smallest, f"{roles} {least} GiB, more than {FILLED_SHARE:.0%} of {total} GiB"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g}"


def _difference(engine: BudgetSettings, settled: BudgetSettings) -> str:
    names = ("max_tokens_per_microbatch", "activation_checkpointing")
    chosen = {name: getattr(settled, name) for name in names if getattr(settled, name) != getattr(engine, name)}
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in chosen.items())
