"""Where the trainer's tensors lie within those of ranks, for each kind of layer; how stacks of experts travel."""

import json
from collections import deque
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from offbeat_core import ModelFolder, WeightSyncError  # noqa: E402
from offbeat_rollout_vllm._in_workers.extension import WorkerSide  # noqa: E402 - needs torch
from offbeat_rollout_vllm._in_workers.receiver import held_parts  # noqa: E402
from offbeat_rollout_vllm._in_workers.weights import HeldWeights, refresh_gates  # noqa: E402 - needs torch
from offbeat_rollout_vllm._updates import FolderStream, Part, Readback, UnstackedStream, matrices_of  # noqa: E402
from offbeat_rollout_vllm._workers import Arena  # noqa: E402
from offbeat_testing import FakeWeightStream  # noqa: E402
from offbeat_weightsync import BucketPlan, InProcessStream, describe_tensors  # noqa: E402
from offbeat_weightsync._sums.parts import join_sums, sum_parts  # noqa: E402
from offbeat_weightsync._tensors import prove_tensors  # noqa: E402

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


KINDS = {
    "attn.qkv": lambda rank, ranks, whole: qkv(rank, ranks, 8, 8, whole),
    "self_attn.qkv_proj": lambda rank, ranks, whole: qkv(rank, ranks, 8, 2, whole),
    "mlp.gate_up_proj": merged,
    "mlp.down_proj": row,
    "mlp.fc1": column,
    "embed_tokens": vocabulary,
}


def fused_and_single(wholes):
    """Name -> tensor as the trainer may have them: matrices of a layer one by one, or fused as in vision towers."""
    queries, keys, values = wholes["self_attn.qkv_proj"].split([16, 4, 4])
    gate, up = wholes["mlp.gate_up_proj"].chunk(2)
    return {
        **{f"{path}.weight": whole for path, whole in wholes.items()},
        "self_attn.q_proj.weight": queries,
        "self_attn.k_proj.weight": keys,
        "self_attn.v_proj.weight": values,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
    }


def draw_wholes():
    draw = torch.Generator().manual_seed(0)
    rows = {"attn.qkv": 48, "self_attn.qkv_proj": 24, "mlp.gate_up_proj": 32}
    return {path: torch.randn(rows.get(path, 16), HIDDEN, generator=draw) for path in KINDS}


def model_of(rank, num_ranks, wholes):
    """One rank's, as its worker reads it."""
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
    return HeldWeights(model)


def joined(ranks, name, shape):
    """What the engine's side makes of what the ranks hold."""
    readback = Readback(None, "float32", None, on_cpu=True)
    readback._shapes[name] = shape
    parts = []
    for held in ranks:
        place = held.find(name)
        parts.append((Part(place.shape, place.dim, place.pieces, "float32"), held.read(name)))
    return readback._join(name, parts)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_tensor_is_put_together_as_the_trainer_has_it(num_ranks):
    wholes = draw_wholes()
    ranks = [model_of(rank, num_ranks, wholes) for rank in range(num_ranks)]
    for name, whole in fused_and_single(wholes).items():
        assert torch.equal(joined(ranks, name, tuple(whole.shape)), whole), name


def proofs(ranks, tensors):
    """Sums of words of the trainer's tensors (name -> whole), as workers prove them together, and as they are."""
    plan = BucketPlan.build(describe_tensors(tensors.items()), 256)
    unstacked = UnstackedStream(FakeWeightStream(list(tensors.items()), 1), folder_of({}))
    deque(unstacked, maxlen=0)
    sums = [sum_parts(plan, held_parts(rank, unstacked, spec)) for rank in ranks for spec in plan.specs]
    expected = prove_tensors(plan, 1, tensors.__getitem__, checksum="words")
    return join_sums(plan, 1, [part for parts in sums for part in parts]), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_workers_prove_together_what_each_holds_a_part_of(num_ranks, dtype):
    """Four ranks, of which two share each key and value, and in bfloat16 a part's columns are half a word."""
    wholes = {path: whole.to(dtype) for path, whole in draw_wholes().items()}
    ranks = [model_of(rank, num_ranks, wholes) for rank in range(num_ranks)]
    held, expected = proofs(ranks, fused_and_single(wholes))
    assert held == expected
    ranks[-1]._model.self_attn.qkv_proj.weight.data[1, 2] += 1
    held, expected = proofs(ranks, fused_and_single(wholes))
    assert held != expected


