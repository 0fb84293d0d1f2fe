"""The plugin as a user has it: whole test files, run by a pytest of their own."""

import builtins
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from offbeat_liveness import Collective

# Imported here: the sessions inside this one would do it anew each time, as pytester restores sys.modules.
from offbeat_testing._ranks import _child, _launch, _report
from offbeat_testing._ranks._report import (
    RankState,
    first_difference,
    recorded_collectives,
    waiting_for_the_finished,
)

pytest_plugins = ["pytester"]

HEAD = """
    import os, signal, time
    import pytest
    import torch
    import torch.distributed as dist
"""


@pytest.fixture
def run(pytester):
    """Runs a test file in a pytest inside this process; its ranks are real processes all the same."""

    def run_file(source, *options):
        pytester.makepyfile(HEAD + source)
        others = ("cacheprovider", "asyncio", "hypothesispytest", "xdist", "timeout")
        return pytester.runpytest_inprocess(*[f"-pno:{name}" for name in others], *options)

    return run_file


@pytest.mark.ranks(2)
def test_collectives_of_the_process_a_rank_was_forked_from_are_not_its_own(rank):
    """The names of groups and the numbers of their collectives begin anew in a fork, and may come again."""
    for _ in range(3):
        dist.all_reduce(torch.tensor([rank]))
    now_ns = time.time_ns()
    dist.all_reduce(torch.tensor([1.0]))
    own, all_of_them = recorded_collectives(now_ns), recorded_collectives()
    assert own is not None
    assert all_of_them is not None
    assert [each.inputs for each in own] == [("Float[1]",)]
    assert len(all_of_them) >= 4


@pytest.mark.ranks(1)
def test_the_recorder_is_left_alone_while_another_thread_makes_a_group():
    """torch writes its tables of groups without a lock that a reader could take: one that meets it dies of SIGSEGV."""
    is_making, may_continue = threading.Event(), threading.Event()

    def _new_process_group_helper() -> None:
        is_making.set()
        may_continue.wait()

    dist.all_reduce(torch.tensor([1.0]))
    thread = threading.Thread(target=_new_process_group_helper)
    thread.start()
    is_making.wait()
    unread = recorded_collectives(patience_s=0.1)
    may_continue.set()
    thread.join()
    assert unread is None
    read = recorded_collectives()
    assert read is not None
    assert [each.op for each in read] == ["all_reduce"]


