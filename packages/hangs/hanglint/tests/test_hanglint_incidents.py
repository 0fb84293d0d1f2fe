"""Two hangs that were met in production: each faulty form is found, each mended one is clean."""

from pathlib import Path

import pytest

from offbeat_hanglint import Finding, Settings, analyse

INCIDENTS = Path(__file__).parent / "incidents"


def findings(name: str) -> tuple[Finding, ...]:
    return analyse([INCIDENTS / f"{name}.py"], Settings()).findings


def test_flushes_that_only_the_leader_counts_are_found_with_the_way_from_condition_to_gather():
    found = next(f for f in findings("replica_leader_wrong") if f.rule == "HL002" and f.confidence != "low")
    assert "flush" in found.steps[1].what
    assert "gather_object" in found.steps[-1].what


def test_an_answer_broadcast_from_global_rank_0_within_a_replica_is_found():
    assert [(f.rule, f.confidence) for f in findings("replica_leader_literal_source")] == [("HL031", "high")]


def test_an_answer_broadcast_from_the_replicas_own_first_rank_is_clean():
    assert findings("replica_leader_right") == ()


@pytest.mark.parametrize("form", ["source_rank_reduction", "library_reduction"])
def test_a_reduction_over_dp_and_cp_under_a_condition_on_cp_is_found(form):
    found, *below = findings(f"{form}_wrong")
    assert (found.rule, found.confidence, found.function) == ("HL002", "high", "Engine.run")
    assert all(f.confidence == "low" for f in below)
    assert "cp" in found.message


@pytest.mark.parametrize("form", ["source_rank_reduction", "library_reduction"])
def test_the_same_reduction_on_the_last_pipeline_stage_is_clean_because_the_axes_do_not_meet(form):
    assert findings(f"{form}_right") == ()
