"""Real processes that get stuck in each way: the verdict names them, in time, and the policy is carried out."""

import contextlib
import ctypes
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from liveness_launch import ABORTED, STALL_S, Body, Outcome, launch, step

import offbeat_liveness as liveness
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import read_heads

SLOW_S = 5.0
"""Trouble that lasts so long is reported, also by a monitor that gets a core late."""
PEACE_S = 3.0
"""A stall after which ranks that are uneven by less than half of it are left in peace, also on a crowded machine."""


def rank_1_sleeps(rank: int) -> None:
    if rank == 1:
        time.sleep(100)
    step()


def complain(verdict: Verdict) -> None:
    raise ValueError(f"cannot page anybody about {verdict.kind}")


@pytest.fixture(scope="module")
def without_rank_1(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch(rank_1_sleeps, 3, tmp_path_factory.mktemp("without_rank_1"), on_verdict=complain)


def test_a_missing_member_is_named_with_its_line_and_everybody_leaves_with_4(without_rank_1: Outcome) -> None:
    outcome = without_rank_1
    verdict = outcome.only
    assert (verdict.kind, verdict.missing, verdict.arrived) == ("missing-member", ("rank 1",), ("rank 0", "rank 2"))
    assert outcome.exit_codes == [ABORTED] * 3
    assert "in rank_1_sleeps" in verdict.text
    assert "in step" in verdict.text
    assert verdict.stalled_s <= STALL_S + 2
    counts = [text.count("offbeat liveness: suspicion: missing-member") for text in outcome.outputs]
    assert counts == [1, 0, 0]
    assert "rank 2: missing-member, reported in full by rank 0" in outcome.outputs[2]
    assert {head.name for head in read_heads(outcome.directory / "dumps")} == {"rank 0", "rank 1", "rank 2"}
    assert all("cannot page anybody about missing-member" in text for text in outcome.outputs)


def rank_0_is_stopped(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    step()


def test_the_others_lead_when_rank_0_is_stopped(tmp_path: Path) -> None:
    outcome = launch(rank_0_is_stopped, 3, tmp_path)
    assert (outcome.only.kind, outcome.only.missing) == ("dead-peer", ("rank 0",))
    assert "SIGSTOP" in outcome.only.headline
    assert outcome.exit_codes[1:] == [ABORTED] * 2
    assert "offbeat liveness: suspicion: dead-peer" in outcome.outputs[1]


def rank_0_is_killed_while_others_compute(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    with contextlib.suppress(RuntimeError):  # gloo's own error, swallowed as some loops do
        step()
    with liveness.waiting("weights.get", on="rank 0"):
        time.sleep(100)


def test_the_others_lead_when_rank_0_is_killed(tmp_path: Path) -> None:
    outcome = launch(rank_0_is_killed_while_others_compute, 3, tmp_path)
    assert (outcome.only.kind, outcome.only.missing) == ("dead-peer", ("rank 0",))
    assert outcome.exit_codes == [-signal.SIGKILL, ABORTED, ABORTED]


def rank_1_is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()


def rank_1_leaves(rank: int) -> None:
    if rank != 1:
        step()


def rank_1_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("batch 7 is empty")
    step()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rank_1_is_killed, "SIGKILL"),
        (rank_1_leaves, "left without an error"),
        (rank_1_raises, "rank 1 raised ValueError: batch 7 is empty"),
    ],
)
def test_a_peer_that_is_gone_is_distinguished_from_the_errors_it_causes(body: Body, words: str, tmp_path: Path) -> None:
    """gloo fails at once on the others, so there is no stall to wait for."""
    verdict = launch(body, 3, tmp_path, stall_after_s=15.0).only
    assert (verdict.kind, verdict.missing) == ("dead-peer", ("rank 1",))
    assert words in verdict.text
    if body is rank_1_raises:
        assert "in rank_1_raises" in verdict.text


def rank_1_gathers_less(rank: int) -> None:
    length = 1000 if rank else 4000
    dist.all_gather([torch.zeros(length) for _ in range(2)], torch.ones(length))
    dist.barrier()


def test_a_process_that_gloo_aborts_leaves_its_line(tmp_path: Path) -> None:
    verdict = launch(rank_1_gathers_less, 2, tmp_path, stall_after_s=15.0).only
    assert (verdict.kind, verdict.missing) == ("dead-peer", ("rank 1",))
    assert "in rank_1_gathers_less" in verdict.text
    assert "compare sizes and dtypes" in verdict.advice


def rank_1_holds_the_gil(rank: int) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(30)
    step()


