"""Each known kind of hang, as a program in plain torch, is named rightly by the monitor: on 2, 4 and 8 real ranks.

By day one program of each class of verdict, on one number of ranks. A run with a proven fault is ended at once; a
suspicion is only reported, and the run continues until the timeout of the call that waits.
"""

import re

import pytest
from fault_runs import FaultRun, Observation, Results, is_proof
from liveness_programs import CATALOGUE, CYCLES, Fault, named_axes, named_ranks, ranks_at

STALL_AFTER_S = 1.5
# How long a verdict may take on a machine that does many other things; docs/liveness-programs.md has measured times.
PATIENCE_S = 10.0
# Of torch's groups and stores, where a fault is only suspected; what follows is not tested.
TIMEOUT_S = 8.0
AFTER_TIMEOUT_S = 12.0
ABORTED = 4
DEFAULT_GROUP = "0"
pytestmark = pytest.mark.timeout(240)
# One program of each kind of verdict and reason; those of groups by axes need 4 ranks to have two groups.
BY_DAY = {
    (fault.name, 4 if fault.axes else 2)
    for fault in {(fault.kinds[0], fault.because, fault.axes): fault for fault in reversed(CATALOGUE)}.values()
}
every_fault = pytest.mark.parametrize(
    ("fault", "size"),
    [
        pytest.param(
            fault, size, id=f"{fault.name}-{size}", marks=[] if (fault.name, size) in BY_DAY else [pytest.mark.nightly]
        )
        for size in (8, 4, 2)
        for fault in reversed(CATALOGUE)
        if size in fault.sizes
    ],
)


def run_of(fault: Fault, size: int) -> FaultRun:
    if fault.certainty == "proof":
        return FaultRun(script=fault.script, size=size, stall_after_s=STALL_AFTER_S)
    return FaultRun(
        script=fault.script,
        size=size,
        stall_after_s=STALL_AFTER_S,
        gloo_timeout_s=TIMEOUT_S,
        limit_s=TIMEOUT_S + AFTER_TIMEOUT_S,
        environment=(("STORE_TIMEOUT_S", str(TIMEOUT_S)),),
    )


@pytest.fixture(scope="module")
def results(request):
    params = [item.callspec.params for item in request.session.items if item.path == request.node.path]
    wanted = dict.fromkeys(run_of(given["fault"], given["size"]) for given in params)
    started = Results(wanted, num_ranks_at_once=20)
    yield started
    started.close()


@every_fault
def test_the_verdict_names_the_fault(results, fault, size):
    seen = results.of(run_of(fault, size))
    found = seen.first(proof=fault.certainty == "proof")
    assert found is not None, f"no {fault.certainty} was reported; exit codes {seen.exit_codes}\n{printed(seen)}"
    found_s, verdict = found
    text = verdict["text"]
    assert verdict["kind"] in fault.kinds, text
    assert found_s < STALL_AFTER_S + PATIENCE_S, text
    if verdict["group"] != DEFAULT_GROUP:
        assert set(fault.axes) <= named_axes(verdict), text
    for words in fault.says:
        assert re.search(words, text), f"the verdict does not say {words!r}\n{text}"

    guilty = fault.guilty(size)
    # A process that has no world yet is named by its pid, and has no rank.
    shown, waiting = ranks_at(verdict, fault, "missing"), ranks_at(verdict, fault, "waits")
    at_fault = shown - {None}
    assert at_fault <= guilty, text
    assert waiting, f"the verdict does not show where the others wait\n{text}"
    assert not at_fault & waiting, text
    if verdict["kind"] in CYCLES:
        assert named_ranks(verdict) <= guilty | waiting, text
    else:
        assert named_ranks(verdict) <= guilty, text
        if fault.lines("missing"):
            assert shown | named_ranks(verdict), f"the verdict shows no rank to look at\n{text}"


@every_fault
def test_what_is_proven_is_ended_and_what_is_suspected_continues(results, fault, size):
    seen = results.of(run_of(fault, size))
    codes, output = set(seen.exit_codes.values()), printed(seen)
    if fault.certainty == "proof":
        found = seen.first(proof=True)
        assert found is not None, output
        if found[1]["kind"] == "dead-peer":
            # A rank whose wait ends with a peer's death may end with the error that torch raises.
            still_there = {rank for rank, code in seen.exit_codes.items() if code is None}
            assert still_there <= named_ranks(found[1]), f"exit codes {seen.exit_codes}\n{output}"
        else:
            assert codes == {ABORTED}, f"exit codes {seen.exit_codes}\n{output}"
        return
    if fault.ends != "well":
        cleared = [each.text for each in seen.messages if each.what == "clearing"]
        assert not cleared, f"{cleared[0]}\nis wrong: no rank came\n{output}"
    early = [each for each in seen.verdicts if is_proof(each[1]) and each[0] < TIMEOUT_S]
    assert not early, f"{early[0][1]['text']}\nis no proof: {fault.because.text}"
    if fault.ends == "well":
        assert codes == {0}, f"a rank that moves was ended\n{output}"
        return
    left_s = [seen.left_s[rank] for rank, code in seen.exit_codes.items() if code is not None]
    assert all(each >= TIMEOUT_S for each in left_s), f"ended after {left_s} s: {fault.because.text}\n{output}"
    if fault.ends == "never":
        assert codes == {None}, f"exit codes {seen.exit_codes}\n{output}"


def printed(seen: Observation) -> str:
    return "\n".join(f"--- rank {rank}\n{output}" for rank, output in seen.outputs.items())
