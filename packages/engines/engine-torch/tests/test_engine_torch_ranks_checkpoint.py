"""Checkpoints of several ranks: what one number of ranks writes, another reads and resumes from."""

import json
import multiprocessing
import shutil
import time

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from offbeat_core import ModelError, OffbeatError, PeerFailedError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_mesh import Mesh
from offbeat_testing import DAMAGES

RANKS = {"dp4": {"dp": 4}, "dp2-tp2": {"dp": 2, "tp": 2}, "one": {}}


def config(folder, **changes):
    settings = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 2, "total_steps": 20, "adam_eps": 1e-5}
    return TrainEngineConfig(model_path=str(folder), device="cpu", max_tokens_per_microbatch=48, **settings | changes)


def train(engine, make_groups, loss, seeds):
    losses = []
    for seed in seeds:
        losses.append(engine.forward_backward(make_groups(seed=seed), loss)["loss"].value)
        engine.step()
    return losses


@pytest.fixture(scope="module", params=[0, 4], ids=["full", "lora"])
def saved(request, model_folder, make_groups, weighted_loss, tmp_path_factory):
    """Checkpoints after three updates under `RANKS`; losses and weights of three more, undisturbed."""
    root = tmp_path_factory.mktemp("saved")
    settings = config(model_folder, lora_rank=request.param)

    def save(name, engine):
        train(engine, make_groups, weighted_loss, range(3))
        engine.save(root / name)

    def member(name, rank, axes):
        size = axes.get("dp", 1) * axes.get("tp", 1)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(root / f"{name}.store"), size), rank=rank, world_size=size
        )
        save(name, TorchTrainEngine.create(settings, Mesh(**axes)))
        dist.destroy_process_group()

    for name, axes in RANKS.items():
        if axes:
            fork(4, member, name, axes)
    engine = TorchTrainEngine.create(settings)
    save("one", engine)
    losses = train(engine, make_groups, weighted_loss, range(3, 6))
    return root, settings, losses, {name: tensor.clone() for name, tensor in engine.weights()}


def fork(size, body, name, axes):
    """Run `body(name, rank, axes)` in forked processes, for at most a minute."""
    context = multiprocessing.get_context("fork")
    members = [context.Process(target=body, args=(name, rank, axes), daemon=True) for rank in range(size)]
    for process in members:
        process.start()
    end = time.monotonic() + 60
    for process in members:
        process.join(max(0.0, end - time.monotonic()))
    for process in members:
        process.kill()
    assert [process.exitcode for process in members] == [0] * size


def assert_continues(engine, saved, folder, make_groups, loss):
    _, _, losses, weights = saved
    engine.load(folder)
    assert engine.steps_taken == 3
    assert train(engine, make_groups, loss, range(3, 6)) == pytest.approx(losses, rel=1e-5, abs=1e-5)
    for name, tensor in engine.weights():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("written_by", RANKS)
def test_one_process_goes_on(saved, make_groups, weighted_loss, written_by):
    root, settings, *_ = saved
    assert_continues(TorchTrainEngine.create(settings), saved, root / written_by, make_groups, weighted_loss)


READERS = [({"dp": 2}, "dp4"), ({"dp": 2}, "one"), ({"dp": 2, "tp": 2}, "dp4")]
OTHER_READERS = [({"dp": 2}, "dp2-tp2"), ({"dp": 4}, "dp2-tp2"), ({"dp": 2, "tp": 2}, "dp2-tp2")]
READERS += [pytest.param(*each, marks=pytest.mark.nightly) for each in OTHER_READERS]


@pytest.mark.parametrize(("mesh", "written_by"), READERS, ids=str, indirect=["mesh"])
def test_ranks_go_on(saved, mesh, make_groups, weighted_loss, written_by):
    root, settings, *_ = saved
    assert_continues(TorchTrainEngine.create(settings, mesh), saved, root / written_by, make_groups, weighted_loss)


def test_each_rank_writes_its_own_part_once(saved):
    root, settings, *_ = saved
    for name in ("dp4", "dp2-tp2"):
        files = sorted((root / name / "trainer").glob("*.safetensors"))
        assert len(files) == 4
        sizes = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    sizes[key] = sizes.get(key, 0) + opened.get_tensor(key).numel()
        whole = TorchTrainEngine.create(settings)
        for key, parameter in whole._optimizer.parameters.items():
            assert sizes[f"exp_avg.{key}"] == sizes[f"exp_avg_sq.{key}"] == parameter.numel(), key
        assert not list((root / name).rglob("*.bin")) + list((root / name).rglob("*.pt"))


@pytest.mark.parametrize("written_by", ["dp4", "dp2-tp2"])
def test_transformers_loads_what_ranks_wrote(saved, written_by):
    root, *_ = saved
    loaded = dict(AutoModelForCausalLM.from_pretrained(root / written_by).named_parameters())
    wanted = dict(AutoModelForCausalLM.from_pretrained(root / "one").named_parameters())
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-5, atol=1e-5)
    configs = [json.loads((root / name / "config.json").read_text()) for name in ("one", written_by)]
    assert configs[0] == configs[1]


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize("broken", ["trainer/optimizer-00003-of-00004.safetensors", "model.safetensors"])
@pytest.mark.parametrize("how", ["missing", "cut short", "a byte in the middle"])
def test_a_broken_checkpoint_is_refused_on_all_ranks(saved, mesh, tmp_path, broken, how):
    root, settings, *_ = saved
    if settings.lora_rank and broken == "model.safetensors":
        broken = "adapter/adapter_model.safetensors"
    if mesh.group("dp").rank == 0:
        shutil.copytree(root / "dp4", tmp_path / "broken")
        file = tmp_path / "broken" / broken
        content = file.read_bytes()
        file.unlink() if how == "missing" else file.write_bytes(DAMAGES[how](content))
    mesh.group("dp").barrier()
    engine = TorchTrainEngine.create(settings, mesh)
    # Both ranks find it so: each raises what it has found, or what the other has, whichever it meets sooner.
    with pytest.raises((ModelError, PeerFailedError), match="broken"):
        engine.load(tmp_path / "broken")


@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_cannot_write_is_an_error_on_all(model_folder, mesh, tmp_path, monkeypatch, faulty):
    from offbeat_engine_torch._state import checkpoint

    engine = TorchTrainEngine.create(config(model_folder), mesh)
    if mesh.group("dp").rank == faulty:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "write_moments", full)
    with pytest.raises((OSError, OffbeatError), match="No space left"):
        engine.save(tmp_path / "saved")
