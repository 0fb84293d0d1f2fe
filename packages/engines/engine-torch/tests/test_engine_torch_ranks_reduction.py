"""Ranks that add up gradients once a pass train as those that do with each micro-batch, and as one process."""

import numpy as np
import pytest
import torch
from pictured_sequences import Pictures
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat_core import ConfigError, TrainEngineConfig, TrainSequence
from offbeat_device import DeviceMemory
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._reduction import has_room, whole_gradients_bytes
from offbeat_placement import FILLED_SHARE, read_shape, train_memory
from offbeat_testing import tiny_model, tiny_vision_model

BUDGET_TOKENS = 16


def create(folder, mesh, reduce_once, **changes):
    options = {"reduce_once": reduce_once, "share_prompts": False, **changes.pop("options", {})}
    settings = {"learning_rate": 1e-3, "adam_eps": 1e-5, "max_tokens_per_microbatch": BUDGET_TOKENS, "device": "cpu"}
    return TorchTrainEngine.create(
        TrainEngineConfig(model_path=str(folder), options=options, **settings | changes), mesh
    )


def sequences(num, *, seed=0, scale=1.0):
    """Sequences of which a micro-batch takes one."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num):
        ids = rng.integers(3, 300, 14).astype(np.int32)
        extras = {"advantage": (scale * rng.normal(size=14)).astype(np.float32)}
        made.append(TrainSequence(ids=ids, loss_mask=np.arange(14) >= 5, extras=extras))
    return made


class Sums(TorchDispatchMode):
    """Counts the calls that add up gradients over ranks."""

    def __init__(self):
        super().__init__()
        self.num = self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "reduce_scatter" in function.overloadpacket.__name__:
            self.num += 1
            self.num_bytes += max(each.nbytes for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        return function(*args, **(kwargs or {}))


def train(engine, updates, loss):
    """Losses and norms of updates, and the weights after them."""
    reported = []
    for update in updates:
        reported.append(engine.forward_backward(update, loss)["loss"].value)
        reported.append(engine.step()["grad_norm"].value)
    return reported, {name: tensor.clone() for name, tensor in engine.weights()}


def assert_same(many, one, tolerance):
    np.testing.assert_allclose(many[0], one[0], rtol=tolerance, atol=tolerance)
    for name, tensor in one[1].items():
        torch.testing.assert_close(many[1][name], tensor, rtol=tolerance, atol=tolerance, msg=name)


# Of two ranks one has nothing to do in the last micro-batch of 1, 5 and 7 sequences; the gradients of 7 are clipped.
UPDATES = [sequences(5), sequences(1, seed=1), sequences(8, seed=2), sequences(7, seed=3, scale=300.0)]
CHANGES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora_rank": 4},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_gradients_added_up_once_a_pass_train_as_one_process(model_folder, mesh, weighted_loss, changes):
    one = train(create(model_folder, None, "off", **changes), UPDATES, weighted_loss)
    many = train(create(model_folder, mesh, "on", **changes), UPDATES, weighted_loss)
    assert_same(many, one, 3e-2 if "dtype" in changes else 2e-5)
    assert max(one[0][1::2]) > 10.0, "no gradient was clipped"


@pytest.mark.mesh(dp=2)
def test_the_sums_of_a_pass_do_not_grow_with_its_micro_batches(model_folder, mesh, weighted_loss):
    engine, each_time = create(model_folder, mesh, "on"), create(model_folder, mesh, "off")
    found = []
    for trained in (engine, each_time):
        for num in (2, 8):
            with Sums() as sums:
                trained.forward_backward(sequences(num), weighted_loss)
            found.append(sums.num)
            trained.step()
    assert found[0] == found[1] == found[2] > 0
    assert found[3] == 4 * found[2]


@pytest.mark.mesh(dp=2, compare=False)
def test_a_loss_that_raises_leaves_nothing_for_the_next_pass(model_folder, mesh, weighted_loss):
    engine, other = (create(model_folder, mesh, "on") for _ in range(2))
    calls = []

    def breaks(tokens):
        calls.append(tokens)
        if len(calls) == 2:
            raise ZeroDivisionError("no advantage")
        return weighted_loss(tokens)

    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(sequences(8), breaks)
    assert_same(*(train(each, UPDATES[:1], weighted_loss) for each in (engine, other)), 0.0)


class Memory:
    """A device of an accelerator's kind as far as its memory goes; all else is the CPU's."""

    def __init__(self, device, free_bytes):
        self._device, self._free_bytes = device, free_bytes

    def __getattr__(self, name):
        return getattr(self._device, name)

    def memory_of_smallest(self):
        return 1

    def memory(self):
        return DeviceMemory(allocated_bytes=0, peak_bytes=0, total_bytes=1, free_bytes=self._free_bytes)


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize(("others", "once"), [(1, True), (0, False)], ids=["room on both", "on one alone"])
def test_auto_adds_up_once_where_every_ranks_memory_suffices(model_folder, mesh, weighted_loss, others, once):
    engine = create(model_folder, mesh, "auto")
    shape = read_shape(str(model_folder))
    layout = engine.plan(engine.config, 2)
    estimate = train_memory(engine.config, layout, shape, on_cpu=False).estimate(shape).num_bytes
    gradients = 4 * shape.num_parameters
    assert whole_gradients_bytes(engine._policy.pieces, layout) == gradients
    enough = int((estimate + gradients) / FILLED_SHARE) + 1
    engine._device = Memory(engine._device, enough if mesh.rank == 0 or others else enough - 10)
    with Sums() as sums:
        engine.forward_backward(sequences(8), weighted_loss)
    with Sums() as of_one:
        engine.forward_backward(sequences(2), weighted_loss)
    assert sums.num == (of_one.num if once else 4 * of_one.num)


def test_room_is_what_is_held_and_free_but_for_a_share():
    memory = DeviceMemory(allocated_bytes=600, peak_bytes=900, total_bytes=2000, free_bytes=400)
    assert has_room(int(FILLED_SHARE * 1000), memory)
    assert not has_room(int(FILLED_SHARE * 1000) + 1, memory)


def test_auto_adds_up_with_each_micro_batch_on_cpus_and_the_plan_shows_what_on_holds(model_folder):
    settings = {"model_path": str(model_folder), "device": "cpu"}
    plans = {
        choice: TorchTrainEngine.plan(TrainEngineConfig(**settings, options={"reduce_once": choice}), 2)
        for choice in ("auto", "on", "off")
    }
    assert {choice: plan.whole_gradient_bytes for choice, plan in plans.items()} == {"auto": 0, "on": 4, "off": 0}
    with pytest.raises(ConfigError, match="reduce_once"):
        TorchTrainEngine.plan(TrainEngineConfig(**settings, options={"reduce_once": "yes"}), 2)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("untied") / "llama", "llama", tied=False, hidden_size=32)


@pytest.mark.mesh(dp=2)
def test_an_embedding_of_its_own_is_added_up_once_too(untied, mesh, weighted_loss):
    one = train(create(untied, None, "off"), UPDATES[:2], weighted_loss)
    assert_same(train(create(untied, mesh, "on"), UPDATES[:2], weighted_loss), one, 2e-5)


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.mesh(dp=2)
@pytest.mark.parametrize("counts", [(1, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 3)], ids=["in the first", "in the last"])
def test_a_tower_that_runs_in_one_micro_batch_is_added_up_with_the_last(pictured, mesh, weighted_loss, counts):
    updates = [Pictures(pictured).groups(counts, samples=2)]
    one = train(create(pictured, None, "off", max_tokens_per_microbatch=64), updates, weighted_loss)
    many = create(pictured, mesh, "on", max_tokens_per_microbatch=64)
    assert_same(train(many, updates, weighted_loss), one, 2e-5)


STEPS = 50


@pytest.mark.nightly
@pytest.mark.mesh(dp=2, deadline_s=100)
def test_gradients_added_up_in_bfloat16_are_half_the_bytes_and_learn_alike(model_folder, mesh, weighted_loss):
    sent, found = [], []
    for reduce_dtype in ("float32", "bfloat16"):
        settings = {"dtype": "bfloat16", "options": {"reduce_dtype": reduce_dtype, "head_dtype": "float32"}}
        engine = create(model_folder, mesh, "on", **settings)
        with Sums() as sums:
            engine.forward_backward(UPDATES[0], weighted_loss)
        sent.append(sums.num_bytes)
        engine.step()
        found.append([train(engine, [UPDATES[n % 2 * 2]], weighted_loss)[0] for n in range(STEPS)])
    vocabulary = 4 * 320 * 32  # embedding and head are one, in float32
    norm = 4 * 32
    assert sent[1] - vocabulary - norm == (sent[0] - vocabulary - norm) // 2
    exact, rounded = (np.array(each) for each in found)
    assert exact[-1, 0] < exact[0, 0] - 0.05, "it learns"
    apart = np.abs(rounded - exact).max(0)
    print(f"losses {apart[0]:.2g} and norms {apart[1]:.2g} apart over {STEPS} steps")
    assert 0 < apart[0] < 0.02
    with pytest.raises(ConfigError, match='reduce_dtype = "bfloat16" needs dtype'):
        TorchTrainEngine.plan(TrainEngineConfig(model_path=str(model_folder), options={"reduce_dtype": "bfloat16"}), 2)