BIAS, ROUTER = "mlp.gate.e_score_correction_bias", "mlp.gate.weight"


class OneWorker:
    """A worker that answers in this process."""

    num_workers = 1

    def __init__(self, model):
        runner = SimpleNamespace(get_model=lambda: model, lora_config=None)
        config, device = SimpleNamespace(dtype=torch.bfloat16), torch.device("meta")
        self._side = WorkerSide(SimpleNamespace(model_runner=runner, model_config=config, device=device, rank=0))

    def call(self, method, **arguments):
        return [getattr(self._side, method)(**json.loads(json.dumps(arguments)))]


@pytest.fixture
def prove():
    """Prove what a model holds, which a stream of bfloat16 has brought, whose routers' biases are float32."""
    arena = Arena.create(1 << 16)

    def prove(model, sent):
        workers = OneWorker(model)
        workers.call("attach", address=arena.address, num_bytes=arena.num_bytes)
        stream = InProcessStream(sent.items(), 1, dtype="bfloat16", keep={BIAS})
        readback = Readback(workers, "bfloat16", lambda _: arena, on_cpu=False)
        for name, tensor in stream:
            readback.expect(name, tensor)
        return stream.prove(readback)

    yield prove
    arena.close()


def test_what_an_engine_holds_in_float32_is_proved_in_float32(prove):
    """A router's bias came so; its matrix, which vLLM holds so too in some models, came in bfloat16."""
    draw = torch.Generator().manual_seed(0)
    sent = {ROUTER: torch.randn(4, HIDDEN, generator=draw), BIAS: torch.randn(4, generator=draw)}
    sent["norm.weight"] = torch.randn(HIDDEN, generator=draw)
    model = torch.nn.Module()
    model.mlp, model.norm = torch.nn.Module(), torch.nn.Module()
    model.mlp.gate, model.norm.weight = torch.nn.Module(), torch.nn.Parameter(sent["norm.weight"].bfloat16())
    gate = model.mlp.gate
    gate.weight = torch.nn.Parameter(sent[ROUTER].bfloat16().float())
    gate.e_score_correction_bias = torch.nn.Parameter(sent[BIAS].clone())
    assert prove(model, sent).num_tensors == 3
    gate.e_score_correction_bias.data = sent[BIAS].bfloat16().float()
    with pytest.raises(WeightSyncError, match="holds other bytes than were sent"):
        prove(model, sent)
    gate.e_score_correction_bias.data = sent[BIAS].bfloat16()
    with pytest.raises(WeightSyncError, match=f"{BIAS}: planned as float32, the engine has bfloat16"):
        prove(model, sent)
    gate.e_score_correction_bias.data, gate.weight.data = sent[BIAS], sent[ROUTER]
    with pytest.raises(ValueError, match=f"{ROUTER}: the engine holds numbers in float32 that bfloat16"):
        prove(model, sent)


NUM_EXPERTS, WIDTH = 4, 16
SHAPES = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


class Experts(torch.nn.Module):
    """One rank's RoutedExperts, with the attributes that vLLM's has, and a kernel that takes stacks as they came.

    Args:
        wholes: (expert, matrix) -> whole.
        rank: of this part.
        num_ranks: which share the experts.
        by_expert: whole experts on each rank; otherwise slices of every expert.
    """

    def __init__(self, wholes, rank=0, num_ranks=1, *, by_expert=False):
        super().__init__()
        slices, groups = (1, num_ranks) if by_expert else (num_ranks, 1)
        mine = range(NUM_EXPERTS)[rank % groups :: groups] if by_expert else range(NUM_EXPERTS)
        index = 0 if by_expert else rank
        cut = lambda expert, matrix: wholes[expert, matrix].chunk(slices, int(matrix == "down_proj"))[index]  # noqa: E731
        w13 = [torch.cat([cut(expert, "gate_proj"), cut(expert, "up_proj")]) for expert in mine]
        self.w13_weight = torch.nn.Parameter(torch.stack(w13), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(
            torch.stack([cut(expert, "down_proj") for expert in mine]), requires_grad=False
        )
        local = {expert: place for place, expert in enumerate(mine)}
        self.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: local.get(expert, -1))
        self.moe_config = SimpleNamespace(
            tp_rank=index,
            hidden_dim_unpadded=HIDDEN,
            intermediate_size_per_partition_unpadded=WIDTH // slices,
            moe_parallel_config=SimpleNamespace(enable_eplb=False),
        )
        self.global_num_experts = NUM_EXPERTS
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = SHAPES
        self.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))


