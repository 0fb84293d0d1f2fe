from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import DataError, Routes, TrainSequence
from offbeat_training import Family, NoImages, lay_out, plan_packs, plan_shares, rounds_with_images

PROMPTS = [[5], [5, 6], [7, 8, 9], [5, 6, 7, 8, 9, 10]]


def groups_of(num_prompts, samples, *, prompt, completion):
    """Sequences in shuffled groups of one prompt; the first stands alone."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(num_prompts):
        head = rng.integers(3, 300, rng.integers(*prompt))
        for _ in range(samples if number else 1):
            ids = np.concatenate([head, rng.integers(3, 300, rng.integers(*completion))]).astype(np.int32)
            made.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(head)))
    return [made[i] for i in rng.permutation(len(made))]


@st.composite
def sequence_lists(draw):
    made = []
    for _ in range(draw(st.integers(1, 14))):
        prompt = draw(st.sampled_from(PROMPTS))
        completion = draw(st.lists(st.integers(0, 9), min_size=0, max_size=8))
        mask = [False] * len(prompt) + [draw(st.booleans()) for _ in completion]
        made.append(TrainSequence(ids=np.array(prompt + completion, np.int32), loss_mask=np.array(mask)))
    return made


def history(pack, index):
    """Ids that packed token `index` sees, itself last, by following segments; and the places they must have."""
    segment = next(s for s in pack.segments if s.start <= index < s.start + s.length)
    own = list(range(segment.start, index + 1))
    if segment.parent < 0:
        return own
    parent = pack.segments[segment.parent]
    return list(range(parent.start, parent.start + parent.length)) + own


@settings(max_examples=150)
@given(sequences=sequence_lists(), budget=st.integers(2, 40), share=st.booleans())
def test_every_loss_token_is_predicted_from_exactly_its_own_past(sequences, budget, share):
    plans = plan_packs(sequences, budget=budget, share_prompts=share)
    seen = []
    for families in plans:
        pack = lay_out(sequences, families)
        assert len(pack.ids_T) <= budget or len(pack.members) == 1
        assert np.all(np.diff(pack.sequence_N) >= 0)
        for n, predictor in enumerate(pack.predictor_N):
            member, token = pack.members[pack.sequence_N[n]], int(pack.token_N[n])
            past = history(pack, predictor)
            assert pack.ids_T[past].tolist() == sequences[member].ids[:token].tolist()
            assert pack.positions_T[past].tolist() == list(range(token))
            assert pack.target_N[n] == sequences[member].ids[token]
            seen.append((member, token))
    wanted = [(i, int(t)) for i, s in enumerate(sequences) for t in np.flatnonzero(s.loss_mask)]
    assert sorted(seen) == wanted


@settings(max_examples=50)
@given(
    sequences=sequence_lists(),
    segment_multiple=st.sampled_from([1, 3, 4]),
    pack_multiple=st.sampled_from([1, 5, 8]),
    num_tokens=st.sampled_from([1, 50]),
)
def test_padding_makes_up_what_kernels_ask_for_and_changes_no_token(
    sequences, segment_multiple, pack_multiple, num_tokens
):
    for families in plan_packs(sequences, budget=40, share_prompts=False):
        plain = lay_out(sequences, families)
        how = {"segment_multiple": segment_multiple, "pack_multiple": pack_multiple, "num_tokens": num_tokens}
        padded = lay_out(sequences, families, **how)
        assert len(padded.ids_T) % pack_multiple == 0
        assert len(padded.ids_T) >= num_tokens
        assert [each.length % segment_multiple for each in padded.segments[: len(plain.segments)]] == [0] * len(
            plain.segments
        )
        assert sum(padded.lengths) == len(padded.ids_T) == len(padded.positions_T)
        assert padded.target_N.tolist() == plain.target_N.tolist()
        for one, other in zip(plain.predictor_N, padded.predictor_N, strict=True):
            assert plain.ids_T[history(plain, one)].tolist() == padded.ids_T[history(padded, other)].tolist()


@settings(max_examples=50)
@given(sequences=sequence_lists(), budget=st.integers(2, 40))
def test_the_plan_is_a_function_of_its_input(sequences, budget):
    plans = [plan_packs(list(sequences), budget=budget, share_prompts=True) for _ in range(2)]
    assert plans[0] == plans[1]


def test_sharing_lays_a_prompt_out_once():
    sequences = groups_of(num_prompts=4, samples=8, prompt=(20, 21), completion=(5, 6))
    sizes = [
        sum(
            len(lay_out(sequences, families).ids_T) for families in plan_packs(sequences, budget=10**6, share_prompts=s)
        )
        for s in (False, True)
    ]
    assert sizes[0] - sizes[1] == 3 * 7 * 20  # three groups of eight keep one prompt of 20 in place of eight


@settings(max_examples=100)
@given(sequences=sequence_lists(), share=st.booleans(), seed=st.integers(0, 99))
def test_routes_lie_where_their_tokens_do_and_a_shared_prompt_has_the_first_that_is_known(sequences, share, seed):
    rng = np.random.default_rng(seed)

    def routes_of(sequence):
        known_T = rng.random(len(sequence.ids)) < 0.6
        return np.where(known_T[:, None, None], rng.integers(0, 9, (len(sequence.ids), 2, 3)), -1)

    routes = [routes_of(each) if rng.random() < 0.7 else None for each in sequences]
    sequences = [
        each if ids_TLK is None else replace(each, routes=(Routes.pack(ids_TLK),))
        for each, ids_TLK in zip(sequences, routes, strict=True)
    ]
    for families in plan_packs(sequences, budget=40, share_prompts=share):
        pack, padded = (lay_out(sequences, families, num_tokens=9, segment_multiple=each) for each in (1, 4))
        if all(routes[member] is None for member in pack.members):
            assert pack.routes_TLK is None
            continue
        wanted = np.full((len(pack.ids_T), 2, 3), -1)
        for family in families:
            for member in family.members:
                if routes[member] is None:
                    continue
                for n in np.flatnonzero(pack.sequence_N == pack.members.index(member)):
                    past = history(pack, pack.predictor_N[n])
                    known = routes[member][: len(past)]
                    for place, route in zip(past, known, strict=True):
                        if wanted[place, 0, 0] < 0:
                            wanted[place] = route
        real = sorted({at for n in pack.predictor_N for at in history(pack, n)})
        np.testing.assert_array_equal(pack.routes_TLK[real], wanted[real])
        assert (np.delete(pack.routes_TLK, real, 0) == -1).all()
        kept, spread = (each.routes_TLK[each.routes_TLK[:, 0, 0] >= 0] for each in (pack, padded))
        np.testing.assert_array_equal(spread, kept)
        assert len(padded.routes_TLK) == len(padded.ids_T)


def test_a_sequence_above_the_budget_goes_alone():
    sequences = groups_of(num_prompts=3, samples=2, prompt=(30, 31), completion=(5, 6))
    assert [len(f) for f in plan_packs(sequences, budget=16, share_prompts=True)] == [1] * 5


@settings(max_examples=100)
@given(
    sequences=sequence_lists(),
    budget=st.integers(2, 40),
    share=st.booleans(),
    num_shares=st.integers(1, 5),
    even=st.booleans(),
    round_up_to=st.sampled_from([1, 2, 4]),
)
def test_shares_meet_in_every_micro_batch_and_leave_nothing_out(
    sequences, budget, share, num_shares, even, round_up_to
):
    how = {"budget": budget, "share_prompts": share, "even": even, "round_up_to": round_up_to}
    shares = plan_shares(sequences, **how, num_shares=num_shares)
    assert shares == plan_shares(list(sequences), **how, num_shares=num_shares)
    assert len(shares) == num_shares
    [num_rounds] = {len(batches) for batches in shares}
    assert num_rounds % round_up_to == 0
    packs = [lay_out(sequences, families) for batches in shares for families in batches if families]
    assert all(len(pack.ids_T) <= budget or len(pack.members) == 1 for pack in packs)
    members = sorted(member for pack in packs for member in pack.members)
    assert members == [i for i, s in enumerate(sequences) if s.loss_mask.any()]


def test_shares_are_alike():
    sequences = groups_of(num_prompts=5, samples=8, prompt=(20, 40), completion=(5, 30))
    for num_shares in (2, 4):
        shares = plan_shares(sequences, budget=200, share_prompts=True, num_shares=num_shares)
        for batches in zip(*shares, strict=True):
            loads = [sum(family.num_tokens for family in batch) for batch in batches]
            assert max(loads) <= 1.4 * min(loads)


def test_one_prompt_gives_work_to_all():
    sequences = groups_of(num_prompts=2, samples=8, prompt=(20, 21), completion=(6, 7))[1:]
    shares = plan_shares(sequences, budget=4096, share_prompts=True, num_shares=4)
    assert all(any(batches) for batches in shares)


@settings(max_examples=100)
@given(
    sequences=sequence_lists(),
    groups=st.lists(st.integers(-1, 3), min_size=14, max_size=14),
    budget=st.integers(2, 40),
    share=st.booleans(),
    num_shares=st.integers(1, 4),
    even=st.booleans(),
)
def test_a_group_is_never_split_between_micro_batches(sequences, groups, budget, share, num_shares, even):
    grouped = [replace(each, group=group) for each, group in zip(sequences, groups, strict=False)]
    shares = plan_shares(grouped, budget=budget, share_prompts=share, num_shares=num_shares, even=even)
    packs = [lay_out(grouped, families) for batches in shares for families in batches if families]
    places = {}
    for place, pack in enumerate(packs):
        for member in pack.members:
            places.setdefault(grouped[member].group, set()).add(place)
    assert all(len(found) == 1 for group, found in places.items() if group >= 0)
    for pack in packs:
        units = {(grouped[member].group, member if grouped[member].group < 0 else -1) for member in pack.members}
        assert len(pack.ids_T) <= budget or len(units) == 1
    members = sorted(member for pack in packs for member in pack.members)
    assert members == [i for i, s in enumerate(grouped) if s.loss_mask.any()]


@pytest.mark.parametrize("group", [0, 7])
def test_a_pair_computes_its_prompt_once(group):
    prompt, answers = np.arange(100, 120), [np.arange(3, 9), np.arange(30, 34)]
    pair = [
        TrainSequence(
            ids=np.concatenate([prompt, answer]).astype(np.int32),
            loss_mask=np.arange(len(prompt) + len(answer)) >= len(prompt),
            group=group,
        )
        for answer in answers
    ]
    [families] = plan_packs(pair, budget=10, share_prompts=True)  # a pair longer than the budget goes alone
    assert len(lay_out(pair, families).ids_T) == 20 + 5 + 3


def test_prompts_with_the_same_ids_are_shared_where_their_images_are_the_same():
    """Placeholder ids are alike for all images of a size, so it is the pixels that count, wherever their array lies."""
    ids, mask = np.array([5, 6, 7, 8], np.int32), np.array([False, False, False, True])
    dark, light = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)
    flat = dark.reshape(4, 16, 3)
    images = [(dark,), (light,), (dark.copy(),), (dark, light), (), (flat,)]
    sequences = [TrainSequence(ids=ids, loss_mask=mask, images=each) for each in images]
    families = [family.members for pack in plan_packs(sequences, budget=100, share_prompts=True) for family in pack]
    assert sorted(families) == [(0, 2), (1,), (3,), (4,), (5,)]


def test_all_shares_meet_in_the_vision_tower_where_one_of_them_has_an_image():
    ids, mask = np.array([5, 6, 7, 8], np.int32), np.array([False, False, False, True])
    plain = TrainSequence(ids=ids, loss_mask=mask)
    pictured = replace(plain, images=(np.zeros((8, 8, 3), np.uint8),))

    def batch(*members):
        return [Family(members=(member,), prefix=0, num_tokens=3) for member in members]

    shares = [[batch(0), batch(1, 2), []], [batch(3), batch(4), []]]
    assert rounds_with_images([plain, plain, plain, pictured, plain], shares) == [True, False, False]
    assert rounds_with_images([plain, plain, pictured, plain, plain], shares) == [False, True, False]


def test_a_model_that_takes_no_images_is_given_none():
    ids, mask = np.array([5, 6], np.int32), np.array([False, True])
    plain = TrainSequence(ids=ids, loss_mask=mask)
    NoImages().check([plain])
    with pytest.raises(DataError, match="sequence 1 holds 1 images, and the model takes none"):
        NoImages().check([plain, replace(plain, images=(np.zeros((8, 8, 3), np.uint8),))])
