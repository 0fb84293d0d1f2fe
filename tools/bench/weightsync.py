"""Speed of the shared-memory weight sync, beside plain memcpy in the same run.

    python tools/bench/weightsync.py [--size tiny|smollm2-135m|1b|all] [--receivers N] [--repeats N] [--json]

Trainer and engines are processes; the engine copies every tensor into its own, proves them, and confirms. The time
is the sender's, from `send` to the last proof. Plain memcpy is one `copy_` of as many bytes, in one thread, in
a warm process: a sync copies everything twice (into the slot, out of it) and reads it twice more for checksums.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import torch

from offbeat_weightsync import BucketPlan, SharedMemorySender, describe_tensors, new_socket_path, receive

Shapes = list[tuple[str, tuple[int, ...]]]

SIZES = {
    "tiny": {"vocabulary": 512, "hidden": 64, "key_value": 32, "feed_forward": 128, "layers": 2},
    "smollm2-135m": {"vocabulary": 49152, "hidden": 576, "key_value": 192, "feed_forward": 1536, "layers": 30},
    "1b": {"vocabulary": 128256, "hidden": 2048, "key_value": 512, "feed_forward": 8192, "layers": 16},
}


def llama_shapes(size: dict[str, int]) -> Shapes:
    """Names and shapes of a Llama with tied embeddings."""
    hidden, wide, narrow = size["hidden"], size["feed_forward"], size["key_value"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: Shapes = [("model.embed_tokens.weight", (size["vocabulary"], hidden))]
    for index in range(size["layers"]):
        shapes += [(f"model.layers.{index}.{name}.weight", shape) for name, shape in layer.items()]
    return [*shapes, ("model.norm.weight", (hidden,))]


def run_receiver(socket_path: str, shapes: Shapes, repeats: int, name: str) -> None:
    """Be a rollout engine that holds bfloat16 tensors and loads them `repeats` times."""
    torch.set_num_threads(1)
    held = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes}
    for version in range(repeats):
        with receive(socket_path, version, 120.0, name=name) as stream:
            for key, tensor in stream:
                held[key].copy_(tensor)
            stream.confirm(stream.prove(held.__getitem__))


def measure_memcpy(num_bytes: int, repeats: int) -> float:
    """Seconds of the fastest `copy_` of so many bytes."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return min(times)


def measure_sync(shapes: Shapes, num_receivers: int, repeats: int) -> tuple[int, list[float]]:
    """Bytes of one sync, and its seconds, one number per repeat; the first is cold."""
    tensors = [(key, torch.randn(shape).bfloat16()) for key, shape in shapes]
    plan = BucketPlan.build(describe_tensors(tensors))
    spawn = multiprocessing.get_context("spawn")
    with SharedMemorySender(new_socket_path(), plan, deadline_s=120.0) as sender:
        engines: list[BaseProcess] = [
            spawn.Process(target=run_receiver, args=(sender.socket_path, shapes, repeats, f"rollout-{index}"))
            for index in range(num_receivers)
        ]
        for engine in engines:
            engine.start()
        times = [_time_send(sender, tensors, version, num_receivers) for version in range(repeats)]
        for engine in engines:
            engine.join(30)
    return plan.num_bytes, times


def _time_send(sender: SharedMemorySender, tensors: Sequence[tuple[str, torch.Tensor]], version: int, n: int) -> float:
    start = time.perf_counter()
    sender.send(tensors, version, n)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of the shared-memory weight sync, beside plain memcpy.")
    parser.add_argument("--size", choices=(*SIZES, "all"), default="all")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = list(SIZES) if arguments.size == "all" else [arguments.size]
    results = []
    for name in names:
        num_bytes, times = measure_sync(llama_shapes(SIZES[name]), arguments.receivers, arguments.repeats)
        memcpy_s, sync_s = measure_memcpy(num_bytes, arguments.repeats), min(times[1:] or times)
        results.append(
            {
                "size": name,
                "receivers": arguments.receivers,
                "bytes": num_bytes,
                "sync_s": round(sync_s, 4),
                "sync_gb_per_s": round(num_bytes / sync_s / 1e9, 3),
                "memcpy_gb_per_s": round(num_bytes / memcpy_s / 1e9, 3),
                "ratio_to_memcpy": round(memcpy_s / sync_s, 3),
                "all_s": [round(seconds, 4) for seconds in times],
            }
        )
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(
            f"{result['size']}: {result['sync_gb_per_s']} GB/s to {result['receivers']} receiver(s), proved; "
            f"memcpy {result['memcpy_gb_per_s']} GB/s, ratio {result['ratio_to_memcpy']}; {result['all_s']} s"
        )


if __name__ == "__main__":
    main()
