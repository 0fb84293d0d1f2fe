"""The tool, on a tiny model in a real GGUF file made on the spot."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

TOOL = Path(__file__).parents[1] / "make_smollm2.py"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc0123456789 \n".replace(" ", "Ġ").replace("\n", "Ċ"), "ab"]
WIDTH, HEADS, KV_HEADS, INNER = 64, 4, 2, 96


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """Write one Llama block with the names, types and tokenizer of SmolLM2's file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    draw = np.random.default_rng(0)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd": (len(TOKENS), WIDTH),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (kv_width, WIDTH),
        "blk.0.attn_v": (kv_width, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (INNER, WIDTH),
        "blk.0.ffn_up": (INNER, WIDTH),
        "blk.0.ffn_down": (WIDTH, INNER),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        "output_norm": (WIDTH,),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _run(*arguments):
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_folder_holds_the_model_of_the_file(tiny_gguf, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = _run(tmp_path / "model", "--gguf", tiny_gguf)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    ids = torch.tensor([[1, 3, 4, 5, 2]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, read(ids).logits)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rms_norm_eps == 1e-5
    assert model.generation_config.eos_token_id == 2
    assert {file.stat().st_mode for file in (tmp_path / "model").iterdir()} == {tiny_gguf.stat().st_mode}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("ab  12") == ["ab", "Ġ", "Ġ", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_bfloat16_halves_the_weights(tiny_gguf, tmp_path):
    import torch
    from safetensors.torch import load_file

    assert _run(tmp_path / "model", "--gguf", tiny_gguf, "--dtype", "bfloat16").returncode == 0
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors


def test_a_folder_in_use_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    done = _run(tmp_path)
    assert done.returncode == 2
    assert "exists and is not empty: name a new folder" in done.stderr
    done = _run(tmp_path / "new", "--gguf", tmp_path / "nowhere.gguf")
    assert done.returncode == 2
    assert "no such file" in done.stderr


def test_what_must_be_installed_is_said_before_anything_is_fetched(tmp_path):
    hidden = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'accelerate' else find(name)\n"
        f"sys.argv = ['make_smollm2.py', {str(tmp_path / 'model')!r}]\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "accelerate must be installed first: pip install" in done.stderr
    assert "uv run make_smollm2.py" in " ".join(done.stderr.split())
