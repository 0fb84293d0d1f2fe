"""Tensors are put away and come back: memory falls, values and identities stay."""

import errno
import os
from dataclasses import replace

import pytest
import torch

from offbeat_core import ConfigError, OffbeatError
from offbeat_device import MemoryOffloader, _offload, open_device
from offbeat_device._cpu import CpuDevice

MIB = 2**20


def resident_bytes() -> int:
    return open_device("cpu").memory().allocated_bytes


def offloader() -> MemoryOffloader:
    return MemoryOffloader(open_device("cpu"))


def test_memory_is_given_back_and_values_return_to_the_same_tensors():
    block = torch.arange(16 * MIB, dtype=torch.float32)  # 64 MiB
    view, total = block[5:8], block.sum()
    away, before = offloader(), resident_bytes()
    away.offload("weights", (), [block])
    assert away.offloaded_bytes == 64 * MIB
    assert before - resident_bytes() > 60 * MIB
    away.restore()
    assert away.offloaded_bytes == 0
    assert torch.equal(view, torch.tensor([5.0, 6.0, 7.0]))
    assert block.sum() == total
    view[0] = -1.0
    assert block[5] == -1.0


def test_what_shares_memory_is_put_away_once_and_what_is_away_already_not_again():
    one, other = torch.ones(1000), torch.zeros(10)
    away = offloader()
    away.offload("weights", [one[3:]], [one, one.view(10, 100), other])
    assert away.offloaded_bytes == 4040
    away.offload("optimizer", [one], [other, torch.ones(5)])
    assert away.offloaded_bytes == 4060
    away.restore()
    assert one.sum() == 1000
    assert not other.any()


def test_weights_that_are_mapped_from_a_file_move_to_memory_of_their_own(tmp_path):
    path = str(tmp_path / "weights")
    mapped = torch.from_file(path, shared=True, size=8, dtype=torch.float32)
    mapped.copy_(torch.arange(8.0))
    parameter, alias = torch.nn.Parameter(mapped), mapped[2:4]
    away = offloader()
    away.offload("weights", [parameter, alias])
    away.restore()
    assert torch.equal(parameter.detach(), torch.arange(8.0))
    with torch.no_grad():
        parameter[2] = 9.0
    assert alias[0] == 9.0, "both moved together"
    assert torch.equal(torch.from_file(path, shared=True, size=8, dtype=torch.float32), torch.arange(8.0))


def test_memory_that_others_may_share_is_not_moved_behind_their_backs():
    own, block, other = torch.ones(2), torch.ones(8), torch.ones(4)
    block.numpy()
    away = offloader()
    with pytest.raises(OffbeatError, match=r"shape \(8,\) cannot be emptied.*clone it first"):
        away.offload("weights", [own], [other, block])
    assert (own.sum(), other.sum(), away.offloaded_bytes) == (2, 4, 0)


