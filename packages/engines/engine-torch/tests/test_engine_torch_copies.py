"""A rank that dies is replaced from copies in memory, and the run ends with the bits of an undisturbed one."""

import socket
import threading

import pytest
import torch
from dying_ranks import Death, train

from offbeat_core import ConfigError, DeadlineError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._family_check import FamilyCheck
from offbeat_engine_torch._state.copies import PackedState, PeerCopies
from offbeat_engine_torch._state.ring import Ring
from offbeat_testing import tiny_model

EVERYWHERE = (
    Death("forward", 1, (0,)),
    Death("backward", 1, (1,)),
    Death("reduction", 1, (0,)),
    Death("before step", 1, (1,)),
    Death("step", 2, (0,)),
    Death("before copying", 2, (1,)),
    Death("sending", 2, (1,)),
    Death("copying", 2, (0,)),
    Death("not sent", 2, (1,)),
    Death("copied", 3, (1,)),
    Death("weights", 4, (0,)),
)


def config(folder, **changes):
    settings = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 2, "total_steps": 20, "device": "cpu"}
    options = {"peer_copies": True, **changes.pop("options", {})}
    return TrainEngineConfig(
        model_path=str(folder), max_tokens_per_microbatch=48, options=options, **settings | changes
    )


@pytest.fixture
def update(make_groups, weighted_loss):
    def do(engine, number):
        loss = engine.forward_backward(make_groups(seed=number), weighted_loss)["loss"].value
        engine.step()
        return loss

    return do


def weights_of(engine):
    return {name: tensor.numpy().tobytes() for name, tensor in engine.weights()}


def assert_ends_alike(settings, axes, deaths, update, num_updates=3):
    undisturbed = train(settings, axes, num_updates, [], update)
    healed = train(settings, axes, num_updates, deaths, update)
    assert healed == undisturbed
    assert list(healed[0][1]) == list(range(1, num_updates + 1))


def test_ranks_that_die_one_after_the_other_at_every_place(model_folder, update):
    """Each rank, in the same update as the one before too, and spares that have taken the place of others."""
    assert_ends_alike(config(model_folder), {"dp": 2}, EVERYWHERE, update, num_updates=8)


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2},
        pytest.param({"dp": 4}, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "cp": 2}, marks=pytest.mark.nightly),
        pytest.param({"dp": 4, "tp": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_two_that_die_at_once_are_replaced_where_neither_holds_the_copy_of_the_other(model_folder, update, axes):
    deaths = [Death("reduction", 2, (0, 2)), Death("step", 2, (3,))]
    assert_ends_alike(config(model_folder), axes, deaths, update)


CHANGES = {
    "lora": {"lora_rank": 4},
    "int8": {"options": {"moments_dtype": "int8"}},
    "muon": {"options": {"optimizer": "muon", "moments_dtype": "bfloat16"}},
    "offloaded": {"options": {"offload_optimizer": True}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"options": {"router_bias_rate": 0.01}}], ids=str)
def test_routers_change_nothing_of_that(tmp_path, update, changes):
    """They are watched again to find out how they choose; biases that steps move are no parameters."""
    folder = tiny_model(tmp_path, "glm4_moe")
    assert_ends_alike(config(folder, **changes), {"dp": 2}, [Death("step", 2, (1,))], update)


@pytest.mark.nightly
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_settings_of_the_optimizer_change_nothing_of_that(model_folder, update, changes):
    assert_ends_alike(config(model_folder, **changes), {"dp": 2}, [Death("step", 2, (1,))], update)


def test_a_rank_that_dies_with_the_one_that_held_its_copy_is_lost_and_all_say_so(model_folder, update):
    found = train(config(model_folder), {"dp": 2, "tp": 2}, 2, [Death("backward", 2, (1, 2))], update)
    wanted = "OffbeatError: the state of rank 1 is lost, and with the rank after it the only copy"
    assert all(said.startswith(wanted) for said, _ in found), found


@pytest.mark.mesh(dp=2, compare=False)
def test_the_next_update_does_not_wait_for_copies_but_the_next_copies_do(model_folder, mesh, update, monkeypatch):
    engine = TorchTrainEngine.create(config(model_folder), mesh)
    engine.keep_copies(0)
    engine.copies.wait()
    may_send, keep = threading.Event(), PeerCopies.keep
    monkeypatch.setattr(PeerCopies, "keep", lambda *args: may_send.wait() and keep(*args))
    update(engine, 1)
    engine.keep_copies(1, b"of 1")
    update(engine, 2)
    assert list(engine.copies.held) == [0]
    threading.Timer(0.5, may_send.set).start()
    engine.keep_copies(2, b"of 2")
    assert 1 in engine.copies.held
    engine.copies.wait()
    assert [PackedState(each.own).note for each in engine.copies.held.values()] == [b"of 2"]


def test_a_rank_that_sends_no_copy_is_named_at_the_deadline():
    ends = [socket.socketpair() for _ in range(2)]
    ends[0][0].settimeout(0.2)
    ring = Ring(before=3, incoming=ends[0][0], outgoing=ends[1][0])
    with pytest.raises(DeadlineError, match=r"copies of ranks' states: waited 0\.2 s for rank 3"):
        ring.pass_on(torch.zeros(8 * 2**20, dtype=torch.uint8), 8)
    ring.close()


def test_copies_need_a_second_rank(model_folder):
    for call in (TorchTrainEngine.plan, TorchTrainEngine.create):
        with pytest.raises(ConfigError, match="peer_copies needs a second rank"):
            call(config(model_folder))


@pytest.mark.mesh(dp=2, compare=False)
def test_what_copies_take_is_planned(model_folder, mesh, update):
    """While they are made there are four states, then two."""
    settings = config(model_folder)
    engine = TorchTrainEngine.create(settings, mesh)
    for number in range(2):
        update(engine, number)
        engine.keep_copies(number)
    engine.copies.wait()
    [pair] = engine.copies.held.values()
    trained = sum(parameter.numel() for parameter in engine._optimizer.parameters.values())
    planned = TorchTrainEngine.plan(settings, 2).copied_bytes * trained
    assert 2 * (pair.own.numel() + pair.peers.numel()) == pytest.approx(planned, rel=0.1)


LIMITED = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
LIMITED |= {"max_position_embeddings": 64}


@pytest.fixture(scope="module")
def limited_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("limited"), "llama", config=LIMITED)


@pytest.mark.mesh(dp=2, compare=False)
def test_what_is_known_of_a_model_is_neither_read_nor_checked_again(limited_folder, mesh, update, monkeypatch):
    engine = TorchTrainEngine.create(config(limited_folder), mesh)
    update(engine, 1)
    engine.keep_copies(1, b"note")
    engine.copies.wait()
    limit, wanted = engine._policy.limit, weights_of(engine)
    monkeypatch.setattr(FamilyCheck, "run", None)
    monkeypatch.setattr("offbeat_engine_torch._policy.read_weights", None)
    made, *found = TorchTrainEngine.recover(config(limited_folder), mesh, engine.copies if mesh.rank else None)
    assert found == [1, b"note"]
    assert limit is not None
    assert made._policy.limit == limit
    assert weights_of(made) == wanted
    assert update(made, 2) == update(engine, 2)