@pytest.mark.ranks(1)
def test_call_sites_are_read_while_another_thread_imports(tmp_path, monkeypatch):
    """torch's compiler, which torch would import to name them, is left alone: nothing stands in for it."""
    (tmp_path / "slow_to_import.py").write_text("import time\nimport builtins\nbuiltins.may_continue.wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    builtins.may_continue = threading.Event()
    dist.all_reduce(torch.tensor([1.0]))
    compiler = sys.modules.get("torch._inductor")
    thread = threading.Thread(target=lambda: __import__("slow_to_import"))
    thread.start()
    while "slow_to_import" not in sys.modules:
        time.sleep(0.001)
    meanwhile = recorded_collectives()
    assert sys.modules.get("torch._inductor") is compiler
    builtins.may_continue.set()
    thread.join()
    assert meanwhile is not None
    assert f"{Path(__file__).name}:" in str(meanwhile[-1].call_site)


def test_a_rank_whose_collectives_could_not_be_read_is_not_compared():
    one = Collective(group="0", seq=1, op="all_reduce")
    states = {0: RankState(collectives=[one], members={"0": [0, 1]}), 1: RankState(collectives=None)}
    assert first_difference(states) is None
    assert waiting_for_the_finished(states, {1}) == ""
    states[1] = RankState(members={"0": [0, 1]})
    assert first_difference(states) is not None
    assert waiting_for_the_finished(states, {1}) != ""


def test_a_rank_whose_calls_the_recorder_may_have_forgotten_has_missed_none(monkeypatch):
    monkeypatch.setattr(_report, "RECORDED", 3)
    one, members = Collective(group="0", seq=1, op="all_reduce"), {"0": [0, 1]}
    for num_others, is_reported in ((2, True), (3, False)):
        others = [Collective(group="1", seq=number, op="all_reduce") for number in range(1, num_others + 1)]
        states = {0: RankState(collectives=[one], members=members), 1: RankState(collectives=others, members=members)}
        assert (first_difference(states) is not None) is is_reported


def test_a_rank_that_waits_for_one_that_has_joined_it_is_only_slower():
    calls = [Collective(group="0", seq=1, op="broadcast", done=done) for done in (False, True)]
    states = {rank: RankState(collectives=[call], members={"0": [0, 1]}) for rank, call in enumerate(calls)}
    assert waiting_for_the_finished(states, {1}) == ""


@pytest.mark.ranks(2, 4)
def test_ranks_meet_in_one_world(rank, ranks):
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == sum(range(ranks.size))
    assert (ranks.rank, dist.get_world_size(), torch.get_num_threads()) == (rank, ranks.size, 1)


@pytest.mark.ranks(2)
def test_gradients_are_computed_in_ranks(rank):
    weight = torch.ones(3, requires_grad=True)
    (weight * (rank + 1)).sum().backward()
    dist.all_reduce(weight.grad)
    assert weight.grad.tolist() == [3, 3, 3]


@pytest.fixture
def reports_much_and_late(monkeypatch):
    notify = _child.Rank._state

    def report_late(self, *, stacks):
        if not stacks:
            return notify(self, stacks=False)
        time.sleep(0.6)
        return replace(notify(self, stacks=True), stacks="x" * 2**18)

    monkeypatch.setattr(_child.Rank, "_state", report_late)
    monkeypatch.setattr(_launch, "GRACE_S", 600.0)


@pytest.mark.timeout(60)
@pytest.mark.ranks(2)
def test_a_rank_that_still_has_more_to_say_than_a_pipe_holds_may_leave(reports_much_and_late, rank):
    # Rank 0 has ended, so both are asked for their state after 1 s; rank 1 has ended before they answer.
    time.sleep(_launch.LOOK_S + 0.2 if rank else 0)


@pytest.mark.ranks(2, join=False)
def test_without_joining_there_is_torchruns_environment(rank):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2) == (int(os.environ["RANK"]), 2)
    dist.barrier()


@pytest.mark.parametrize("value", [{"any": "thing"}, [1]])
@pytest.mark.ranks(2)
def test_fixtures_and_parameters_reach_every_rank(value, rank, tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_OF_RANK", str(rank))
    (tmp_path / str(rank)).write_text(str(value))
    dist.barrier()
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(value)}
    assert os.environ["OWN_OF_RANK"] == str(rank)


@pytest.mark.mesh(dp=2, tp=2)
@pytest.mark.mesh(tp=2)
def test_a_mesh_is_made_over_the_ranks(mesh, ranks):
    assert mesh.size == ranks.size == mesh.axes["dp"] * 2
    assert mesh.group("tp").size == 2
    total = mesh.group("dp", "tp").all_reduce(torch.ones(1))
    assert total.item() == mesh.size


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"cp": 2, "ep": 2}], indirect=True)
def test_meshes_may_be_parameters(mesh):
    assert mesh.size == 2
    assert mesh.axes["ep"] == (2 if mesh.axes["cp"] == 2 else 1)


def test_backward_in_the_tests_process_does_not_spoil_the_ranks(run):
    done = run("""
    def test_before():
        torch.ones(3, requires_grad=True).sum().backward()

    @pytest.mark.ranks(2)
    def test_ranks():
        torch.ones(3, requires_grad=True).sum().backward()
    """)
    done.assert_outcomes(passed=2)


