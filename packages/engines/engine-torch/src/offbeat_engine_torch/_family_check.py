"""Asks a loaded model in ways that its family answers alike if the engine can train it.

Shapes: T tokens, N loss tokens, V vocabulary (of this rank, where it is cut).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat_core import ModelError, OffbeatError
from offbeat_engine_torch._layers.plan import AttentionPlan
from offbeat_engine_torch._lengths import LengthLimit, find_thresholds, lowered_thresholds, rotary_limit, shorter
from offbeat_engine_torch._model import CausalModel, HeadQuery, one_line
from offbeat_training import Segment, logprobs_of_logits

NUM_TOKENS: Final = 12
PAIR_TOKENS: Final = (20, 6)
"""Two sequences in one pack. With thresholds lowered to 8, one is 12 tokens longer, the other ends before."""
TOLERANCE_NATS: Final = {None: 0.01, torch.bfloat16: 0.5}
"""By the format of the layers. Two kernels of attention that sum float32 in different orders are 1e-6 (tiny models) to
1e-3 nats apart (deep ones); a forgotten scale, mask or layer is 0.1 to 20. Bfloat16 rounds logits of 16 to 32 to
multiples of 0.125, so only values that are far off can be detected there."""
TOLERANCE_OF_STATES: Final = {None: 1e-2, torch.bfloat16: 5e-2}
"""By the format of the layers, as a share of the largest hidden state: bfloat16 keeps 8 bits, and errors of layers add
up. Sequences that see each other differ by 0.1 to 1."""
TOLERANCE_OF_REPEATS_NATS: Final = {None: 1e-4, torch.bfloat16: 0.1}
"""By the format of the layers: a device may add in another order at each call. Dropout of 0.1 moves log-probabilities
of tiny models by 1e-3 to 0.1 nats."""
TOKENS_WITHIN: Final = 0.75
"""Share of the tokens that must agree: rounding may send a token to another expert, whose log-probability then jumps.
"""


@dataclass(frozen=True, kw_only=True)
class FamilyCheck:
    """Compares a loaded model with what transformers computes of it. All ranks of a mesh take part.

    Args:
        model: as it will be trained.
        folder: named in errors.
        kernel: of the packed attention.
        autocast: format of the layers' products, where their weights are gathered in it; None for float32.
    """

    model: CausalModel
    folder: Path
    kernel: str = "rows"
    autocast: torch.dtype | None = None

    @torch.no_grad()
    def run(self) -> LengthLimit | None:
        """Check the model at a few tokens, and beyond each threshold of its configuration.

        Returns:
            The longest sequence that the engine computes as transformers does; None for any length.

        Raises:
            ModelError: the engine does not train the family.
        """
        with self._as_refusal():
            self._check_isolation()
            found_N = self.packed_logprobs((NUM_TOKENS,))
            self._check_logprobs(found_N)
            self._check_repeats(found_N)
        return shorter(rotary_limit(self.model.whole.config), self._limit_of_thresholds())

    @contextmanager
    def _as_refusal(self) -> Iterator[None]:
        """Name the family where its code raises."""
        try:
            yield
        except (OffbeatError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"{self.folder}: {self._name} does not run on packed sequences: family not supported "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error

    def _check_isolation(self) -> None:
        """Run two sequences packed and alone."""
        device = self._device
        ids = torch.tensor([1, 2, 3, 2, 1], device=device) % self.model.vocabulary_size
        positions = torch.tensor([0, 1, 2, 2, 0], device=device)
        prompt, *completions = (Segment(start=0, length=2), *(Segment(start=i, length=1, parent=0) for i in (2, 3)))
        together = (prompt, *completions, Segment(start=4, length=1))
        share = TOLERANCE_OF_STATES[self.autocast]
        packed = self._states(ids, positions, together)
        self._require_finite(packed)
        for real in ([0, 1, 2], [0, 1, 3], [4]):
            index = torch.tensor(real, device=device)
            alone = self._states(ids[index], positions[index], (Segment(start=0, length=len(real)),))
            if not torch.allclose(packed[index], alone, rtol=share, atol=share * float(alone.abs().max())):
                raise ModelError(
                    f"{self.folder}: {self._name} gives other results for packed sequences: family not supported"
                )

    def _require_finite(self, found: Tensor) -> None:
        """Name the weights where the model computes NaN or infinity, which is no matter of its family."""
        if bool(torch.isfinite(found).all()):
            return
        named = self.model.whole.named_parameters()
        broken = [name for name, weight in named if not bool(torch.isfinite(weight).all())]
        hold = "holds" if len(broken) == 1 else "hold"
        weights = f"{len(broken)} of its weights {hold} NaN or infinity, first {broken[0]}: " if broken else ""
        raise ModelError(
            f"{self.folder}: the model computes NaN or infinity: {weights}save or download the folder again"
        )

    def _check_logprobs(self, found_N: Tensor) -> None:
        """Compare one sequence's log-probabilities with the model's own logits, under the model's own attention."""
        self._require_finite(found_N)
        error = self._error(found_N, (NUM_TOKENS,))
        if not error <= TOLERANCE_NATS[self.autocast]:
            raise ModelError(
                f"{self.folder}: {self._name} computes other log-probabilities than this engine does: family not "
                f"supported ({error:.2g} nats apart, {TOLERANCE_NATS[self.autocast]} allowed)"
            )

    def _check_repeats(self, found_N: Tensor) -> None:
        """Ask the same again: nothing that is random may be left in the model."""
        error = float((found_N - self.packed_logprobs((NUM_TOKENS,))).abs().max())
        if not error <= TOLERANCE_OF_REPEATS_NATS[self.autocast]:
            raise ModelError(
                f"{self.folder}: {self._name} computes other log-probabilities at each call: family not supported "
                f"({error:.2g} nats apart, {TOLERANCE_OF_REPEATS_NATS[self.autocast]} allowed)"
            )

    def _limit_of_thresholds(self) -> LengthLimit | None:
        """Find the shortest threshold beyond which the model computes otherwise than the engine.

        Thresholds of published models are 4096 tokens and more, which would take a processor minutes. They are lowered
        in the loaded model, all at once, and one at a time only where the model then computes otherwise.
        """
        thresholds = find_thresholds(self.model.decoder, self.model.whole.config)
        if not thresholds or self._holds_beyond(list(thresholds)):
            return None
        wrong = [name for name in thresholds if not self._holds_beyond([name])] or list(thresholds)
        limits = [
            LengthLimit(
                num_tokens=thresholds[name],
                reason=f"{self._name} computes other log-probabilities than this engine beyond {name} = "
                f"{thresholds[name]}",
            )
            for name in wrong
        ]
        return shorter(*limits)

    def _holds_beyond(self, names: Sequence[str]) -> bool:
        """Compare a long and a short sequence in one pack with each alone; a model that raises is as one that differs.

        Its code may not be made for values so small, and up to its own values it has been checked.
        """
        with lowered_thresholds(self.model.decoder, self.model.whole.config, names):
            try:
                return self._error(self.packed_logprobs(PAIR_TOKENS), PAIR_TOKENS) <= TOLERANCE_NATS[self.autocast]
            except (torch.OutOfMemoryError, torch.distributed.DistError):
                raise
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
                return False

    def _error(self, found_N: Tensor, lengths: Sequence[int]) -> float:
        """Nats between the packed log-probabilities of sequences and those that the model itself gives each alone."""
        wanted = []
        with self.model.own_attention():
            for length in lengths:
                ids_T = self._ids(length)
                logits_TV: Tensor = self.model(ids_T, autocast=self.autocast)
                wanted.append(
                    logits_TV[:-1, 0]
                    if self.model.scores
                    else logprobs_of_logits(logits_TV[:-1], ids_T[1:], self.model.part)
                )
        return float((found_N - torch.cat(wanted)).abs().quantile(TOKENS_WITHIN))

    def packed_logprobs(self, lengths: Sequence[int], *, fused: bool = False) -> Tensor:
        """[N] of sequences in one pack: of all tokens but the first of each; `fused` as in `HeadQuery`."""
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        segments = tuple(Segment(start=start, length=length) for start, length in zip(starts, lengths, strict=True))
        index_T = torch.cat([torch.arange(length) for length in lengths]).to(self._device)
        query = HeadQuery(
            predictor_N=np.concatenate([np.arange(each.start, each.start + each.length - 1) for each in segments]),
            target_N=torch.cat([self._ids(length)[1:] for length in lengths]).cpu().numpy(),
            fused=fused,
        )
        ids_T = torch.cat([self._ids(length) for length in lengths])
        plan = AttentionPlan(segments, self._device)
        found: Tensor = self.model(ids_T, index_T, plan, self.kernel, query, self.autocast)[0]
        return found

    def _states(self, ids_T: Tensor, positions_T: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        plan = AttentionPlan(segments, self._device)
        states: Tensor = self.model(ids_T, positions_T, plan, self.kernel, autocast=self.autocast)
        return states

    def _ids(self, length: int) -> Tensor:
        return ((7 * torch.arange(length)) % 61 + 3).to(self._device) % self.model.vocabulary_size

    @property
    def _device(self) -> torch.device:
        return self.model.head.weight.device

    @property
    def _name(self) -> str:
        return type(self.model.whole).__name__
