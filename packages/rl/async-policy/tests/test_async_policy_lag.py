"""The arithmetic of max_version_lag, against a search that tries every order."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_async_policy._lag import can_train_in_time, is_too_old, room_for_new_groups


def some_order_trains_in_time(oldest_versions, *, next_version, groups_per_update, max_version_lag):
    """The slow reference: try every choice of groups for the next update, then continue."""

    @cache
    def search(left, version):
        if not left:
            return True
        if any(is_too_old(age, next_version=version, max_version_lag=max_version_lag) for age in left):
            return False
        if len(left) <= groups_per_update:
            return True
        return any(search(rest, version + 1) for rest in rests(left, groups_per_update))

    @cache
    def rests(left, num_taken):
        if num_taken == 0:
            return frozenset({left})
        return frozenset(rest for i in range(len(left)) for rest in rests((*left[:i], *left[i + 1 :]), num_taken - 1))

    return search(tuple(sorted(oldest_versions)), next_version)


cases = {
    "oldest": st.lists(st.integers(0, 4), max_size=7),
    "next_version": st.integers(3, 6),
    "size": st.integers(1, 3),
    "lag": st.integers(0, 5),
}


@settings(max_examples=400)
@given(**cases)
def test_earliest_deadline_first_finds_a_way_exactly_if_there_is_one(oldest, next_version, size, lag):
    case = {"next_version": next_version, "groups_per_update": size, "max_version_lag": lag}
    assert can_train_in_time(oldest, **case) == some_order_trains_in_time(oldest, **case)


@settings(max_examples=400)
@given(**cases, engine_version=st.integers(4, 6))
def test_the_room_for_new_groups_is_exact(oldest, next_version, size, lag, engine_version):
    case = {"next_version": next_version, "groups_per_update": size, "max_version_lag": lag}
    room = room_for_new_groups(len(oldest), engine_version=engine_version, **case)
    if can_train_in_time(oldest, **case):
        assert can_train_in_time([*oldest, *[engine_version] * room], **case)
        assert not can_train_in_time([*oldest, *[engine_version] * (room + 1)], **case)


@given(**cases)
def test_taking_the_oldest_groups_keeps_the_others_in_time(oldest, next_version, size, lag):
    if can_train_in_time(oldest, next_version=next_version, groups_per_update=size, max_version_lag=lag):
        rest = sorted(oldest)[size:]
        assert can_train_in_time(rest, next_version=next_version + 1, groups_per_update=size, max_version_lag=lag)
