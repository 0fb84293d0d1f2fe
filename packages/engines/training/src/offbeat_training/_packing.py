"""Lays sequences out without padding: which go together, and where each token lies.

Two things are never computed: what comes after the last loss token's predecessor (it predicts nothing), and, with
shared prompts, a prompt's second copy. A group's prompt is laid out once; its completions follow, each at positions
that continue the prompt's. Sequences of one group (`TrainSequence.group`) are one unit of a plan: they go into one
micro-batch, and share a prompt among themselves alone.

Shapes: T packed tokens, N loss tokens, M placeholder tokens, t a token's index in its own sequence.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offbeat_core import Image, RouteIds, Routes, TrainSequence, join_routes
from offbeat_training._images import ImageInputs, Indices, NoImages


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of packed tokens that attend causally to one another, and to all of `parent` when there is one.

    Args:
        start: index of its first token in the pack.
        length: tokens, at least 1.
        parent: index of the segment it continues, which ends where its positions begin; -1 for none.
    """

    start: int
    length: int
    parent: int = -1


@dataclass(frozen=True, kw_only=True)
class Family:
    """Sequences laid out together: `members` share their first `prefix` tokens (0 for a sequence of its own)."""

    members: tuple[int, ...]
    prefix: int
    num_tokens: int


Share = list[list[Family]]
"""Micro-batches of one data parallel rank; an empty one for a rank that only meets the others in it."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch, laid out.

    Args:
        ids_T: token ids.
        positions_T: position of each token in its own sequence; [3, T] where a position has three axes.
        segments: which tokens attend to which, in order of `start`; children follow their parent at once.
        predictor_N: packed index of the token whose hidden state predicts each loss token.
        target_N: id of each loss token.
        sequence_N: which of `members` each loss token belongs to, sorted.
        token_N: t of each loss token.
        members: index of each sequence among those given.
        images: in the order of their placeholders; an image of a shared prompt once.
        spans: (start, stop) of each image's placeholders in the pack.
        routes_TLK: experts that the tokens took in the engine that sampled, -1 where that is not known; None where it
            is known of no token. A prompt that sequences share has the route of the first of them that knows it: they
            differ where versions sampled them that differ, or where an engine computes a prompt twice and rounds it
            otherwise.
    """

    ids_T: Indices
    positions_T: Indices
    segments: tuple[Segment, ...]
    predictor_N: Indices
    target_N: Indices
    sequence_N: Indices
    token_N: Indices
    members: tuple[int, ...]
    images: tuple[Image, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    routes_TLK: RouteIds | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the segments."""
        return tuple(segment.length for segment in self.segments)

    @property
    def place_M(self) -> Indices:  # noqa: N802  a shape
        """Packed index of each placeholder token."""
        return np.concatenate([_NONE, *(np.arange(start, stop) for start, stop in self.spans)])


def plan_packs(sequences: Sequence[TrainSequence], *, budget: int, share_prompts: bool) -> list[list[Family]]:
    """Choose micro-batches: first-fit decreasing, the same for the same input.

    Args:
        sequences: those without a loss token are left out.
        budget: packed tokens of a micro-batch at most; a sequence or a group longer than that goes alone.
        share_prompts: lay out a prompt once for all sequences that begin with it.

    Returns:
        Families of each micro-batch.
    """
    packs: list[list[Family]] = []
    room: list[int] = []
    for unit in _find_units(sequences, budget, share_prompts):
        place = next((i for i, left in enumerate(room) if unit.num_tokens <= left), None)
        if place is None:
            packs.append([])
            room.append(budget)
            place = len(packs) - 1
        packs[place].extend(unit.families)
        room[place] -= unit.num_tokens
    return packs


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Sequences that go into one micro-batch as a whole: a family, or all those of a group."""

    families: tuple[Family, ...]
    num_tokens: int


def _find_units(
    sequences: Sequence[TrainSequence], budget: int, share_prompts: bool, *, fair: int | None = None
) -> list[_Unit]:
    """Largest first; see `find_families`."""
    units: dict[tuple[int, ...], list[Family]] = {}
    for family in find_families(sequences, budget, share_prompts, fair=fair):
        group = sequences[family.members[0]].group
        # No sequence has the index -1, so the key of a group is never that of a family.
        units.setdefault(family.members if group < 0 else (-1, group), []).append(family)
    found = [_Unit(families=tuple(each), num_tokens=sum(it.num_tokens for it in each)) for each in units.values()]
    # With members, so that equal sizes have one order too: all ranks make the same plan.
    return sorted(found, key=lambda unit: (-unit.num_tokens, unit.families[0].members))


def find_families(
    sequences: Sequence[TrainSequence], budget: int, share_prompts: bool, *, fair: int | None = None
) -> list[Family]:
    """Sequences of one prompt, the ids before the first loss token; what is above the budget is cut into several.

    Sequences with different images, wherever those stand, share nothing; nor do those of different groups.

    With `fair`, sequences of one prompt are also cut where they hold the tokens of several fair shares. A group of
    sequences is never cut.
    """
    prompts: dict[tuple[int, int, bytes, tuple[bytes, ...]], list[int]] = {}
    known: dict[int, bytes] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, sequence in enumerate(sequences):
        places = np.flatnonzero(sequence.loss_mask)
        if not len(places):
            continue
        first[index], last[index] = int(places[0]), int(places[-1])
        prompt = sequence.ids[: first[index]].tobytes() if share_prompts else b""
        looks = tuple(_look(image, known) for image in sequence.images) if share_prompts else ()
        prompts.setdefault((0 if share_prompts else index, sequence.group, prompt, looks), []).append(index)
    families = []
    for members in prompts.values():
        prefix, limit = first[members[0]], budget
        if sequences[members[0]].group >= 0:
            limit = sum(last[member] for member in members)
        elif fair is not None:
            own = sum(last[member] - prefix for member in members)
            # Each part lays out the prompt anew, so only the tokens that are not shared are divided.
            limit = min(budget, prefix + -(-own // max(1, round((prefix + own) / fair))))
        families.extend(_cut(members, prefix, last, limit))
    return families


def _look(image: Image, known: dict[int, bytes]) -> bytes:
    """Return a digest of an image; samples of one prompt mostly hold the very same array, which is read once."""
    if id(image) not in known:
        known[id(image)] = hashlib.blake2b(f"{image.shape}".encode() + image.tobytes(), digest_size=16).digest()
    return known[id(image)]


def _cut(members: list[int], prefix: int, last: dict[int, int], budget: int) -> list[Family]:
    """Cut one prompt's sequences into families within the budget."""
    families: list[Family] = []
    taken: list[int] = []
    size = prefix
    for member in members:
        own = last[member] - prefix
        if taken and size + own > budget:
            families.append(_family(taken, prefix, size))
            taken, size = [], prefix
        taken.append(member)
        size += own
    return [*families, _family(taken, prefix, size)]


def _family(members: list[int], prefix: int, num_tokens: int) -> Family:
    return Family(members=tuple(members), prefix=prefix if len(members) > 1 else 0, num_tokens=num_tokens)


def plan_shares(
    sequences: Sequence[TrainSequence],
    *,
    budget: int,
    share_prompts: bool,
    num_shares: int,
    even: bool = False,
    round_up_to: int = 1,
) -> list[Share]:
    """Choose micro-batches for every share, as many for each: the ranks meet in each of them.

    One share is planned as `plan_packs` does. For more, or with `even`, a prompt's sequences are cut apart where that
    is what it takes to give every share work, and families go to the least filled micro-batch, longest first.
    Source: the longest-processing-time rule (Graham 1969).

    Args:
        sequences: those without a loss token are left out.
        budget: packed tokens of a micro-batch at most; a sequence or a group longer than that goes alone.
        share_prompts: lay out a prompt once for all sequences of a micro-batch that begin with it.
        num_shares: data-parallel ranks.
        even: micro-batches of one share are alike too, as the stages of a pipeline want them.
        round_up_to: each share gets a multiple of so many micro-batches, the last ones empty.

    Returns:
        For each share its micro-batches, in the order in which the shares meet.
    """
    if num_shares == 1 and not even:
        shares = [plan_packs(sequences, budget=budget, share_prompts=share_prompts)]
    else:
        shares = _plan_evenly(sequences, budget, share_prompts, num_shares)
    return [share + [[]] * (-len(share) % round_up_to) for share in shares]


def _plan_evenly(sequences: Sequence[TrainSequence], budget: int, share_prompts: bool, num_shares: int) -> list[Share]:
    num_tokens = sum(unit.num_tokens for unit in _find_units(sequences, budget, share_prompts))
    if not num_tokens:
        return [[] for _ in range(num_shares)]
    rounds = -(-num_tokens // (budget * num_shares))
    # Ends at the latest where each unit has a micro-batch of its own.
    while True:
        fair = -(-num_tokens // (rounds * num_shares))
        units = _find_units(sequences, budget, share_prompts, fair=fair)
        bins = _fill_evenly([unit.num_tokens for unit in units], rounds * num_shares, budget)
        if bins is not None:
            return _deal([[family for index in each for family in units[index].families] for each in bins], num_shares)
        rounds += 1


def rounds_with_images(sequences: Sequence[TrainSequence], shares: list[Share]) -> list[bool]:
    """Return, for each round of micro-batches, whether any share has an image: all meet in the vision tower then."""
    return [
        any(sequences[member].images for batch in batches for family in batch for member in family.members)
        for batches in zip(*shares, strict=True)
    ]


def _fill_evenly(sizes: Sequence[int], num_bins: int, budget: int) -> list[list[int]] | None:
    """Put one item after the other into the emptiest bin.

    Args:
        sizes: of the items, largest first.
        num_bins: how many bins there are.
        budget: size of a bin at most; an item larger than that goes alone.

    Returns:
        Index of each bin's items; None when one does not fit.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, place) for place in range(num_bins)]
    for index, size in enumerate(sizes):
        load, place = heapq.heappop(emptiest)
        if load and load + size > budget:
            return None
        bins[place].append(index)
        heapq.heappush(emptiest, (load + size, place))
    return bins


def _deal(bins: list[list[Family]], num_shares: int) -> list[Share]:
    """Deal bins, fullest first, so that those of one round are alike; every second round goes backwards."""
    bins = sorted(bins, key=lambda batch: -sum(family.num_tokens for family in batch))
    shares: list[Share] = [[] for _ in range(num_shares)]
    for first in range(0, len(bins), num_shares):
        order = range(num_shares) if first // num_shares % 2 == 0 else reversed(range(num_shares))
        for share, batch in zip(order, bins[first : first + num_shares], strict=True):
            shares[share].append(batch)
    return shares


def lay_out(
    sequences: Sequence[TrainSequence],
    families: Sequence[Family],
    images: ImageInputs | None = None,
    *,
    segment_multiple: int = 1,
    pack_multiple: int = 1,
    num_tokens: int = 1,
) -> MicroBatch:
    """Lay out one micro-batch chosen by `plan_shares`. Padding has id and position 0, and comes after what is real.

    Args:
        sequences: of the whole update.
        families: of the micro-batch; none for a rank that only meets the others in it.
        images: what is known of the model's; None for one that takes none.
        segment_multiple: each segment is padded to a multiple of this.
        pack_multiple: the pack is padded to a multiple of this, by a segment of its own.
        num_tokens: of the pack, at least.
    """
    members = [sequences[member] for family in families for member in family.members]
    route_shape = next((each.shape[1:] for member in members for each in member.routes), None)
    layout = _Layout(images or NoImages(), segment_multiple, route_shape)
    for family in families:
        layout.add(sequences, family)
    layout.pad(-(-max(layout.size, num_tokens) // pack_multiple) * pack_multiple - layout.size)
    return layout.pack()


def idle_micro_batch() -> MicroBatch:
    """Return one token of one sequence, for a rank with nothing to compute that must meet the others in every layer."""
    zero = np.zeros(1, np.int64)
    return MicroBatch(
        ids_T=zero,
        positions_T=zero,
        segments=(Segment(start=0, length=1),),
        predictor_N=zero,
        target_N=zero,
        sequence_N=zero,
        token_N=zero,
        members=(),
    )


_NONE: Indices = np.zeros(0, np.int64)
_IDLE = TrainSequence(ids=np.zeros(1, np.int32), loss_mask=np.zeros(1, bool))


class _Layout:
    """Collects the pieces of one pack."""

    def __init__(self, images: ImageInputs, segment_multiple: int, route_shape: tuple[int, int] | None) -> None:
        self.known, self.multiple, self.route_shape = images, segment_multiple, route_shape
        self.routes: list[RouteIds] = []
        self.ids: list[npt.NDArray[np.int32]] = []
        self.positions: list[Indices] = []
        self.segments: list[Segment] = []
        self.size = 0
        self.predictor: list[Indices] = [_NONE]  # numpy joins no empty list
        self.target: list[npt.NDArray[np.int32]] = []
        self.token: list[Indices] = [_NONE]
        self.members: list[int] = []
        self.images: list[Image] = []
        self.spans: list[tuple[int, int]] = []

    def add(self, sequences: Sequence[TrainSequence], family: Family) -> None:
        """Lay out the family's prompt, then what each member has of its own."""
        prefix, prompt_start, parent = family.prefix, self.size, -1
        if prefix:
            routes = [each for member in family.members for each in sequences[member].routes]
            parent = self._segment(sequences[family.members[0]], 0, prefix, -1, routes)
        for member in family.members:
            sequence = sequences[member]
            token = np.flatnonzero(sequence.loss_mask)
            offset = self.size - prefix  # packed index of token t is t + offset, for t >= prefix
            # Up to the last loss token, which predicts nothing.
            self._segment(sequence, prefix, int(token[-1]) if len(token) else 0, parent, sequence.routes)
            before = token - 1
            # The first own token is predicted by the prompt's last, which lies in the copy that all share.
            self.predictor.append(np.where(before >= prefix, before + offset, before + prompt_start))
            self.target.append(sequence.ids[token])
            self.token.append(token)
            self.members.append(member)

    def _segment(self, sequence: TrainSequence, start: int, stop: int, parent: int, routes: Sequence[Routes]) -> int:
        """Append tokens [start, stop), unless there are none: a completion of one token has nothing of its own."""
        if stop > start:
            self._place_images(sequence, start, stop)
            padding = (start - stop) % self.multiple
            self._append_routes(routes, start, stop, padding)
            self._append(sequence.ids[start:stop], self.known.positions(sequence)[..., start:stop], padding, parent)
        return len(self.segments) - 1

    def pad(self, length: int) -> None:
        """Append a segment of padding, unless it is none."""
        if length:
            self._append_routes((), 0, 0, length)
            self._append(_IDLE.ids[:0], self.known.positions(_IDLE)[..., :0], length, -1)

    def _append(self, ids: npt.NDArray[np.int32], positions: Indices, padding: int, parent: int) -> None:
        """Append a segment of these tokens, with so much padding after them."""
        self.segments.append(Segment(start=self.size, length=len(ids) + padding, parent=parent))
        self.ids.append(np.pad(ids, (0, padding)))
        self.positions.append(np.pad(positions, [(0, 0)] * (positions.ndim - 1) + [(0, padding)]))
        self.size += len(ids) + padding

    def _append_routes(self, routes: Sequence[Routes], start: int, stop: int, padding: int) -> None:
        if self.route_shape is not None:
            here = join_routes(routes, stop, self.route_shape)[start:]
            self.routes.append(np.pad(here, ((0, padding), (0, 0), (0, 0)), constant_values=-1))

    def _place_images(self, sequence: TrainSequence, start: int, stop: int) -> None:
        for image, (first, end) in zip(sequence.images, self.known.spans(sequence), strict=True):
            if start <= first < stop:  # and so end <= stop: a segment ends before a loss token, not within an image
                self.images.append(image)
                self.spans.append((first - start + self.size, end - start + self.size))

    def pack(self) -> MicroBatch:
        """Join the pieces."""
        counts = [len(token) for token in self.token[1:]]  # without the _NONE that it begins with
        return MicroBatch(
            ids_T=np.concatenate(self.ids).astype(np.int64),
            positions_T=np.concatenate(self.positions, axis=-1),
            segments=tuple(self.segments),
            predictor_N=np.concatenate(self.predictor),
            target_N=np.concatenate([_NONE, *self.target]),
            sequence_N=np.repeat(np.arange(len(counts)), np.array(counts, np.int64)),
            token_N=np.concatenate(self.token),
            members=tuple(self.members),
            images=tuple(self.images),
            spans=tuple(self.spans),
            routes_TLK=np.concatenate(self.routes) if self.routes else None,
        )
