"""A checkpoint is whole or not there; the last and the best ones stay."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from offbeat_core import ConfigError, RunFolderError, tensor_file_header
from offbeat_run import Checkpoints, reading
from offbeat_testing import drop_digests


def checkpoints(tmp_path, *steps, **scores):
    held = Checkpoints(tmp_path)
    for step in steps:
        with held.write(step, score=scores.get(f"s{step}")) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "weights").write_text(f"weights {step}")
    return held


def test_the_latest_and_the_best_are_found(tmp_path):
    held = checkpoints(tmp_path, 10, 2, 30, s10=0.5, s2=0.9)
    held.set_score(30, 0.9)
    assert [each.step for each in held.all()] == [2, 10, 30]
    latest, best = held.latest(), held.best()
    assert latest is not None
    assert best is not None
    assert (latest.step, latest.score, best.step) == (30, 0.9, 2)
    assert (latest.path / "model" / "weights").read_text() == "weights 30"


def test_without_any_there_is_no_latest_and_no_best(tmp_path):
    assert Checkpoints(tmp_path).latest() is None
    assert Checkpoints(tmp_path / "none").best() is None


NAMES = ("model.safetensors", "trainer/optimizer.pt", "loop/state.json", "loop/buffer.safetensors")


def write_all(held, *steps):
    for step in steps:
        with held.write(step) as folder:
            for each in NAMES:
                (folder / each).parent.mkdir(exist_ok=True)
                (folder / each).write_text("whole")


def resumed(held):
    """Return the folder that a resume reads, and its notices."""
    notices = []
    found = held.read_latest(lambda folder: folder, notices.append)
    return found and found[1], notices


@pytest.mark.parametrize("name", [*NAMES, "checkpoint.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "one bit", "a page of zeros"])
def test_a_resume_says_which_checkpoint_it_takes_and_why_not_a_newer_one(tmp_path, name, damage):
    held = Checkpoints(tmp_path)
    assert resumed(held) == (None, ["no whole checkpoint: begins anew"])
    write_all(held, 2, 4)
    assert resumed(held)[1] == [f"resumes from update 4 ({tmp_path / 'step-000004'})"]
    file = tmp_path / "step-000004" / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        bit = bytes([whole[0] ^ 4]) + whole[1:]
        file.write_bytes({"cut": whole[:-2], "one bit": bit, "a page of zeros": bytes(len(whole))}[damage])
    if damage in ("missing", "cut"):
        assert [each.step for each in held.all()] == [2], "listing compares sizes"
    folder, (first, second) = resumed(held)
    assert folder == tmp_path / "step-000002"
    assert first.startswith(f"checkpoint step-000004 is damaged ({name} ")
    assert second == f"resumes from update 2 ({tmp_path / 'step-000002'})"


def test_the_latest_is_the_one_of_the_highest_step_whatever_its_digits(tmp_path):
    held = Checkpoints(tmp_path)
    write_all(held, 999_999, 1_000_000)
    assert resumed(held)[0] == tmp_path / "step-1000000"


def test_a_changed_byte_is_reported_with_what_was_written_and_what_was_found(tmp_path):
    held = Checkpoints(tmp_path)
    write_all(held, 1, 2)
    (tmp_path / "step-000002" / "loop" / "state.json").write_text("whale")
    assert [each.step for each in held.all()] == [1, 2], "to list them does not read their bytes"
    notices = resumed(held)[1]
    assert notices[0] == (
        f"checkpoint step-000002 is damaged (loop/state.json has the digest {xxh3_64_hexdigest(b'whale')} and was "
        f"written with {xxh3_64_hexdigest(b'whole')}) and passed over; it is kept as damaged-step-000002"
    )


def test_without_a_whole_checkpoint_nothing_is_begun_anew_over_it(tmp_path):
    held = Checkpoints(tmp_path)
    write_all(held, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-00000{step}" / "model.safetensors").write_text("whale")
    with pytest.raises(RunFolderError, match=r"every checkpoint in .* is damaged: step-000002 \(model.safetensors has"):
        resumed(held)
    assert len(list(tmp_path.glob("step-*"))) == 2, "all are left as they were"


def test_what_cannot_be_read_is_damaged_whatever_is_raised_but_settings_that_do_not_fit(tmp_path):
    held, notices = Checkpoints(tmp_path), []
    write_all(held, 1, 2)

    def read(folder):
        if folder.name == "step-000002":
            with reading("loop/state.json"):
                return {}["policy"]
        return "read"

    found = held.read_latest(read, notices.append)
    assert found is not None
    assert (found[0].step, found[1]) == (1, "read")
    assert notices[0].startswith(
        "checkpoint step-000002 is damaged (loop/state.json cannot be read: KeyError: 'policy') and passed over"
    )

    def refuse(_):
        with reading("loop/state.json"):
            raise ConfigError("other prompts")

    with pytest.raises(ConfigError, match="other prompts"):
        held.read_latest(refuse, notices.append)
    assert (tmp_path / "step-000001").is_dir()


def test_a_damaged_checkpoint_counts_for_nothing_and_goes_when_the_run_has_passed_its_step(tmp_path):
    held = Checkpoints(tmp_path)
    write_all(held, 1, 3)
    (tmp_path / "step-000003" / "model.safetensors").write_text("whale")
    resumed(held)
    write_all(held, 2)
    held.prune(keep=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["damaged-step-000003", "step-000002"]
    write_all(held, 3)
    held.prune(keep=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000003"]


def test_the_best_checkpoint_is_passed_over_when_its_model_is_damaged_and_one_that_is_named_is_not(tmp_path):
    held, notices = Checkpoints(tmp_path), []
    write_all(held, 1, 2, 3)
    for step, score in ((1, 0.5), (2, 0.9)):
        held.set_score(step, score)
    (tmp_path / "step-000002" / "loop" / "state.json").write_text("whale")
    assert held.chosen(notices.append).step == held.find(2).step == 2, "it is not the model that has changed"
    (tmp_path / "step-000002" / "model.safetensors").write_text("whale")
    assert held.chosen(notices.append).step == 1
    [line] = notices
    assert line.startswith("checkpoint step-000002 is damaged (model.safetensors has the digest ")
    with pytest.raises(RunFolderError, match=r"step-000002 is damaged: model.safetensors has the digest "):
        held.find(2)


def test_a_checkpoint_of_an_older_version_is_read_and_reported_as_unchecked(tmp_path):
    held = Checkpoints(tmp_path)
    with held.write(1) as folder:
        (folder / "model.safetensors").write_bytes(tensor_file_header([]))
        (folder / "loop.json").write_text("{}")
    drop_digests(tmp_path / "step-000001")
    folder, (notice, resumes) = resumed(held)
    assert folder == tmp_path / "step-000001"
    assert notice == "checkpoint step-000001 is of an older version and has no digests: changed bytes would not be seen"
    assert resumes.startswith("resumes from update 1 ")
    (tmp_path / "step-000001" / "loop.json").write_bytes(bytes(2))
    with pytest.raises(RunFolderError, match=r"step-000001 \(loop.json cannot be read: "):
        resumed(held)


def test_scores_that_are_damaged_are_none(tmp_path):
    held = checkpoints(tmp_path, 1, 2, s1=0.5)
    for damage in (b"", b"5", b"[]", b'{"a": 1}', b'{"1": null}', b"\xff", b"[" * 10**6):
        (tmp_path / "scores.json").write_bytes(damage)
        assert held.chosen().step == 2
        held.forget_scores(1)


@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_no_changed_byte_of_a_manifest_is_overlooked(tmp_path_factory, place, change):
    root = tmp_path_factory.mktemp("run")
    held = checkpoints(root, 1)
    file = root / "step-000001" / "checkpoint.json"
    raw = bytearray(file.read_bytes())
    raw[int(place * len(raw))] ^= change
    file.write_bytes(raw)
    assert held.all() == []


def test_a_process_killed_while_writing_leaves_the_checkpoint_before(tmp_path):
    checkpoints(tmp_path, 1)
    code = (
        "import sys, time; from pathlib import Path; from offbeat_run import Checkpoints\n"
        "with Checkpoints(Path(sys.argv[1])).write(2) as folder:\n"
        "    (folder / 'weights').write_text('half'); print('writing', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(timeout=30)
    writer.stdout.close()
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    assert latest.step == 1


def test_what_a_kill_has_left_of_a_removal_is_removed_the_next_time(tmp_path):
    held = checkpoints(tmp_path, 1, 2)
    (tmp_path / "step-000001" / "checkpoint.json").unlink()  # the first that is removed
    held.prune(keep=5)
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000002"]


# The disk decides how long an example takes, so none has a deadline.
@settings(max_examples=30)
@given(
    steps=st.sets(st.integers(0, 99), max_size=6),
    keep=st.integers(0, 4),
    data=st.data(),
)
def test_pruning_keeps_the_last_and_the_best_and_never_removes_the_only_one(tmp_path_factory, steps, keep, data):
    scores = {f"s{step}": data.draw(st.floats(0, 1)) for step in steps}
    held = checkpoints(tmp_path_factory.mktemp("run"), *steps, **scores)
    best, latest = held.best(), held.latest()
    removed = held.prune(keep)
    left = [each.step for each in held.all()]
    assert {*left, *(each.step for each in removed)} == steps
    assert left[-max(keep, 1) :] == sorted(steps)[-max(keep, 1) :]
    assert len(left) <= max(keep, 1) + 1
    if latest is not None and best is not None:
        assert latest.step in left
        assert best.step in left