class Runner(torch.nn.Module):
    """One rank's MoERunner."""

    def __init__(self, layer):
        super().__init__()
        self.routed_experts, self.shared_expert_gate = layer, None


def held_experts(layer):
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.experts = Runner(layer)
    return HeldWeights(model)


@pytest.fixture
def wholes():
    draw = torch.Generator().manual_seed(0)
    return {
        (expert, matrix): torch.randn(shape, generator=draw)
        for expert in range(NUM_EXPERTS)
        for matrix, shape in SHAPES.items()
    }


@pytest.mark.parametrize("by_expert", [False, True], ids=["slices", "whole experts"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_expert_is_put_together_as_the_trainer_has_it(wholes, num_ranks, by_expert):
    ranks = [held_experts(Experts(wholes, rank, num_ranks, by_expert=by_expert)) for rank in range(num_ranks)]
    for (expert, matrix), whole in wholes.items():
        name = f"mlp.experts.{expert}.{matrix}.weight"
        assert torch.equal(joined(ranks, name, tuple(whole.shape)), whole), name
        assert sum(bool(rank.find(name).pieces) for rank in ranks) == (1 if by_expert else num_ranks)


@pytest.mark.parametrize("by_expert", [False, True], ids=["slices", "whole experts"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_workers_prove_stacks_of_experts_by_their_matrices(wholes, num_ranks, by_expert):
    layers = [Experts(wholes, rank, num_ranks, by_expert=by_expert) for rank in range(num_ranks)]
    ranks = [held_experts(layer) for layer in layers]
    held, expected = proofs(ranks, stacks_of(wholes))
    assert held == expected
    layers[-1].w2_weight.data[0, 1, 2] += 1
    held, expected = proofs(ranks, stacks_of(wholes))
    assert held != expected


def stacks_of(wholes):
    """Name -> stack, as transformers has them in memory."""
    stack = lambda matrix: torch.stack([wholes[expert, matrix] for expert in range(NUM_EXPERTS)])  # noqa: E731
    gate_up = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
    return {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": stack("down_proj")}


def pad(layer):
    layer.w13_weight = torch.nn.Parameter(torch.nn.functional.pad(layer.w13_weight, (0, 0, 0, 4)))


SPOILERS = {
    "a kernel that lays stacks out anew": (
        lambda layer: setattr(layer.quant_method.unquantized_backend, "name", "FLASHINFER_TRTLLM"),
        r'FLASHINFER_TRTLLM does not serve stacks of experts as they came.*options\.moe_backend = "triton"',
    ),
    "quantised experts": (
        lambda layer: setattr(layer, "quant_method", SimpleNamespace()),
        "SimpleNamespace does not serve stacks of experts as they came",
    ),
    "padded stacks": (pad, "TRITON does not serve stacks of experts as they came"),
    "experts that move between ranks": (
        lambda layer: setattr(layer.moe_config.moe_parallel_config, "enable_eplb", True),
        r"leave rollout\.options\.enable_eplb out",
    ),
}


@pytest.mark.parametrize("case", SPOILERS)
def test_what_is_not_known_to_be_what_serves_is_refused(wholes, case):
    spoil, text = SPOILERS[case]
    layer = Experts(wholes)
    weights = held_experts(layer)
    weights.find("mlp.experts.0.up_proj.weight")
    spoil(layer)
    with pytest.raises(KeyError, match=text):
        weights.find("mlp.experts.0.up_proj.weight")


def test_a_copy_of_a_router_and_a_gate_is_written_where_it_lies():
    """Recorded graphs read it there; a runner that has made no copy yet has none to write."""
    runner = torch.nn.Module()
    runner.gate, runner.shared_expert_gate = torch.nn.Linear(8, 4), torch.nn.Linear(8, 1)
    runner._combined_gate_weight = None
    refresh_gates(runner)
    copy = runner._combined_gate_weight = torch.zeros(5, 8)
    refresh_gates(runner)
    assert runner._combined_gate_weight is copy
    assert torch.equal(copy, torch.cat([runner.gate.weight, runner.shared_expert_gate.weight]))


@pytest.mark.parametrize(
    "name", ["mlp.experts.4.up_proj.weight", "mlp.experts.0.up_proj.bias", "mlp.experts.0.w1.weight"]
)
def test_a_tensor_that_no_expert_has_is_refused(wholes, name):
    with pytest.raises(KeyError, match="no such tensor"):
        held_experts(Experts(wholes)).find(name)


def test_stacks_travel_matrix_by_matrix_and_are_proved_as_stacks(wholes):
    stacks = stacks_of(wholes)
    named = [*stacks.items(), ("norm", stacks["mlp.experts.gate_up_proj"][0])]
    stream = FakeWeightStream(named, 3)
    unstacked = UnstackedStream(stream, folder_of({}))
    came = {name: tensor.clone() for name, tensor in unstacked}
    assert came.keys() == {f"mlp.experts.{expert}.{matrix}.weight" for expert, matrix in wholes} | {"norm"}
    for (expert, matrix), whole in wholes.items():
        assert torch.equal(came[f"mlp.experts.{expert}.{matrix}.weight"], whole)
    assert unstacked.prove(came.__getitem__) == stream.expected()
    came["mlp.experts.2.up_proj.weight"] = torch.zeros(WIDTH, HIDDEN)
    assert unstacked.prove(came.__getitem__) != stream.expected()


def test_a_stack_that_the_folder_has_too_stays_one():
    stream = FakeWeightStream([("mlp.experts.down_proj", torch.zeros(2, 3, 4))], 3)
    unstacked = UnstackedStream(stream, folder_of({"mlp.experts.down_proj": (2, 3, 4)}))
    assert [name for name, _ in unstacked] == ["mlp.experts.down_proj"]


def folder_of(shapes):
    folder = ModelFolder.__new__(ModelFolder)
    folder.path, folder.shapes, folder.optional = Path("m"), shapes, {}
    return folder


def test_tensors_that_come_in_another_format_are_restored_where_a_packed_product_shows_zero():
    """As the blocks of a folder do: float32 values, many of them negative zeros, for an engine in bfloat16 on a CPU."""
    sent = torch.tensor([[-0.0, 0.0, 1.0, 2.0**-130, -1.7]])
    model = torch.nn.Module()
    model.norm = torch.nn.Module()
    model.norm.weight = torch.nn.Parameter(torch.tensor([[0.0, 0.0, 1.0, 0.0, -1.7]]).bfloat16())
    with closing(Arena.create(1 << 16)) as arena:
        workers = OneWorker(model)
        workers.call("attach", address=arena.address, num_bytes=arena.num_bytes)
        readback = Readback(workers, "bfloat16", lambda _: arena, on_cpu=True)
        readback.expect("norm.weight", sent)
        assert FolderStream(lambda: [("norm.weight", sent)], 0).prove(readback).num_tensors == 1
        model.norm.weight.data[0, 2] = 1.5
        with pytest.raises(WeightSyncError, match="other numbers than the folder's"):
            FolderStream(lambda: [("norm.weight", sent)], 0).prove(readback)


def test_a_stack_is_made_of_the_matrices_of_the_folder_in_order():
    """As `torch.stack` and `chunk` lay it out; what the folder holds under the same name is itself."""
    both = [f"mlp.experts.{number}.{part}_proj.weight" for number in range(3) for part in ("gate", "up")]
    down = [f"mlp.experts.{number}.down_proj.weight" for number in range(3)]
    own = {"norm.weight": (3,), "other.experts.down_proj": (3, 2, 2)}
    folder = folder_of({**dict.fromkeys([*both, *down], (2, 3)), **own})
    assert matrices_of("mlp.experts.gate_up_proj", folder) == both
    assert matrices_of("mlp.experts.down_proj", folder) == down
    assert [matrices_of(name, folder) for name in own] == [[name] for name in own]
    assert matrices_of("other.experts.gate_up_proj", folder) == matrices_of("none.weight", folder) == []
