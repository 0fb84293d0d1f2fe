"""The device as every other part sees it: memory, random state, autocast, profiler, recorded work, memory that is lent.

Bounds: memory is counted to the byte on an accelerator, and at least grows by what was taken on a CPU.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.piece import Figures, Place, main, require

from offbeat_device import Device, open_device

TAKEN_BYTES = 256 * 2**20


def check_memory(place: Place) -> dict[str, float]:
    """Check that allocated memory is measured, at its peak too, and released."""
    device = place.device
    device.release_unused()
    before = device.memory()
    taken = torch.ones(TAKEN_BYTES, dtype=torch.uint8, device=device.torch_device)
    during = device.memory()
    grown = during.allocated_bytes - before.allocated_bytes
    require(grown >= 0.9 * TAKEN_BYTES, f"{TAKEN_BYTES} bytes were taken, and memory() has grown by {grown}")
    del taken
    device.release_unused()
    after = device.memory()
    require(after.allocated_bytes < during.allocated_bytes - 0.9 * TAKEN_BYTES, "what was let go is still counted")
    exact = 1.0 if place.is_accelerator else 0.95  # Linux counts a process's memory in batches
    require(after.peak_bytes >= exact * during.allocated_bytes, "the peak is below what was held")
    device.reset_peak_memory()
    require(device.memory().peak_bytes < during.peak_bytes, "the peak does not start anew")
    return {"total_gib": after.total_bytes / 2**30}


def check_random_state(device: Device) -> None:
    """Check that a restored state gives the same numbers."""
    state = device.rng_state()
    first = torch.rand(1000, device=device.torch_device)
    second = torch.rand(1000, device=device.torch_device)
    device.set_rng_state(state)
    again = torch.rand(1000, device=device.torch_device)
    require(torch.equal(first, again), "the random state was not put back")
    require(not torch.equal(first, second), "random numbers repeat")


def check_autocast(device: Device) -> str:
    """Check that products come in each format that the device declares; return their names."""
    one = torch.ones(64, 64, device=device.torch_device)
    for dtype in device.autocast_dtypes:
        with torch.autocast(device.kind, dtype=dtype):
            require((one @ one).dtype == dtype, f"autocast does not compute in {dtype}")
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in device.autocast_dtypes)


def check_recorded_work(place: Place) -> bool:
    """Check that recorded work reads its inputs at each call, and that a copy to the host keeps the values of its time.

    Whether the device records any.
    """
    device = place.device
    graphs = device.work_graphs()
    require(graphs is not None or not place.is_accelerator, "the device records no work")
    numbers, sums = (torch.ones(1000, device=device.torch_device) for _ in range(2))

    def add() -> None:
        sums.copy_(2 * numbers + sums)

    add()
    run = graphs.record(add) if graphs else add
    numbers.fill_(5.0)
    for _ in range(100):
        run()
    wait = device.copy_to_host(sums)
    sums.zero_()
    require(bool((wait() == 3 + 100 * 10).all()), "recorded work has computed something else")
    return graphs is not None


def check_stable_memory(place: Place) -> float:
    """Check that memory leaves its addresses, and that work recorded on them before reads what comes there later.

    Returns:
        Milliseconds of giving it back and having it again.
    """
    device = place.device
    memory, graphs = device.reserve(TAKEN_BYTES), device.work_graphs()
    require(memory is not None, "the device has no addresses without memory")
    assert memory is not None
    memory.restore()
    numbers = memory.tensor.view(torch.float32)
    sums = torch.zeros_like(numbers[:1000])

    def add() -> None:
        sums.add_(numbers[:1000])

    add()
    run = graphs.record(add) if graphs else add
    numbers.fill_(1.0)
    held, free = device.memory().allocated_bytes, device.memory().free_bytes
    start_s = time.perf_counter()
    memory.release()
    released_s = time.perf_counter() - start_s
    gone = held - device.memory().allocated_bytes
    require(gone >= 0.9 * TAKEN_BYTES, f"{TAKEN_BYTES} bytes were given back, and memory() has shrunk by {gone}")
    freed = device.memory().free_bytes - free
    require(freed >= TAKEN_BYTES or not place.is_accelerator, f"others may take {freed} bytes more, of {TAKEN_BYTES}")
    start_s = time.perf_counter()
    memory.restore()
    device.synchronize()
    restored_s = time.perf_counter() - start_s
    require(not numbers.any(), "memory that has come back is not zero")
    numbers.fill_(3.0)
    run()
    require(bool((sums == 3).all()), "work recorded before has read something else")
    return 1000 * (released_s + restored_s)


def check_profiler(place: Place) -> int:
    """Return the number of the accelerator's own kernels in a trace that is written."""
    device = place.device
    one = torch.ones(256, 256, device=device.torch_device)
    profiler = device.profiler()
    profiler.start()
    for _ in range(10):
        one = torch.tanh(one @ one)
    device.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = "kernel" if place.is_accelerator else "cpu_op"
    found = sum(1 for event in events if event.get("cat") == wanted)
    require(found >= 20, f"the trace has {found} events of the kind {wanted}")
    return found


def run(place: Place) -> Figures:
    """Return all of it."""
    auto = open_device("auto")
    require(not place.is_accelerator or auto.kind == place.device.kind, f"auto opens {auto.kind}")
    memory = check_memory(place)
    check_random_state(place.device)
    formats, kernels = check_autocast(place.device), check_profiler(place)
    return {
        **memory,
        "autocast": formats,
        "packed_attention": place.device.packed_attention,
        "events_in_trace": kernels,
        "records_work": check_recorded_work(place),
        "stable_memory_ms": check_stable_memory(place),
    }


if __name__ == "__main__":
    main(run)
