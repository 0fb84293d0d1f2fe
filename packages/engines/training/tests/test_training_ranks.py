"""Ranks of a trainer, on real processes: each ends a call with what all have found, or with an error as all do."""

import math
import time

import numpy as np
import pytest
import torch

from offbeat_core import Metric, OffbeatError, PeerFailedError
from offbeat_training import BackgroundWrite, TrainerRanks


def ranks_of(mesh):
    """As of an engine whose last stage has the answers."""
    everyone, speaks = mesh.group("dp", "cp", "tp", "pp"), bool(mesh.where(pp="last", tp=0))
    return TrainerRanks(everyone, mesh.group("dp"), torch.device("cpu"), speaks=speaks, pp=mesh.group("pp"))


@pytest.mark.mesh(dp=2)
@pytest.mark.mesh(dp=2, pp=2)
@pytest.mark.mesh(pp=2, tp=2)
def test_every_rank_has_the_answers_of_the_last_stage_of_each_share(mesh):
    ranks = ranks_of(mesh)
    wanted = [[0.0, 1.0, 2.0], [10.0]][: ranks.num_shares]
    own = wanted[ranks.share] if mesh.where(pp="last") else []
    found = ranks.gather_shares(np.array(own, np.float32), [len(each) for each in wanted])
    assert [each.tolist() for each in found] == wanted


@pytest.mark.mesh(dp=2, pp=2)
def test_metrics_are_those_of_who_speaks_and_a_failure_is_raised_on_all(mesh, rank):
    ranks = ranks_of(mesh)
    assert ranks.exchange(ranks.place) == [0, 1, 2, 3]
    assert ranks.leader == (rank == 0)
    loss = 10.0**ranks.share if mesh.where(pp="last") else math.nan
    assert ranks.merge([{"loss": Metric(value=loss)}], None)["loss"].value == 5.5
    failure = RuntimeError("no memory left") if rank == 2 else None
    with pytest.raises((RuntimeError, PeerFailedError), match="no memory left") as raised:
        ranks.merge([], failure)
    assert isinstance(raised.value, PeerFailedError) != (rank == 2)


def finish(background):
    """Wait for a write to end; return its errors."""
    errors = []
    while True:
        try:
            background.finish()
        except OffbeatError as error:
            errors.append(str(error))
        else:
            return errors


@pytest.mark.mesh(dp=2, compare=False)
def test_a_write_goes_well_after_one_that_a_rank_came_too_late_for(mesh, rank, tmp_path):
    """Its group refuses every later call, so that the next one needs another."""
    background, given_up, done = BackgroundWrite(mesh, 3.0), tmp_path / "given up", []

    def write_late():
        end_s = time.monotonic() + 30
        while rank == 1 and not given_up.exists() and time.monotonic() < end_s:
            time.sleep(0.01)

    background.begin(tmp_path / "late", write_late, lambda: done.append("published"), lambda: done.append("cleared"))
    errors = finish(background)
    given_up.touch()
    assert errors
    assert done == ["cleared"]
    background.begin(tmp_path / "next", lambda: None, lambda: done.append("published"), lambda: done.append("cleared"))
    assert finish(background) == []
    assert done == ["cleared", "published"][: 2 - rank]
