"""How a checkpoint reaches the disk: whole or not at all, beside the training, and with no more memory than buckets."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, engine_config
from megatron_yardstick import train_steps
from torch._C._distributed_c10d import FileStore

from offbeat_core import DeadlineError, RunFolderError
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_mesh import Mesh, join_world
from offbeat_testing import reference_model, tiny_model
from offbeat_training import BackgroundWrite, FileWriter, TensorFolder

DEADLINE_S = 120


def make_files_small(monkeypatch):
    """So that every rank has some to write."""
    monkeypatch.setattr("offbeat_training._tensor_files.MIN_FILE_BYTES", 2**14)
    monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", 2**14)


def slowly(monkeypatch, ready):
    """Let this process's files wait for an event before their first tensor."""
    add = FileWriter.add

    def wait_and_add(writer, name, tensor):
        ready.wait(60)
        add(writer, name, tensor)

    monkeypatch.setattr(FileWriter, "add", wait_and_add)


@pytest.mark.parametrize(
    "mesh",
    [{"dp": 2}, *(pytest.param(each, marks=pytest.mark.nightly) for each in ({"tp": 2, "dp": 2}, {"pp": 2, "cp": 2}))],
    ids=str,
    indirect=True,
)
@pytest.mark.mesh(deadline_s=DEADLINE_S)
def test_training_goes_on_while_a_checkpoint_is_written(create, shared, mesh, monkeypatch):
    make_files_small(monkeypatch)
    place, ready = shared / f"background-{mesh.size}-{mesh.axes['tp']}", threading.Event()
    engine = create(mesh=mesh)
    train_steps(engine, 0, 2)
    with monkeypatch.context() as patched:
        slowly(patched, ready)
        engine.save_in_background(place)
        reported = train_steps(engine, 2, 4)  # the weights change under it
        mesh.group("dp", "cp", "tp", "pp").barrier()
        assert not place.exists()
        ready.set()
        engine.finish_save()
    files = {each.name for each in place.glob("**/*.safetensors")}
    assert len(files) > mesh.size  # every rank has written
    engine.load(place)
    np.testing.assert_allclose(train_steps(engine, 2, 4), reported, rtol=1e-5, atol=1e-5)
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write-")]


