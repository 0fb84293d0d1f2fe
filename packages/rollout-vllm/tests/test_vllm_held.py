"""Where the trainer's tensors lie within those of tensor-parallel ranks, for layers of each of vLLM's kinds."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from offbeat_rollout_vllm._updates import Part, Readback  # noqa: E402
from offbeat_rollout_vllm._worker_weights import HeldWeights  # noqa: E402 - needs torch

HIDDEN, HEAD_SIZE = 8, 2


class Layer(torch.nn.Module):
    """With the attributes that vLLM's layer of that kind has on one rank."""

    def __init__(self, weight, **attributes):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method, self.input_size = object(), HIDDEN
        for name, value in {"input_size_per_partition": weight.shape[1], **attributes}.items():
            setattr(self, name, value)


def rows_of(whole, num_ranks, rank):
    return whole.chunk(num_ranks)[rank]


def qkv(rank, num_ranks, num_heads, num_kv_heads, whole):
    """One rank's QKVParallelLinear: its heads, and those keys and values that it shares with its neighbours."""
    replicas = max(1, num_ranks // num_kv_heads)
    queries, keys, values = whole.split([num_heads * HEAD_SIZE, num_kv_heads * HEAD_SIZE, num_kv_heads * HEAD_SIZE])
    groups = num_ranks // replicas
    mine = [rows_of(queries, num_ranks, rank)] + [rows_of(one, groups, rank // replicas) for one in (keys, values)]
    held_kv_heads = max(1, num_kv_heads // num_ranks)
    return Layer(
        torch.cat(mine),
        tp_rank=rank,
        tp_size=num_ranks,
        head_size=HEAD_SIZE,
        num_heads=num_heads // num_ranks,
        num_kv_heads=held_kv_heads,
        num_kv_head_replicas=replicas,
        output_sizes=[num_heads * HEAD_SIZE] + 2 * [held_kv_heads * HEAD_SIZE * num_ranks],
        output_size=(num_heads + 2 * held_kv_heads * num_ranks) * HEAD_SIZE,
        output_size_per_partition=sum(len(one) for one in mine),
    )


def merged(rank, num_ranks, whole):
    """One rank's MergedColumnParallelLinear of two matrices."""
    gate, up = whole.chunk(2)
    weight = torch.cat([rows_of(gate, num_ranks, rank), rows_of(up, num_ranks, rank)])
    sizes = [len(gate), len(up)]
    return Layer(
        weight,
        tp_rank=rank,
        tp_size=num_ranks,
        output_sizes=sizes,
        output_size=sum(sizes),
        output_size_per_partition=len(weight),
    )


def column(rank, num_ranks, whole):
    weight = rows_of(whole, num_ranks, rank)
    return Layer(weight, tp_rank=rank, tp_size=num_ranks, output_size=len(whole), output_size_per_partition=len(weight))


def row(rank, num_ranks, whole):
    weight = whole.chunk(num_ranks, 1)[rank]
    return Layer(weight, tp_rank=rank, tp_size=num_ranks, output_size=len(whole), output_size_per_partition=len(whole))


def vocabulary(rank, num_ranks, whole):
    weight, start = rows_of(whole, num_ranks, rank), rank * len(whole) // num_ranks
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=start + len(weight))
    return Layer(torch.cat([weight, torch.zeros(3, HIDDEN)]), shard_indices=indices, embedding_dim=HIDDEN)


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
KINDS = {
    "attn.qkv": lambda rank, ranks, whole: qkv(rank, ranks, 8, 8, whole),
    "self_attn.qkv_proj": lambda rank, ranks, whole: qkv(rank, ranks, 8, 2, whole),
    "mlp.gate_up_proj": merged,
    "mlp.down_proj": row,
    "mlp.fc1": column,
    "embed_tokens": vocabulary,
}


def model_of(rank, num_ranks, wholes):
    model = torch.nn.Module()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    for path, make in KINDS.items():
        parent = model
        for name in path.split(".")[:-1]:
            if not hasattr(parent, name):
                parent.add_module(name, torch.nn.Module())
            parent = getattr(parent, name)
        parent.add_module(path.split(".")[-1], make(rank, num_ranks, wholes[path]))
    return HeldWeights(model, torch.float32)


def joined(ranks, name, shape):
    """What the engine's side makes of what the ranks hold."""
    readback = Readback(None, "float32", None)
    readback._shapes[name] = shape
    parts = []
    for held in ranks:
        place = held.find(name)
        parts.append((Part(place.shape, place.dim, place.pieces), held.read(name)))
    return readback._join(name, parts)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_tensor_is_put_together_as_the_trainer_has_it(num_ranks):
    draw = torch.Generator().manual_seed(0)
    rows = {"attn.qkv": 48, "self_attn.qkv_proj": 24, "mlp.gate_up_proj": 32}
    wholes = {path: torch.randn(rows.get(path, 16), HIDDEN, generator=draw) for path in KINDS}
    ranks = [model_of(rank, num_ranks, wholes) for rank in range(num_ranks)]
    queries, keys, values = wholes["self_attn.qkv_proj"].split([16, 4, 4])
    gate, up = wholes["mlp.gate_up_proj"].chunk(2)
    trainer = {
        **{f"{path}.weight": whole for path, whole in wholes.items()},  # fused in the trainer too, as in vision towers
        "self_attn.q_proj.weight": queries,
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": values,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
    }
    for name, whole in trainer.items():
        assert torch.equal(joined(ranks, name, tuple(whole.shape)), whole), name