def test_the_rank_that_failed_first_comes_first_with_its_output(run):
    done = run("""
    @pytest.mark.ranks(3)
    def test_it(rank):
        print(f"I am {rank}")
        expected = 5
        if rank == 1:
            assert rank + 3 == expected
        dist.barrier()
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "rank 1 of 3 failed first",
            "*: in test_it",
            "    assert rank + 3 == expected",
            "E   assert (1 + 3) == 5",
            "first difference of the collectives: number 1 of group '0' (ranks [[]0, 1, 2])",
            "  rank 0: barrier() at *:12 in test_it",
            "  rank 1: never came to it",
            "after that, rank * lost its connection to a peer, at *:12: in test_it",
            "*Captured rank 1 stdout*",
            "I am 1",
        ]
    )


def test_a_rank_that_waits_for_one_that_has_finished_fails_long_before_the_deadline(run):
    done = run("""
    @pytest.mark.ranks(2, deadline_s=50)
    def test_it(rank):
        for step in range(2 + rank):
            dist.all_reduce(torch.ones(4))
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "rank 1 waits for ranks [[]0], which came to the end of the test without all_reduce",
            "first difference of the collectives: number 3 of group '0' (ranks [[]0, 1])",
            "  rank 0: never came to it",
            "  rank 1: all_reduce(float32[[]4]) at *:9 in test_it",
            "rank 1 was still running and was killed; it was here:",
            '  File "*", line 9, in test_it',
        ]
    )


def test_the_deadline_ends_a_hang_and_reports_where_each_rank_is(run):
    done = run("""
    @pytest.mark.ranks(2, deadline_s=1)
    def test_it(rank):
        if rank == 0:
            dist.recv(torch.ones(1), src=1)
        else:
            time.sleep(1000)
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "ranks [[]0, 1] were not through after 1 s",
            "rank 0 was still running and was killed; it was here:",
            "    dist.recv(torch.ones(1), src=1)",
            "rank 1 was still running and was killed; it was here:",
            "    time.sleep(1000)",
        ]
    )


@pytest.mark.nightly
def test_the_verdict_of_the_liveness_monitor_is_part_of_the_text(run):
    done = run("""
    import offbeat_liveness as liveness

    @pytest.mark.ranks(2, deadline_s=8)
    def test_it(rank):
        if rank == 0:
            with liveness.waiting("samples.get", on="rank 1", deadline_s=60):
                time.sleep(1000)
        dist.barrier()
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "ranks [[]0, 1] were not through after 8 s",
            "offbeat liveness: suspicion: wait-cycle:*",
            "  rank 0 waits for rank 1: samples.get*",
        ]
    )


