"""The catalogues of programs, what counts as a wrong done to a healthy one, and the tables made of them."""

import pytest
from fault_runs import Observation
from liveness_programs import CATALOGUE, FAULTS, HEALTHY, PROGRAMS, complaints, ranks_at
from liveness_table import BEGIN, BEGIN_HEALTHY, END, fault_table, healthy_table, plain_words, with_table

SUSPICION = "offbeat liveness: suspicion: missing-member: rank 0 never came to barrier\n  since: now\n"
CLEARING = "offbeat liveness: it moves again: after 4 s\n"
POINTER = "offbeat liveness: rank 1: missing-member, reported in full by rank 0\n"


@pytest.mark.parametrize(("catalogue", "folder"), [(CATALOGUE, FAULTS), (HEALTHY, PROGRAMS)])
def test_a_catalogue_and_its_folder_agree(catalogue, folder):
    assert sorted(each.script.name for each in catalogue) == sorted(path.name for path in folder.glob("*.py"))


@pytest.mark.parametrize("program", [*CATALOGUE, *HEALTHY], ids=lambda program: program.name)
def test_each_program_says_what_it_is(program):
    assert program.title.endswith(".")
    assert "\n" not in program.title


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_each_fault_marks_who_waits_and_who_is_missing(fault):
    assert fault.because.text
    assert fault.lines("waits")
    assert not fault.lines("waits") & fault.lines("missing")
    assert all(fault.guilty(size) for size in fault.sizes)


def test_a_rank_on_its_way_out_is_shown_where_its_error_was_raised():
    fault = next(each for each in CATALOGUE if each.name == "literal_source")
    [line] = fault.lines("waits")
    raised = f"in barrier, after RuntimeError: closed (raised at {fault.script}:{line} in <module>)"
    party = {"rank": 0, "doing": raised, "stack": [{"file": "agent.py", "line": line}]}
    assert ranks_at({"parties": [party]}, fault, "waits") == {0}
    assert ranks_at({"parties": [party]}, fault, "missing") == set()


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.name)
def test_each_healthy_program_says_that_it_is_done_and_has_time_for_it(healthy):
    assert ": done" in healthy.script.read_text()
    run = healthy.run(4, stall_after_s=1, pause_s=4)
    assert list(run.acts) == sorted(run.acts, key=lambda act: act.at_s)
    assert run.limit_s > 4 * healthy.pauses


@pytest.mark.parametrize(
    ("of_rank_0", "codes", "found"),
    [
        ("", {0: 0, 1: 0}, []),
        (SUSPICION + CLEARING, {0: 0, 1: 0}, []),
        (SUSPICION + CLEARING + SUSPICION, {0: 0, 1: 0}, ["3 messages were printed: suspicion, clearing, suspicion"]),
        (SUSPICION.replace("suspicion: ", ""), {0: 0, 1: 0}, ["proof on rank 0"]),
        ("", {0: 4, 1: 0}, ["exit codes {0: 4, 1: 0}"]),
    ],
)
def test_a_proof_a_third_word_and_an_end_are_wrong(of_rank_0, codes, found):
    outputs = {0: f"{of_rank_0}rank 0: done\n", 1: f"{POINTER}rank 1: done\n"}
    wrong = complaints(HEALTHY[0], Observation(exit_codes=codes, outputs=outputs))
    assert len(wrong) == len(found)
    assert all(text.startswith(beginning) for text, beginning in zip(wrong, found, strict=True))


def test_what_a_second_leader_says_again_is_no_further_thing():
    outputs = {
        0: f"{SUSPICION}{CLEARING}rank 0: done\n",
        1: f"{SUSPICION}{CLEARING.replace('4 s', '3 s')}rank 1: done\n",
    }
    assert complaints(HEALTHY[0], Observation(exit_codes={0: 0, 1: 0}, outputs=outputs)) == []


def test_a_rank_that_is_not_done_is_wrong():
    seen = Observation(exit_codes={0: 0, 1: 0}, outputs={0: "rank 0: done\n", 1: ""})
    assert complaints(HEALTHY[0], seen) == ["rank 1 is not done"]


LOG = """[rank1]: Traceback (most recent call last):
[rank1]: RuntimeError: [/__w/pytorch/gloo/pair.cc:78] Timed out waiting 20000ms for recv operation to complete
"""


@pytest.mark.parametrize(
    ("codes", "output", "said"),
    [
        ({0: None, 1: 1}, LOG, "rank 1: RuntimeError: Timed out waiting 20000ms for recv operation to complete"),
        ({0: None, 1: -9}, "", "nothing; the launcher sees the exit status"),
        ({0: None, 1: None}, "", "nothing"),
        ({0: 0, 1: 0}, "", "nothing: it continues and ends well"),
    ],
)
def test_what_plain_torch_prints_is_shown_without_its_noise(codes, output, said):
    seen = Observation(exit_codes=codes, left_s={0: 20.5, 1: 20.0}, outputs={0: "", 1: output})
    assert plain_words(seen)[0] == said


def test_the_tables_show_what_was_reported_and_when():
    fault, seen = CATALOGUE[0], Observation(verdict={"kind": "dead-peer"}, verdict_s=1.84)
    plain = Observation(exit_codes={0: None}, left_s={0: 26.0}, outputs={0: ""})
    assert "| `dead-peer` | proof | 1.8 s | nothing | > 26 s |" in fault_table({fault: seen}, {fault: plain})
    outputs = {0: f"{SUSPICION}{CLEARING}rank 0: done\n", 1: f"{POINTER}rank 1: done\n"}
    verdict = {"kind": "missing-member", "text": SUSPICION}
    seen = Observation(exit_codes={0: 0, 1: 0}, outputs=outputs, verdicts=((2.04, verdict),))
    said = "suspicion: missing-member: rank 0 never came to barrier | 2.0 s | it moves again: after 4 s | well |"
    assert said in healthy_table({HEALTHY[0]: seen})


def test_a_table_goes_between_its_marks_and_can_be_renewed():
    page = f"before\n{BEGIN}\n{END}\nbetween\n{BEGIN_HEALTHY}\n{END}\nafter\n"
    once = with_table(with_table(page, "| a |"), "| b |", BEGIN_HEALTHY)
    assert once == f"before\n{BEGIN}\n| a |\n{END}\nbetween\n{BEGIN_HEALTHY}\n| b |\n{END}\nafter\n"
    assert with_table(once, "| a |") == once
    with pytest.raises(ValueError, match="must hold"):
        with_table("no marks", "| a |")
