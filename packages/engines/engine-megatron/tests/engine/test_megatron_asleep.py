"""A trainer that lends its device between updates, on every rank: memory is given back, and nothing is lost."""

import numpy as np
import pytest
from megatron_layouts import Layout, copied, params_of, same
from megatron_yardstick import make_sequences, policy_loss

from offbeat_core import ConfigError, OffbeatError, SleepingTrainEngine

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
KINDS = [
    Layout(axes={"dp": 2}, options=OVERLAP),
    Layout(axes={"pp": 2}, lora=True),
    Layout(axes={"tp": 2, "pp": 2}),
    Layout(axes={"dp": 2}, options={"distributed_optimizer": False}),
    Layout(model="qwen3-moe", axes={"dp": 2, "ep": 2}),
]


def train(engine, between=lambda: None):
    """Losses, norms, the weights afterwards, and what the first policy says."""
    reported = []
    for step in range(3):
        reported.append(engine.forward_backward(make_sequences(step), policy_loss)["loss"].value)
        reported.append(engine.step()["grad_norm"].value)
        engine.logprobs(make_sequences(9), reference=True)
        between()
    return reported, copied(engine), np.concatenate(engine.logprobs(make_sequences(9), reference=True))


@pytest.mark.parametrize("layout", params_of(KINDS, in_ci=KINDS[:2]))
def test_sleeping_between_updates_changes_no_bit(create, layout, mesh):
    undisturbed = train(create(layout, mesh))
    engine = create(layout, mesh)

    def between():
        engine.sleep(1)
        asleep = copied(engine)
        engine.sleep(2)
        engine.sleep(2)
        engine.wake(("weights",))
        assert same(asleep, copied(engine))
        engine.sleep(2)
        engine.wake()

    found = train(engine, between)
    assert found[0] == undisturbed[0]
    assert same(found[1], undisturbed[1])
    assert np.array_equal(found[2], undisturbed[2])
    assert isinstance(engine, SleepingTrainEngine)


def held_bytes(tensors):
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.mesh(dp=2, compare=False)
def test_each_level_gives_its_memory_back_and_what_is_away_is_not_used(create, mesh, shared):
    engine = create(mesh=mesh)
    engine.forward_backward(make_sequences(0), policy_loss)
    with pytest.raises(OffbeatError, match="gradients that no step has used"):
        engine.sleep(1)
    engine.step()
    kinds = (engine._optimizer.state, engine._optimizer.gradients, engine._passes.tensors)
    awake = [held_bytes(get()) for get in kinds]
    assert all(awake)
    engine.sleep(1)
    assert [held_bytes(get()) for get in kinds] == [0, 0, awake[2]]
    for use in (
        lambda: engine.forward_backward(make_sequences(0), policy_loss),
        lambda: engine.logprobs(make_sequences(0)),
        engine.step,
        lambda: engine.save(shared / "asleep"),
        lambda: engine.load(shared / "asleep"),
    ):
        with pytest.raises(OffbeatError, match=r"sleeps without its optimizer; call wake\(\)"):
            use()
    engine.sleep(2)
    assert [held_bytes(get()) for get in kinds] == [0, 0, 0]
    with pytest.raises(OffbeatError, match="weights: the training engine sleeps without its weights"):
        engine.weights()
    for act, text in ((lambda: engine.sleep(3), "level must be"), (lambda: engine.wake(("all",)), "knows the tags")):
        with pytest.raises(ConfigError, match=text):
            act()
    engine.wake()
    assert [held_bytes(get()) for get in kinds] == awake