def test_nothing_changes_when_there_is_no_room(monkeypatch):
    away, own, block = offloader(), torch.full((5,), 2.0), torch.ones(1000)
    away.offload("optimizer", [torch.zeros(3)])
    write_all = _offload._write_all

    def write_little(file, chunk):
        if len(chunk) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, chunk)

    monkeypatch.setattr(_offload, "_write_all", write_little)
    with pytest.raises(OffbeatError, match=r"4000 bytes of tensors cannot be put away in .*: No space left.*TMPDIR"):
        away.offload("weights", [own], [block])
    assert (own.sum(), block.sum(), away.offloaded_bytes) == (10, 1000, 12)


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OffbeatError, match=r"cannot be put away in .*nowhere"):
        offloader().offload("weights", [torch.ones(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gets_its_memory_back():
    device = open_device("cuda:0")
    block = torch.arange(16 * MIB, dtype=torch.float32, device=device.torch_device)
    before, total = device.memory().allocated_bytes, block.sum()
    away = MemoryOffloader(device)
    away.offload("weights", [block])
    assert before - device.memory().allocated_bytes >= 64 * MIB
    away.restore()
    assert block.sum() == total


def test_parts_of_an_engine_are_away_by_level_and_refused_until_they_are_back():
    away, weights, moments, gradients = offloader(), *(torch.ones(10) for _ in range(3))
    assert (set(away.tags_of(1)), set(away.tags_of(2))) == ({away.OPTIMIZER}, {away.OPTIMIZER, away.WEIGHTS})
    with pytest.raises(ConfigError, match="level must be one of"):
        away.tags_of(3)
    shared = [gradients, gradients[2:]]
    for _ in range(2):  # the second time does nothing
        away.offload(away.OPTIMIZER, [moments], drop=shared)
    away.offload(away.WEIGHTS, [weights])
    assert not any(each.untyped_storage().nbytes() for each in (weights, moments, gradients))
    assert not away.restore([away.WEIGHTS])
    away.require("weights", away.WEIGHTS)
    with pytest.raises(OffbeatError, match=r"step: .* sleeps without its optimizer; call wake\(\)"):
        away.require("step", away.WEIGHTS, away.OPTIMIZER)
    with pytest.raises(ConfigError, match="knows the tags weights and optimizer, got all"):
        away.restore(["all"])
    assert away.restore(), "gradients are there again"
    assert weights.sum() == moments.sum() == 10
    assert gradients.untyped_storage().nbytes() == 40
    assert not away.restore([])


def test_what_is_longer_than_a_chunk_comes_back_whole(monkeypatch):
    monkeypatch.setattr(_offload, "_CHUNK_BYTES", 24)
    blocks = [torch.arange(25.0), torch.arange(6.0), torch.arange(7.0)]
    away = offloader()
    away.offload("weights", blocks)
    away.restore()
    assert [block.tolist() for block in blocks] == [list(range(25)), list(range(6)), list(range(7))]


def test_a_file_that_takes_a_part_at_a_time_is_given_all():
    """Write as to a disk that is nearly full, where the next write raises the error."""
    held = bytearray()

    class Disk:
        def write(self, chunk):
            held.extend(chunk[:7])
            return min(len(chunk), 7)

    _offload._write_all(Disk(), memoryview(b"twenty-two bytes of it"))
    assert bytes(held) == b"twenty-two bytes of it"


class Accelerator(CpuDevice):
    """A device with memory of its own, as far as the offloader sees; its tensors are those of the CPU."""

    def __init__(self, free_bytes=2**40):
        self.torch_device, self.pinned, self.waits = torch.device("cuda", 0), [], 0
        self.free_bytes = free_bytes

    def memory(self):
        return replace(super().memory(), free_bytes=self.free_bytes)

    def synchronize(self):
        self.waits += 1

    def pinned_memory(self, num_bytes):
        self.pinned.append(num_bytes)
        return super().pinned_memory(num_bytes)


def test_values_of_an_accelerator_wait_in_memory_that_is_pinned_once():
    device, weights, moments = Accelerator(), torch.arange(10.0), [torch.ones(3), torch.full((4,), 2.0)]
    away = MemoryOffloader(device)
    for turn in range(3):
        away.offload(away.OPTIMIZER, moments)
        away.offload(away.WEIGHTS, (), [weights])
        assert not any(each.untyped_storage().nbytes() for each in (weights, *moments))
        before = device.waits
        away.restore()
        assert device.waits > before, "copies are only queued"
        assert (weights.sum(), moments[0].sum(), moments[1].sum()) == (45 + 10 * turn, 3, 8)
        weights += 1
    assert device.pinned == [28, 40]
    away.offload(away.OPTIMIZER, [*moments, torch.ones(1000)])
    assert device.pinned == [28, 40, 4028], "what has grown needs more"


def test_what_the_device_has_no_room_for_stays_away_with_both_sizes_named():
    device, weights, gradient = Accelerator(3 * MIB), torch.arange(MIB), torch.ones(MIB)  # 8 and 4 MiB
    away = MemoryOffloader(device)
    away.offload(away.WEIGHTS, [weights], drop=[gradient])
    with pytest.raises(OffbeatError, match=r"its weights take 0\.01 GiB of the device, and 0\.00 GiB are free"):
        away.restore()
    assert away.offloaded_bytes == 8 * MIB
    device.free_bytes = 12 * MIB
    away.restore()
    assert weights[-1] == MIB - 1
