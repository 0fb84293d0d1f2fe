"""The loss of multi-token prediction, reduced by megatron-core over DP x CP under a guard that not all members pass.

megatron-core's own tracker and its own groups, around the training steps of the engine.
"""

import threading
import time

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from offbeat_core import DeadlineError, GuardError, TrainEngineConfig, TrainSequence
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_engine_megatron._megatron import CpuShim
from offbeat_liveness import current_monitor
from offbeat_mesh import Mesh
from offbeat_testing import tiny_model

DEADLINE_S = 15.0
LOOK_AFTER_S = 3.0
MTP_LOSS = 0.25


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "qwen3"))


def make_engine(model_path, mesh):
    return MegatronTrainEngine.create(TrainEngineConfig(model_path=model_path, device="cpu", dtype="float32"), mesh)


def train(engine):
    ids = np.arange(1, 17, dtype=np.int32)
    sequence = TrainSequence(ids=ids, loss_mask=np.arange(16) > 3)
    engine.forward_backward([sequence], lambda tokens: (-tokens.logprobs_N.sum() / tokens.total_tokens, {}))
    engine.step()


def track_loss():
    """What megatron-core's MTP loss does in a step: each rank of the last stage adds what its tokens gave."""
    MTPLossLoggingHelper.tracker.clear()
    MTPLossLoggingHelper.save_loss_to_tracker(
        torch.tensor(MTP_LOSS * (1 + parallel_state.get_context_parallel_rank())),
        layer_number=0,
        num_layers=1,
        avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def reduce_where_cp_is_0_and_train_on(engine):
    """The fault: a guard that also asks for cp rank 0, around a reduction of DP x CP."""
    if parallel_state.get_context_parallel_rank() == 0:
        MTPLossLoggingHelper.reduce_loss_in_tracker()
    train(engine)


def look(found):
    """Ask the monitor, beside a main thread that is stuck, until it sees both ranks wait."""
    for _second in range(int(DEADLINE_S - LOOK_AFTER_S) - 2):
        verdict = current_monitor().ask()
        if verdict is not None and verdict.kind == "different-order":
            found.append(verdict)
            return
        time.sleep(1)


@pytest.mark.nightly
@pytest.mark.ranks(2, deadline_s=90, compare=False)
def test_the_guard_that_needs_cp_rank_0_hangs_and_the_verdict_names_it(model_path):
    engine = make_engine(model_path, Mesh(cp=2, deadline_s=DEADLINE_S))
    found = []
    watcher = threading.Timer(LOOK_AFTER_S, look, [found])
    with CpuShim():
        train(engine)
        track_loss()
        watcher.start()
        with pytest.raises((RuntimeError, DeadlineError), match=r"Timed out|Connection closed|waited 15 s"):
            reduce_where_cp_is_0_and_train_on(engine)
    watcher.join()
    [verdict] = found
    links = {(link.waiter, link.on): link.axes for link in verdict.links}
    assert verdict.kind == "different-order", verdict.text
    assert links["rank 0", "rank 1"] == ("dp", "cp"), verdict.text  # rank 1 never came to the reduction
    assert "reduce_where_cp_is_0_and_train_on" in verdict.text, verdict.text
    assert "in MegatronTrainEngine." in verdict.text, verdict.text  # where rank 1 is instead: in its next step


@pytest.mark.mesh(cp=2)
@pytest.mark.mesh(dp=2, cp=2)
def test_through_where_it_is_refused_at_once(mesh, model_path):
    engine = make_engine(model_path, mesh)
    with CpuShim():
        train(engine)
        track_loss()
        with engine.mesh.where(pp="last", cp=0) as reports:
            if reports:
                with pytest.raises(GuardError, match="share cp"):
                    MTPLossLoggingHelper.reduce_loss_in_tracker()
        train(engine)


@pytest.mark.mesh(cp=2)
@pytest.mark.mesh(cp=2, tp=2)
@pytest.mark.mesh(pp=2, cp=2)
def test_all_ranks_of_the_last_stage_take_part_and_one_reports(mesh, model_path):
    engine = make_engine(model_path, mesh)
    reported = []
    with CpuShim():
        for _step in range(2):
            train(engine)
            with engine.mesh.where(pp="last") as takes_part:
                if takes_part:
                    track_loss()
                    MTPLossLoggingHelper.reduce_loss_in_tracker()
            with engine.mesh.where(pp="last", dp=0, cp=0, tp=0) as reports:
                if reports:
                    reported.append(MTPLossLoggingHelper.tracker["values"].item())
    found = mesh.group(*mesh.axes).all_gather_data(reported)
    assert sorted(found, key=len) == [[]] * (mesh.size - 1) + [[1.5 * MTP_LOSS] * 2]
