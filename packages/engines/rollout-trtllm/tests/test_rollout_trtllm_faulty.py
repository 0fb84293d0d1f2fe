"""Incident A between processes: the faulty form is named by the liveness verdict, a killed leader by its replica."""

from pathlib import Path

import pytest
from fault_runs import FaultRun, run_faults

KILLED = Path(__file__).parent / "killed_leader.py"
SCRIPT = Path(__file__).parent / "faulty_replica.py"
LINES = SCRIPT.read_text().splitlines()
STALL_AFTER_S = 1.5


def line_of(mark):
    return next(number for number, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("dp", "tp"), [(2, 2), *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(1, 2), (2, 4)])]
)
def test_a_replica_whose_leader_alone_was_asked_is_named(start_engine, tmp_path, dp, tp):
    addresses = ",".join(start_engine(tmp_path / "no-model", tp).address for _ in range(dp))
    environment = (("ENGINES", addresses), ("no_proxy", "127.0.0.1"))
    run = FaultRun(script=SCRIPT, size=dp * tp, stall_after_s=STALL_AFTER_S, limit_s=40.0, environment=environment)
    ((_, seen),) = run_faults([run])
    assert seen.verdict is not None, seen.outputs
    text, kind = seen.verdict["text"], seen.verdict["kind"]
    # Leaders wait in the second gather, the others have proceeded to the barrier.
    assert f"{SCRIPT.name}:{line_of('missing')}" in text, text
    if kind == "dead-peer":  # now and then gloo ends a process that gets the other call's message first
        assert "gloo aborts a process" in text, text
        return
    assert kind in {"different-op", "missing-member", "different-order"}, text
    assert ("tp" if dp > 1 else "the default group") in text, text
    assert f"{SCRIPT.name}:{line_of('waits')}" in text, text


@pytest.mark.timeout(120)
def test_replicas_that_serve_images_hang_by_the_same_fault_and_are_named(start_engine, seeing):
    """The engines of a vision-language model, which a leader may be answered by that it loads in parts."""
    servers = [start_engine(seeing, 2) for _ in range(2)]
    environment = (("ENGINES", ",".join(each.address for each in servers)), ("no_proxy", "127.0.0.1"))
    run = FaultRun(script=SCRIPT, size=4, stall_after_s=STALL_AFTER_S, limit_s=40.0, environment=environment)
    ((_, seen),) = run_faults([run])
    assert [each.ask("GET", "/standin/record")["num_questions"] for each in servers] == [1, 1]
    assert seen.verdict is not None, seen.outputs
    assert f"{SCRIPT.name}:{line_of('missing')}" in seen.verdict["text"], seen.verdict["text"]


@pytest.mark.timeout(120)
def test_a_killed_leader_is_named_by_its_replica_and_the_others_go_on(start_engine, tmp_path):
    addresses = ",".join(start_engine(tmp_path / "no-model", 2).address for _ in range(2))
    environment = (("ENGINES", addresses), ("HANDLES", str(tmp_path)))
    ((_, seen),) = run_faults([FaultRun(script=KILLED, size=4, limit_s=40.0, environment=environment)])
    said = "\n".join(seen.outputs.values())
    for rank in (0, 1):
        assert f"rank {rank} serves version 1" in said, said
    assert "rank 3 raised for rank 2" in said, said
    assert seen.exit_codes == {0: 0, 1: 0, 2: -9, 3: 0}, said