def test_the_deadline_may_come_from_the_settings(run, pytester):
    pytester.makeini("[pytest]\nranks_deadline_s = 0.5")
    done = run("""
    @pytest.mark.ranks(1)
    def test_it():
        time.sleep(1000)
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*not through after 0.5 s"])


ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "its process was killed by SIGKILL",
    "os.kill(os.getpid(), signal.SIGSEGV)": "its process was killed by SIGSEGV",
    "os._exit(7)": "its process left with exit code 7 before the end of the test",
    "raise SystemExit(3)": "E   SystemExit: 3",
}


def test_a_rank_that_dies_is_named_with_how(run):
    bodies = [
        f"""
    @pytest.mark.ranks(2)
    def test_{number}(rank):
        if rank == 1:
            {end}
        dist.barrier()
    """
        for number, end in enumerate(ENDS)
    ]
    done = run("".join(bodies))
    done.assert_outcomes(failed=len(ENDS))
    done.stdout.fnmatch_lines([line for text in ENDS.values() for line in ("rank 1 of 2 failed first", text)])


@pytest.mark.nightly
def test_a_stopped_rank_is_named(run):
    done = run("""
    @pytest.mark.ranks(2, deadline_s=1)
    def test_it(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["rank 1 was still running*", "it is stopped (SIGSTOP)*"])


def test_a_different_order_is_shown_though_every_rank_came_to_the_end(run):
    done = run("""
    @pytest.mark.ranks(2)
    def test_it(rank):
        for op in [dist.ReduceOp.SUM] * 2:
            dist.all_reduce(torch.ones(4), op=op)
        shape = (2, 2) if rank else (4,)
        dist.all_reduce(torch.ones(shape))
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "every rank passed, but they did not call the same collectives",
            "first difference of the collectives: number 3 of group '0' (ranks [[]0, 1])",
            "  rank 0: all_reduce(float32[[]4]) at *:11 in test_it",
            "  rank 1: all_reduce(float32[[]2, 2]) at *:11 in test_it",
        ]
    )


def test_the_comparison_can_be_left_out(run):
    done = run("""
    @pytest.mark.ranks(2, compare=False)
    def test_it(rank):
        dist.all_reduce(torch.ones((2, 2) if rank else (4,)))
    """)
    done.assert_outcomes(passed=1)


@pytest.mark.ranks(3)
def test_members_may_hold_different_shapes_where_the_op_allows_it(rank):
    parts = [torch.ones(2) for _ in range(3)] if rank == 1 else None
    dist.gather(torch.ones(2), parts, dst=1)
    dist.scatter(torch.ones(2), parts, src=1)
    ours, theirs = [[1, 2, 3], [2, 3, 1], [3, 1, 2]][rank], [[1, 2, 3], [2, 3, 1], [3, 1, 2]][rank]
    dist.all_to_all_single(torch.zeros(sum(theirs)), torch.ones(sum(ours)), theirs, ours)
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(torch.ones(5), group=pair)


def test_skips_and_expected_failures_keep_their_meaning(run):
    done = run("""
    @pytest.mark.ranks(2)
    def test_skips():
        pytest.skip("not here")

    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    @pytest.mark.ranks(2)
    def test_expected():
        1 / 0

    @pytest.mark.xfail(raises=KeyError, strict=True)
    @pytest.mark.ranks(2)
    def test_unexpected():
        1 / 0

    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    @pytest.mark.ranks(2)
    def test_expected_on_one_rank_alone(rank):
        assert 1 / rank == 2

    @pytest.mark.xfail(strict=True)
    @pytest.mark.ranks(2)
    def test_passes_though_expected_to_fail():
        pass

    @pytest.mark.skip
    @pytest.mark.ranks(2)
    def test_never_starts():
        1 / 0

    @pytest.mark.ranks(2)
    def test_raises():
        with pytest.raises(ZeroDivisionError):
            1 / 0
    """)
    done.assert_outcomes(passed=1, skipped=2, xfailed=1, failed=3)


def test_a_skip_on_one_rank_only_is_a_failure(run):
    done = run("""
    @pytest.mark.ranks(2)
    def test_it(rank):
        if rank == 1:
            pytest.skip("only I")
    """)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["ranks [[]1] skipped the test and the others ran it*"])


def test_wrong_use_is_reported(run):
    done = run("""
    def test_without_a_mark(rank):
        pass

    @pytest.mark.ranks(2)
    async def test_coroutine():
        pass

    @pytest.mark.ranks("two")
    def test_size():
        pass

    @pytest.mark.ranks(2)
    def test_mesh(mesh):
        pass

    @pytest.mark.ranks(2, dedline_s=3)
    def test_option():
        pass
    """)
    done.assert_outcomes(errors=1, failed=4)
    done.stdout.fnmatch_lines(
        [
            "*'rank' needs @pytest.mark.ranks*",
            "*asyncio.run*",
            "*takes a number of processes*",
            "*'mesh' needs @pytest.mark.mesh*",
            "*takes a number of processes*dedline_s*",
        ]
    )


def test_a_fixture_cannot_use_the_rank_by_mistake(run):
    done = run("""
    @pytest.fixture
    def source(rank):
        return 5 if rank == 0 else None

    @pytest.mark.ranks(2)
    def test_it(source):
        pass
    """)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*the fixture 'rank' has its value in the test's body only*"])
