"""Tensors are put away and come back: memory falls, values and identities stay."""

import errno
import os

import pytest
import torch

from offbeat_mesh import Asleep, Parking, open_device
from offbeat_types import ConfigError, OffbeatError

MIB = 2**20


def resident_bytes() -> int:
    return open_device("cpu").memory().allocated_bytes


def test_memory_is_given_back_and_values_return_to_the_same_tensors():
    block = torch.arange(16 * MIB, dtype=torch.float32)  # 64 MiB
    view, total = block[5:8], block.sum()
    parking, before = Parking(open_device("cpu")), resident_bytes()
    assert parking.park([block]) == parking.parked_bytes == 64 * MIB
    assert before - resident_bytes() > 60 * MIB
    parking.bring_back()
    assert parking.parked_bytes == 0
    assert torch.equal(view, torch.tensor([5.0, 6.0, 7.0]))
    assert block.sum() == total
    view[0] = -1.0
    assert block[5] == -1.0


def test_what_shares_memory_is_put_away_once_and_what_is_away_already_not_again():
    one, other = torch.ones(1000), torch.zeros(10)
    parking = Parking(open_device("cpu"))
    assert parking.park([one, one.view(10, 100), one[3:], other]) == 4040
    assert parking.park([one, other]) == 0
    assert parking.park([torch.ones(5)]) == 20
    parking.bring_back()
    assert one.sum() == 1000
    assert not other.any()


def test_weights_that_are_mapped_from_a_file_move_to_memory_of_their_own(tmp_path):
    path = str(tmp_path / "weights")
    mapped = torch.from_file(path, shared=True, size=8, dtype=torch.float32)
    mapped.copy_(torch.arange(8.0))
    parameter, alias = torch.nn.Parameter(mapped), mapped[2:4]
    parking = Parking(open_device("cpu"))
    parking.park([parameter, alias], movable=True)
    parking.bring_back()
    assert torch.equal(parameter.detach(), torch.arange(8.0))
    with torch.no_grad():
        parameter[2] = 9.0
    assert alias[0] == 9.0, "both moved together"
    assert torch.equal(torch.from_file(path, shared=True, size=8, dtype=torch.float32), torch.arange(8.0))


def test_memory_that_others_may_share_is_not_moved_behind_their_backs():
    block, other = torch.ones(8), torch.ones(4)
    block.numpy()
    with pytest.raises(OffbeatError, match=r"shape \(8,\) cannot be emptied.*clone it first"):
        Parking(open_device("cpu")).park([other, block])
    assert other.sum() == 4


def test_nothing_changes_when_there_is_no_room(monkeypatch):
    parking, block = Parking(open_device("cpu")), torch.ones(1000)
    parking.park([torch.zeros(3)])

    def write_all(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("offbeat_mesh._offload._write_all", write_all)
    with pytest.raises(OffbeatError, match=r"4000 bytes of tensors cannot be put away in .*: No space left.*TMPDIR"):
        parking.park([block])
    assert block.sum() == 1000
    assert parking.parked_bytes == 12


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path):
    with pytest.raises(OffbeatError, match=r"cannot be put away in .*nowhere"):
        Parking(open_device("cpu"), str(tmp_path / "nowhere")).park([torch.ones(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gets_its_memory_back():
    device = open_device("cuda:0")
    block = torch.arange(16 * MIB, dtype=torch.float32, device=device.torch_device)
    before, total = device.memory().allocated_bytes, block.sum()
    parking = Parking(device)
    parking.park([block])
    assert before - device.memory().allocated_bytes >= 64 * MIB
    parking.bring_back()
    assert block.sum() == total


def test_parts_of_an_engine_are_away_by_level_and_refused_until_they_are_back():
    asleep, weights, moments, gradients = Asleep(open_device("cpu")), *(torch.ones(10) for _ in range(3))
    assert Asleep.tags_of(1) == (Asleep.OPTIMIZER,)
    with pytest.raises(ConfigError, match="level must be one of"):
        Asleep.tags_of(3)
    shared = [gradients, gradients[2:]]
    for _ in range(2):  # the second time does nothing
        asleep.put_away(Asleep.OPTIMIZER, [moments], drop=shared)
    asleep.put_away(Asleep.WEIGHTS, [weights])
    assert not any(each.untyped_storage().nbytes() for each in (weights, moments, gradients))
    assert not asleep.bring_back([Asleep.WEIGHTS])
    asleep.refuse("weights", Asleep.WEIGHTS)
    with pytest.raises(OffbeatError, match=r"step: .* sleeps without its optimizer; call wake\(\)"):
        asleep.refuse("step", Asleep.WEIGHTS, Asleep.OPTIMIZER)
    with pytest.raises(ConfigError, match="knows the tags weights and optimizer, got all"):
        asleep.bring_back(["all"])
    assert asleep.bring_back([]), "gradients are there again"
    assert weights.sum() == moments.sum() == 10
    assert gradients.untyped_storage().nbytes() == 40
    assert not asleep.bring_back([])