@pytest.mark.nightly
def test_a_process_that_holds_the_gil_is_silent(tmp_path: Path) -> None:
    outcome = launch(rank_1_holds_the_gil, 2, tmp_path, ends=(0,))
    verdict = outcome.verdicts[-1]  # it counts as slow before it has been silent in three looks
    assert (verdict.kind, verdict.missing) == ("dead-peer", ("rank 1",))
    assert "GIL" in verdict.text
    assert outcome.exit_codes[0] == ABORTED


def slow_but_moving(rank: int) -> None:
    if rank == 1:
        spin_until_s = time.monotonic() + SLOW_S
        while time.monotonic() < spin_until_s:
            sum(range(1000))
    step()
    time.sleep(3)  # for the word that it moves again


@pytest.mark.nightly
def test_a_slow_one_is_reported_and_never_killed_and_the_end_of_it_too(tmp_path: Path) -> None:
    outcome = launch(slow_but_moving, 2, tmp_path)
    assert outcome.only.kind == "straggler"
    assert outcome.exit_codes == [0, 0]
    assert "it moves again: rank 1 came after" in outcome.outputs[0]
    assert "it moved again after" in outcome.only.text  # as `show` prints it


def receive_posted_early(rank: int) -> None:
    if rank == 0:
        answer = dist.irecv(torch.ones(1), src=1)
        assert answer is not None
        compute_on_rank_1(1)
        step()
        answer.wait()
    else:
        step()
        dist.send(torch.ones(1), 0)


@pytest.mark.nightly
def test_a_receive_posted_early_makes_no_circle(tmp_path: Path) -> None:
    outcome = launch(receive_posted_early, 2, tmp_path)
    assert outcome.exit_codes == [0, 0]
    assert {verdict.kind for verdict in outcome.verdicts} == {"straggler"}


def roots_in_two_forms(rank: int) -> None:
    """Both name rank 3, which is slow: by its number in the world, and in the group."""
    group = dist.new_group([1, 2, 3])
    if rank == 3:
        compute_on_rank_1(1)
    if rank == 2:
        dist.broadcast(torch.ones(1), group=group, group_src=2)
    elif rank:
        dist.broadcast(torch.ones(1), src=3, group=group)
    step()


@pytest.mark.nightly
def test_one_root_named_in_two_forms_is_one_root(tmp_path: Path) -> None:
    outcome = launch(roots_in_two_forms, 4, tmp_path)
    assert outcome.exit_codes == [0] * 4


def in_a_worker(work: Callable[[int], None], rank: int) -> None:
    """As a role process does: the main thread serves calls, a worker makes all collectives."""

    def serve() -> None:
        step()
        work(rank)
        step()

    worker = threading.Thread(target=serve, name="role")
    worker.start()
    worker.join()


def worker_1_computes(rank: int) -> None:
    in_a_worker(compute_on_rank_1, rank)


def compute_on_rank_1(rank: int) -> None:
    end_s = time.monotonic() + SLOW_S * rank
    while time.monotonic() < end_s:
        sum(range(1000))


@pytest.mark.nightly
def test_a_worker_that_computes_while_its_main_thread_waits_is_not_killed(tmp_path: Path) -> None:
    outcome = launch(worker_1_computes, 2, tmp_path)
    assert outcome.exit_codes == [0, 0]
    assert {verdict.kind for verdict in outcome.verdicts} == {"straggler"}


def rank_1_waits_in_the_kernel(rank: int) -> None:
    """State D, as in a write to a slow disk: the parent of a new process is in it until that one has begun."""
    if rank == 1:
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "pipe")
            os.mkfifo(pipe)
            threading.Timer(SLOW_S, lambda: os.close(os.open(pipe, os.O_WRONLY))).start()
            libc = ctypes.CDLL(None)
            actions = ctypes.create_string_buffer(512)
            libc.posix_spawn_file_actions_init(actions)
            libc.posix_spawn_file_actions_addopen(actions, 63, pipe.encode(), os.O_RDONLY, 0)
            argv = (ctypes.c_char_p * 2)(b"true", None)
            pid = ctypes.c_int()
            assert libc.posix_spawnp(ctypes.byref(pid), b"true", actions, None, argv, None) == 0
            os.waitpid(pid.value, 0)
    step()


@pytest.mark.nightly
def test_one_that_waits_for_a_disk_is_slow_and_not_killed(tmp_path: Path) -> None:
    outcome = launch(rank_1_waits_in_the_kernel, 2, tmp_path)
    assert {verdict.kind for verdict in outcome.verdicts} == {"straggler"}
    assert outcome.exit_codes == [0, 0]


def worker_1_sleeps(rank: int) -> None:
    in_a_worker(sleep_on_rank_1, rank)


def sleep_on_rank_1(rank: int) -> None:
    time.sleep(100 * rank)


