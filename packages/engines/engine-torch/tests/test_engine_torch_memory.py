"""Memory of a step.

That of the vocabulary head does not follow tokens x vocabulary: measured in a process of its own. Both numbers of
tokens have more logits than the 256 MiB that are kept for the backward pass.
"""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OlmoHybridConfig, Qwen3_5TextConfig

from offbeat_core import TrainEngineConfig, TrainLayout, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_placement import read_shape, train_memory

VOCABULARY, TOKENS, FEW, MANY = 40_000, 128, 16, 44
SCRIPT = """
import sys
import numpy as np, torch
from offbeat_device import open_device
from offbeat_engine_torch import TorchTrainEngine
from offbeat_core import TrainEngineConfig, TrainSequence
folder, vocabulary, length, *counts = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
engine = TorchTrainEngine.create(TrainEngineConfig(model_path=folder, device="cpu"))
device, rng = open_device("cpu"), np.random.default_rng(0)
def peak(num):
    ids = rng.integers(0, vocabulary, (num, length)).astype(np.int32)
    sequences = [TrainSequence(ids=row, loss_mask=np.arange(length) > 0) for row in ids]
    device.reset_peak_memory()
    metrics = engine.forward_backward(sequences, lambda t: (-t.logprobs_N.sum() / t.total_tokens, {}))
    assert metrics["num_microbatches"].value == 1
    engine.step()
    return device.memory().peak_bytes
few, *_ = peak(counts[0]), peak(counts[0])
print(few, peak(counts[1]))
"""


@pytest.mark.nightly
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape)).save_pretrained(tmp_path)
    numbers = [str(number) for number in (VOCABULARY, TOKENS, FEW, MANY)]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    few, many = map(int, done.stdout.split())
    more_logits_bytes = (MANY - FEW) * TOKENS * VOCABULARY * 4  # 573 MB, were they ever held
    assert many - few < more_logits_bytes / 4


RULE = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32}
KINDS = ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.filterwarnings("ignore:Module is None")  # torch's tracker warns of modules in the backward pass
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [Qwen3_5TextConfig, pytest.param(OlmoHybridConfig, marks=pytest.mark.nightly)])
def test_the_tensors_of_a_step_grow_with_its_tokens_as_the_plan_says(family, dtype, recomputes, tmp_path):
    """Measure a model with the gated delta rule, in sequences of four whole chunks, with what the head needs."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 1}
    rule = {f"linear_{name}": size for name, size in RULE.items()}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = family(vocab_size=300, head_dim=32, num_hidden_layers=4, layer_types=KINDS, **shape, **rule, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = TrainEngineConfig(
        model_path=str(tmp_path), device="cpu", dtype=dtype, activation_checkpointing=recomputes
    )
    engine, model = TorchTrainEngine.create(settings), read_shape(str(tmp_path))

    def planned(num_tokens):
        memory = train_memory(
            replace(settings, max_tokens_per_microbatch=num_tokens), TrainLayout(), model, on_cpu=True
        )
        return memory.estimate(model).num_bytes

    def held(num_sequences):
        ids = torch.arange(num_sequences * 256).view(num_sequences, 256).numpy().astype(np.int32) % 300
        sequences = [TrainSequence(ids=row, loss_mask=np.arange(256) > 0) for row in ids]
        with MemTracker() as tracker:
            engine.forward_backward(sequences, lambda tokens: (-tokens.logprobs_N.mean(), {}))
        return sum(kind["Total"] for kind in tracker.get_tracker_snapshot("peak").values())

    _, one, two = (held(num_sequences) for num_sequences in (1, 1, 2))  # the first makes the gradients
    assert planned(512) - planned(256) == pytest.approx(two - one, rel=0.15)
