"""The vocabulary head's memory does not follow tokens x vocabulary: measured in a process of its own.

Both numbers of tokens have more logits than the 256 MiB that are kept for the backward pass.
"""

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