@pytest.mark.nightly
def test_a_missing_worker_is_reported_with_its_own_line(tmp_path: Path) -> None:
    outcome = launch(worker_1_sleeps, 2, tmp_path)
    assert (outcome.only.kind, outcome.only.missing) == ("missing-member", ("rank 1",))
    assert "in sleep_on_rank_1" in outcome.only.text
    assert "in step" in outcome.only.text, "the line of the worker that waits, too"
    assert outcome.exit_codes == [ABORTED] * 2


def slower_by_less_than_half(rank: int) -> None:
    for number in range(4):
        time.sleep(0.45 * PEACE_S * ((number + rank) % 2))
        step()


@pytest.mark.nightly
def test_a_healthy_run_with_uneven_ranks_is_left_in_peace(tmp_path: Path) -> None:
    outcome = launch(slower_by_less_than_half, 2, tmp_path, stall_after_s=PEACE_S)
    assert outcome.verdicts == []
    assert outcome.exit_codes == [0, 0]
    lines = [line for text in outcome.outputs for line in text.splitlines()]
    assert [line for line in lines if not line.startswith("[W")] == []  # torch may warn of a host without a name


def stuck_then_free(rank: int) -> None:
    if rank == 1:
        time.sleep(SLOW_S)
    step()
    time.sleep(3)  # for the word that it moves again


@pytest.mark.nightly
def test_report_logs_once_and_lets_the_run_continue(tmp_path: Path) -> None:
    outcome = launch(stuck_then_free, 2, tmp_path, policy="report")
    assert outcome.only.kind == "missing-member"
    assert outcome.exit_codes == [0, 0]
    assert outcome.outputs[0].count("offbeat liveness: suspicion: missing-member") == 1
    assert "it moves again: rank 1 came after" in outcome.outputs[0]


def child_process_of_a_rank(rank: int) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(1.5 * PEACE_S)  # a data loader's worker: in no world, though torch's tables came with the fork
        os._exit(0)
    for _ in range(8):
        time.sleep(0.25 * PEACE_S)
        step()
    os.waitpid(pid, 0)


@pytest.mark.nightly
def test_forked_children_do_not_pass_for_ranks(tmp_path: Path) -> None:
    outcome = launch(child_process_of_a_rank, 2, tmp_path, stall_after_s=PEACE_S)
    assert outcome.exit_codes == [0, 0]
    assert outcome.verdicts == []


@pytest.mark.nightly
def test_with_the_recorder_off_numbers_and_stacks_must_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    verdict = launch(rank_1_sleeps, 2, tmp_path).only
    assert (verdict.kind, verdict.missing, verdict.op) == ("missing-member", ("rank 1",), "all_reduce")
    assert sum("flight recorder is off" in note for note in verdict.notes) == 1


def test_the_verdict_and_the_heads_follow_their_schemas(without_rank_1: Outcome) -> None:
    folder, dumps = Path(liveness.__file__).parent, without_rank_1.directory / "dumps"
    check(json.loads((dumps / "verdict.json").read_text()), folder / "verdict.schema.json")
    heads = list(dumps.glob("head-*.json"))
    assert len(heads) == len(without_rank_1.exit_codes)
    for path in heads:
        check(json.loads(path.read_text()), folder / "head.schema.json")


def check(data: Any, schema_path: Path) -> None:
    schema = json.loads(schema_path.read_text())
    problems = list(differences(data, schema, schema["$defs"], schema_path.name))
    assert problems == []


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def differences(data: Any, schema: dict[str, Any], defs: dict[str, Any], at: str) -> list[str]:
    """Where data does not follow a schema: the few keywords of JSON Schema that ours use."""
    if "$ref" in schema:
        return differences(data, defs[schema["$ref"].rpartition("/")[2]], defs, at)
    if "anyOf" in schema:
        return [] if any(not differences(data, each, defs, at) for each in schema["anyOf"]) else [f"{at}: none fits"]
    if "enum" in schema or "const" in schema:
        return [] if data in schema.get("enum", [schema.get("const")]) else [f"{at}: {data!r}"]
    if not isinstance(data, TYPES[schema["type"]]):
        return [f"{at}: {data!r} is no {schema['type']}"]
    found = []
    if schema["type"] == "array":
        found += [p for i, each in enumerate(data) for p in differences(each, schema["items"], defs, f"{at}[{i}]")]
    if schema["type"] == "object":
        found += [f"{at}: {name} is missing" for name in schema["required"] if name not in data]
        found += [f"{at}: {name} is unknown" for name in data if name not in schema["properties"]]
        known = [(name, each) for name, each in schema["properties"].items() if name in data]
        found += [p for name, each in known for p in differences(data[name], each, defs, f"{at}.{name}")]
    return found


def test_the_schema_check_can_fail() -> None:
    path = Path(liveness.__file__).parent / "verdict.schema.json"
    schema = json.loads(path.read_text())
    assert differences({"format": 2}, schema, schema["$defs"], "v")
