"""What only GPUs can show: the recorder of real nccl, events that do not come, and verdicts over device groups.

The nox session `hardware(liveness-cuda)` runs these. nccl refuses two ranks on one device, so what needs a second
member is skipped where there is one device only; there a kernel that spins stands for the member that does not come.
"""

import pytest
import torch
from liveness_devices import (
    a_stage_without_its_neighbour,
    groups_in_another_order,
    launch_on_devices,
    pending_behind_a_spinning_kernel,
    rank_1_does_not_come,
    the_recorder_answers_while_the_main_thread_synchronizes,
    transfers_to_itself_in_a_batch,
)

DEADLINE_S = 300.0
pytestmark = [
    pytest.mark.timeout(DEADLINE_S),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: nccl refuses two ranks on one"
)


@pytest.mark.parametrize(
    "body",
    [
        pending_behind_a_spinning_kernel,
        the_recorder_answers_while_the_main_thread_synchronizes,
        transfers_to_itself_in_a_batch,
    ],
)
def test_one_device(body, tmp_path):
    outcome = launch_on_devices(body, 1, tmp_path, policy="report", stall_after_s=60.0)
    assert outcome.exit_codes == [0], outcome.outputs


@two_devices
def test_a_member_that_does_not_come(tmp_path):
    outcome = launch_on_devices(rank_1_does_not_come, 2, tmp_path, policy="report", ends=[1])
    (verdict,) = [each for each in outcome.verdicts if each.kind == "missing-member"]
    assert (verdict.op, verdict.missing) == ("all_reduce", ("rank 1",))


@two_devices
def test_another_order_on_two_groups(tmp_path):
    outcome = launch_on_devices(groups_in_another_order, 2, tmp_path, policy="report")
    assert "different-order" in {each.kind for each in outcome.verdicts}


@two_devices
def test_a_batch_of_transfers_that_hangs(tmp_path):
    outcome = launch_on_devices(a_stage_without_its_neighbour, 2, tmp_path, policy="report", ends=[1])
    (verdict,) = [each for each in outcome.verdicts if each.kind == "missing-member"]
    assert (verdict.missing, verdict.op) == (("rank 1",), "recv")