@pytest.mark.mesh(dp=2, deadline_s=DEADLINE_S)
def test_a_disk_that_is_full_on_one_rank_is_one_error_on_all_and_the_engine_goes_on(create, shared, mesh, monkeypatch):
    make_files_small(monkeypatch)
    engine, place = create(mesh=mesh), shared / "full"
    train_steps(engine, 0, 1)
    engine.save(place)
    reported = train_steps(engine, 1, 2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # a file that grows no further: a real OSError
    with pytest.raises(RunFolderError, match="rank 1" if mesh.rank == 0 else "large"):
        engine.save(place)
    engine.save_in_background(place)
    train_steps(engine, 2, 3)
    with pytest.raises(RunFolderError, match="rank 1 could not write"):
        engine.finish_save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    mesh.group("dp", "cp", "tp", "pp").barrier()  # the first rank clears before it raises, others may raise earlier
    assert not list(shared.glob(".tmp-*-full"))
    engine.load(place)  # the one before
    np.testing.assert_allclose(train_steps(engine, 1, 2), reported, rtol=1e-5, atol=1e-5)
    engine.save_in_background(place)  # and the next one is whole
    engine.close()
    assert json.loads((place / "trainer/engine.json").read_text())["steps_taken"] == 2


def _be_killed(model, place, rank, shared, while_):
    """A rank that saves once, continues, and is killed while it saves again."""
    try:
        with join_world(rank=rank, size=2, store=FileStore(str(shared / "store"), 2), device="cpu", deadline_s=60):
            engine = MegatronTrainEngine.create(engine_config(model, Layout()), Mesh(dp=2))
            train_steps(engine, 0, 1)
            engine.save(place)
            reported = train_steps(engine, 1, 2)
            if rank == 0:
                (shared / "reported.json").write_text(json.dumps(reported))
            if while_ == "it writes":
                FileWriter.add = lambda *args: (_notify(shared, rank), time.sleep(60))
            else:
                rename = Path.rename

                def rename_and_wait(path, target):
                    rename(path, target)
                    _notify(shared, rank)
                    time.sleep(60)

                Path.rename = rename_and_wait
                if rank == 1:
                    _notify(shared, rank)
            engine.save_in_background(place)
            engine.finish_save()
    finally:
        os._exit(1)


def _notify(shared, rank):
    (shared / f"stuck-{rank}").touch()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("while_", ["it writes", "the new takes the place of the old"])
def test_killed_in_the_middle_of_a_save_the_old_checkpoint_is_whole(
    create, model_folder, tmp_path, while_, monkeypatch
):
    make_files_small(monkeypatch)
    place, children = tmp_path / "place", []
    for rank in range(2):
        child = os.fork()
        if not child:
            _be_killed(model_folder, place, rank, tmp_path, while_)
        children.append(child)
    end = time.monotonic() + 90
    while len(list(tmp_path.glob("stuck-*"))) < 2:
        assert time.monotonic() < end, "the ranks did not come to the save"
        time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    engine = create()
    engine.load(place)
    reported = json.loads((tmp_path / "reported.json").read_text())
    np.testing.assert_allclose(train_steps(engine, 1, 2), reported, rtol=1e-5, atol=1e-5)
    engine.save(place)  # and what the killed ones left is cleared away
    engine.close()
    assert not [each for each in tmp_path.iterdir() if each.name.startswith((".tmp-", ".old-"))]


def test_a_disk_that_does_not_answer_is_named_after_the_deadline(create, tmp_path, monkeypatch):
    ready = threading.Event()
    engine = create(Layout(options={"save_deadline_s": 1}))
    slowly(monkeypatch, ready)
    engine.save_in_background(tmp_path / "place")
    with pytest.raises(DeadlineError, match=r"the checkpoint .*place: waited 1 s for the disk"):
        engine.save(tmp_path / "next")
    ready.set()
    engine._checkpoints._background._thread.join(60)  # here, and not under the deadline of a second
    engine.close()  # all is well
    assert (tmp_path / "place/trainer/engine.json").is_file()
    assert not (tmp_path / "next").exists()


@pytest.mark.mesh(dp=2, compare=False, deadline_s=DEADLINE_S)
def test_a_checkpoint_that_is_there_is_not_called_missing(mesh, tmp_path_factory):
    """One rank gives up while the first moves the folder to its place, which then is there."""
    gave_up = tmp_path_factory.getbasetemp() / "gave-up"
    background = BackgroundWrite(mesh, 1.0 if mesh.rank else 60.0)

    def publish():
        limit = time.monotonic() + 60
        while not gave_up.exists() and time.monotonic() < limit:
            time.sleep(0.01)

    background.begin(Path("place"), lambda: None, publish, lambda: None)
    thread = background._thread
    error, words = (DeadlineError, "") if mesh.rank else (RunFolderError, "place: published, but not confirmed")
    with pytest.raises(error, match=words):
        background.finish()
    thread.join(60)  # rank 1 may have stopped waiting for it a moment before it gives up
    gave_up.touch()


SCRIPT = """
import sys
from pathlib import Path
from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_core import TrainEngineConfig
engine = MegatronTrainEngine.create(TrainEngineConfig(model_path=sys.argv[1], device="cpu"))
engine.save_in_background(Path(sys.argv[2]))
"""


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_the_end_of_a_process_waits_for_its_write(model_folder, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(model_folder), str(tmp_path / "place")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "place/trainer/engine.json").read_text())["steps_taken"] == 0
    assert [each.name for each in tmp_path.iterdir()] == ["place"]


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A model whose weights and moments together are 100 MB."""
    return tiny_model(tmp_path_factory.mktemp("large") / "model", hidden_size=256, num_layers=16, num_kv_heads=4)


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
@pytest.mark.mesh(deadline_s=DEADLINE_S)
def test_a_save_holds_buckets_not_the_model(create, mesh, large, monkeypatch):
    """Resident memory, as the system counts it."""
    monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", 2**20)
    engine = create(mesh=mesh, folder=large)
    train_steps(engine, 0, 1)
    total = 3 * sum(4 * slot.num_elements for slot in engine._policy.weights.slots)
    mesh.device.reset_peak_memory()
    before = mesh.device.memory().allocated_bytes
    engine.save(large.parent / f"saved-{mesh.size}")
    more = mesh.device.memory().peak_bytes - before
    assert more < total / 3, (more, total)  # a copy of the weights alone would be a third


@pytest.mark.parametrize("how", ["save_weights", "save"])
def test_weights_that_a_folder_held_do_not_come_back(create, tmp_path, monkeypatch, how):
    """In many files, then in few, then in one: each under names that the others do not have."""
    make_files_small(monkeypatch)
    engine, place = create(), tmp_path / "out"
    for number, max_bytes in enumerate((2**15, 2**16, 2**30)):
        monkeypatch.setattr("offbeat_training._tensor_files.MAX_FILE_BYTES", max_bytes)
        train_steps(engine, number, number + 1)
        place.mkdir(exist_ok=True)
        (place / "theirs.txt").touch()
        getattr(engine, how)(place)
        assert (place / "theirs.txt").exists()
        assert (len(list(place.glob("model-*"))) > 1) == (number < 2)
        held = dict(reference_model(place).named_parameters())
        with TensorFolder(place) as found:
            for name, tensor in engine.weights():
                assert torch.equal(found.read(name, ()), tensor)
                assert torch.equal(held[name], tensor)
        shutil.rmtree(place / "trainer", ignore_errors=True)  # so that the next is moved into the folder
    assert not list(place.glob("model*-of-*"))
    assert not (place / "model.safetensors.index.json").exists()
