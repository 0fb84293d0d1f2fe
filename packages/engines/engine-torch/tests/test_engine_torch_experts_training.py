"""Ranks that hold the experts between them: settings, failures, checkpoints, sleep."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from expert_models import write_experts
from safetensors.torch import load_file, save_file
from test_engine_torch_ranks import assert_same, config, three_steps, weighted

from offbeat_core import ConfigError, OffbeatError
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._layers.exchange import here
from offbeat_engine_torch._parallel.stacks import check_expert_parallel, find_stacks
from offbeat_mesh import Group, Mesh

STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp("experts") / "qwen3_moe", "qwen3_moe")


CHANGES = {
    "lora": {"lora_rank": 4},
    "lora in bfloat16": {"lora_rank": 4, "dtype": "bfloat16"},
    "recompute": {"activation_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "once a pass": {"options": {"reduce_once": "on"}},
    "muon": {"options": {"optimizer": "muon"}},
    "moments": {"options": {"moments_dtype": "bfloat16"}},
}


@pytest.mark.mesh(dp=2, ep=2)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_settings_mean_the_same_on_ranks_that_share_experts(model, mesh, make_groups, changes):
    settings = config(model, **changes)
    # In bfloat16 one process, which gathers nothing, rounds elsewhere, and a token may go to another expert.
    like = None if settings.dtype == "float32" else Mesh(dp=2)
    one = three_steps(TorchTrainEngine.create(settings, like), make_groups, weighted)
    many = three_steps(TorchTrainEngine.create(settings, mesh), make_groups, weighted)
    if like:
        assert all(np.array_equal(*pair) for pair in zip(many[3], one[3], strict=True)), "before the first update"
    assert_same(many, one, 3e-2 if like else 1e-3 if "optimizer" in settings.options else 1e-5)


@pytest.mark.mesh(dp=4, ep=2, compare=False)
def test_a_rank_holds_whole_experts_and_their_moments_which_nothing_gathers(model, mesh, make_groups, monkeypatch):
    settings = config(model, activation_checkpointing=True, options={"optimizer": "muon", "reduce_once": "on"})
    engine = TorchTrainEngine.create(settings, mesh)
    ranks, asked = engine._ranks, []
    gather = ranks.gather
    monkeypatch.setattr(ranks, "gather", lambda piece, dtype=None: asked.append(piece.name) or gather(piece, dtype))
    for _ in range(2):
        engine.forward_backward(make_groups(), weighted)
        engine.step()
    assert asked
    assert not any("experts" in name for name in asked)
    piece = next(each for each in engine._policy.pieces if each.name == STACK)
    first = 4 * (mesh.rank % 2) + 2 * (mesh.rank // 2)
    assert piece.box[0] == (first, first + 2), "ranks 0 and 1 share the experts, and 2 and 3; 0 and 2 share rows"
    assert [tuple(each.shape) for each in engine._optimizer.state_of(STACK).values()] == [(2, 32, 32)]
    stack = find_stacks(engine._policy.model.whole)[1].gate_up_proj
    whole = dict(engine.weights())[STACK]
    assert torch.equal(here(stack), whole[first : first + 2])


def counting(send, calls):
    def counted(self, rows, *args):
        calls.append(rows.numel() * rows.element_size())
        return send(self, rows, *args)

    return counted


@pytest.mark.mesh(dp=2, ep=2, compare=False)
@pytest.mark.parametrize("recomputes", [False, True])
def test_each_layer_sends_each_choice_there_and_back(model, mesh, make_groups, monkeypatch, recomputes):
    sent = {"all_to_all_runs": [], "all_to_all_rows": []}
    for name, calls in sent.items():
        monkeypatch.setattr(Group, name, counting(getattr(Group, name), calls))
    settings = config(model, max_tokens_per_microbatch=4096, dtype="bfloat16", activation_checkpointing=recomputes)
    engine = TorchTrainEngine.create(settings, mesh)
    engine.logprobs(make_groups())
    for calls in sent.values():
        calls.clear()
    metrics = engine.forward_backward(make_groups(), weighted)
    assert metrics["num_microbatches"].value == 2
    runs, counts = (
        [sum(each) for each in zip(*mesh.group("dp").all_gather_data(sent[name]), strict=True)] for name in sent
    )
    # Of two layers, in bfloat16: two choices of each token, of 32 numbers, there and back; in the backward pass again.
    of_choices = 2 * int(metrics["packed_tokens"].value) * 32 * 2
    passes = 3 if recomputes else 2
    assert runs == [of_choices] * 2 * 2 * passes
    assert counts == [2 * 8 * 8] * 2 * (passes - 1), "how many come to each of eight experts, in int64, of two ranks"


@pytest.fixture(scope="module")
def lopsided(tmp_path_factory):
    """A model whose routers all choose the first two experts."""
    folder = write_experts(tmp_path_factory.mktemp("experts") / "lopsided", "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.tensor([100.0, 90.0] + [0.0] * 6))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.mesh(dp=2, ep=2, compare=False)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_rank_whose_experts_get_no_token_takes_part(lopsided, mesh, make_groups, recomputes):
    settings = config(lopsided, activation_checkpointing=recomputes)
    one, many = (three_steps(TorchTrainEngine.create(settings, each), make_groups, weighted) for each in (None, mesh))
    assert_same(many, one)


@pytest.mark.mesh(dp=2, ep=2, compare=False)
def test_ranks_without_work_or_with_a_loss_that_raises_meet_the_others(model, mesh, make_groups):
    engine, alone = (TorchTrainEngine.create(config(model), each) for each in (mesh, None))
    for update in (make_groups()[:1], []):  # one sequence for two ranks, and none
        found, wanted = (each.forward_backward(update, weighted) for each in (engine, alone))
        assert found.keys() == wanted.keys()
        assert not update or found["loss"].value == pytest.approx(wanted["loss"].value, rel=1e-5)
    assert engine.step()["grad_norm"].value == pytest.approx(alone.step()["grad_norm"].value, rel=1e-5)

    def raises(tokens):
        if mesh.rank:
            raise ZeroDivisionError("no advantage")
        return weighted(tokens)

    def poisoned(tokens):
        return weighted(tokens)[0] * (float("nan") if mesh.rank else 1.0), {}

    with pytest.raises((ZeroDivisionError, OffbeatError), match="no advantage"):
        engine.forward_backward(make_groups(), raises)
    engine.forward_backward(make_groups(), poisoned)
    assert engine.step()["steps_refused"].value == 1
    assert_same(*(three_steps(each, make_groups, weighted) for each in (engine, alone)))


@pytest.mark.mesh(dp=2, ep=2, compare=False)
def test_checkpoints_are_read_by_other_ranks_and_after_sleep(model, mesh, make_groups, tmp_path):
    settings = config(model, options={"expert_parallel": 2})
    folder = Path(mesh.group("dp").broadcast_data(str(tmp_path)))
    shared = TorchTrainEngine.create(settings, Mesh(dp=2))
    shared.forward_backward(make_groups(), weighted)
    shared.step()
    shared.save(folder / "shared")
    rows, alone = (TorchTrainEngine.create(config(model), each) for each in (Mesh(dp=2), None))
    rows.load(folder / "shared")
    alone.load(folder / "shared")
    shared.sleep(2)
    shared.wake()
    wanted = three_steps(alone, make_groups, weighted)
    assert_same(three_steps(shared, make_groups, weighted), wanted)
    assert_same(three_steps(rows, make_groups, weighted), wanted)
    rows.save(folder / "rows")
    again = TorchTrainEngine.create(settings, mesh)
    again.load(folder / "rows")
    assert_same(*(three_steps(each, make_groups, weighted) for each in (again, alone)))


@pytest.mark.mesh(dp=2, ep=2, compare=False)
def test_a_rank_reads_only_its_own_experts(model, mesh, tmp_path):
    """The folder holds single experts, and those of the other rank are not numbers."""
    folder = Path(shutil.copytree(model, tmp_path / str(mesh.rank)))
    alone = TorchTrainEngine.create(config(model))
    tensors = load_file(folder / "model.safetensors")
    number = {name: int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name}
    others = [name for name, expert in number.items() if expert // 4 != mesh.rank]
    assert others
    for name in others:
        tensors[name].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    engine = TorchTrainEngine.create(config(folder), mesh)
    assert [name for name, _ in engine.weights()] == [name for name, _ in alone.weights()]
    for (name, found), (_, wanted) in zip(engine.weights(), alone.weights(), strict=True):
        assert torch.equal(found, wanted), name


def test_the_plan_says_how_experts_are_shared(model):
    layout = TorchTrainEngine.plan(config(model, options={"expert_parallel": 4, "context_parallel": 2}), 8)
    assert (layout.dp, layout.cp, layout.tp, layout.ep) == (4, 2, 1, 4)
    assert str(layout) == "cp 2 × dp 4 × ep 4"


REFUSED = {
    "experts": (3, 3, {}, "ep = 3 must divide the experts of Qwen3MoeForCausalLM: got 8"),
    "ranks": (4, 6, {}, "expert_parallel = 4 must divide the ranks of dp and cp: got 6 × 1"),
    "tp": (2, 4, {"tensor_parallel": 2}, "ep = 2 with tp = 2"),
}


@pytest.mark.parametrize(("size", "num_ranks", "others", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_divide_is_refused(model, size, num_ranks, others, words):
    with pytest.raises(ConfigError, match=words):
        TorchTrainEngine.plan(config(model, options={"expert_parallel": size, **others}), num_ranks)


def test_models_without_stacks_of_experts_are_refused_by_name(model_folder):
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts; set expert_parallel to 1"):
        TorchTrainEngine.plan(config(model_folder, options={"expert_parallel": 2}), 2)
    settings = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    settings |= {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    with torch.device("meta"):
        llama = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**settings, interleave_moe_layer_step=1))
    with pytest.raises(ConfigError, match="Llama4ForCausalLM keeps its experts in layers of their own"):
        check_expert_parallel(llama, 2)


@pytest.mark.mesh(dp=4, ep=2, compare=False)
def test_a_mesh_and_options_that_differ_are_refused(model, mesh):
    with pytest.raises(ConfigError, match="say it once"):
        TorchTrainEngine.create(config(model, options={"context_parallel": 2}), mesh)
