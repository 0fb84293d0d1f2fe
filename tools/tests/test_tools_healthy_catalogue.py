"""The catalogue of healthy programs, what counts as a wrong done to one, and the table made of them."""

import pytest
from fault_runs import Observation
from healthy_catalogue import HEALTHY, PROGRAMS, complaints
from healthy_table import BEGIN, table
from liveness_table import END, with_table

SUSPICION = "offbeat liveness: suspicion: missing-member: rank 0 never came to barrier\n  since: now\n"
CLEARING = "offbeat liveness: it moves again: after 4 s\n"
POINTER = "offbeat liveness: rank 1: missing-member, told in full by rank 0\n"


def test_the_catalogue_and_the_folder_agree():
    assert sorted(each.script.name for each in HEALTHY) == sorted(path.name for path in PROGRAMS.glob("*.py"))


@pytest.mark.parametrize("healthy", HEALTHY, ids=lambda healthy: healthy.name)
def test_each_program_says_what_it_is_and_where_it_is_done(healthy):
    assert healthy.title.endswith(".")
    assert "\n" not in healthy.title
    assert ": done" in healthy.script.read_text()
    run = healthy.run(4, stall_after_s=1, pause_s=4)
    assert list(run.acts) == sorted(run.acts, key=lambda act: act.at_s)
    assert run.limit_s > 4 * healthy.pauses


@pytest.mark.parametrize(
    ("of_rank_0", "codes", "found"),
    [
        ("", {0: 0, 1: 0}, []),
        (SUSPICION + CLEARING, {0: 0, 1: 0}, []),
        (SUSPICION + CLEARING + SUSPICION, {0: 0, 1: 0}, ["3 things were said: suspicion, clearing, suspicion"]),
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


def test_the_table_says_what_was_said_and_when():
    outputs = {0: f"{SUSPICION}{CLEARING}rank 0: done\n", 1: f"{POINTER}rank 1: done\n"}
    verdict = {"kind": "missing-member", "text": SUSPICION}
    seen = Observation(exit_codes={0: 0, 1: 0}, outputs=outputs, verdicts=((2.04, verdict),))
    rows = table({HEALTHY[0]: seen})
    assert (
        "suspicion: missing-member: rank 0 never came to barrier | 2.0 s | it moves again: after 4 s | well |" in rows
    )
    page = with_table(f"before\n{BEGIN}\n{END}\nafter\n", rows, BEGIN)
    assert page == with_table(page, rows, BEGIN)
    with pytest.raises(ValueError, match="must hold"):
        with_table("no marks", rows, BEGIN)
