"""Tokenizer folders made on the spot: byte-level BPE with real merges, ChatML and Llama 3 style. Scripts of users."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import offbeat_data
from offbeat_data import load_tokenizer

TEXT = [
    "You are a helpful assistant. What is the sum of two numbers? The answer is twelve, and not thirteen.",
    "system user assistant Hello there, how are you today? I am fine, thank you. Grüße aus Köln, 日本語 🙂.",
    "the the the and and of of to to is is a a in in that that 1 2 3 4 5 6 7 8 9 0 + - = / * ( ) { } [ ] < > \n\n",
]
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\n"
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}"
)
LLAMA3_TAGGED = LLAMA3.replace(
    "    {{- message['content'] | trim + '<|eot_id|>' }}\n",
    "    {%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}\n",
)
# As Qwen3 does: thoughts are dropped from every assistant turn but the last.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
# The parts of Qwen3's template that look back: thoughts of turns before the last question are dropped, tools are not
# questions, and the last turn gets an empty thought. Source: Qwen3's tokenizer_config.json, shortened.
QWEN3 = (
    "{% set ns = namespace(searching=true, last=messages|length - 1) %}"
    "{% for m in messages[::-1] %}{% if ns.searching and m['role'] == 'user' %}"
    "{% set ns.searching = false %}{% set ns.last = (messages|length - 1) - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set thoughts = '' %}{% if '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ content + '<|im_end|>\\n' }}"
    "{% elif m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
_THOUGHTS_AND_WORDS = (
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ content + '<|im_end|>\\n' }}"
)
QWEN3_TAGGED = QWEN3.replace(
    _THOUGHTS_AND_WORDS,
    "{% generation %}" + _THOUGHTS_AND_WORDS.replace("<|im_end|>\\n", "<|im_end|>") + "{% endgeneration %}{{ '\\n' }}",
)
# Opens a turn with a space that it leaves out when it writes the turn itself.
TRIMS_START = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n ' }}")
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Qwen-VL's own: parts of type image become one placeholder between two marks.
VISION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "tools": TOOLS,
    "chatml": CHATML,
    "chatml_tagged": CHATML_TAGGED,
    "llama3": LLAMA3,
    "llama3_tagged": LLAMA3_TAGGED,
    "forgetful": FORGETFUL,
    "qwen3": QWEN3,
    "qwen3_tagged": QWEN3_TAGGED,
    "trims_start": TRIMS_START,
}


def _write_tokenizer(folder, template):
    llama = template is not None and "llama3" in template
    special = ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special = special if llama else ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if llama:
        split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    if llama:  # trims offsets and puts bos first, as Llama 3 does
        opening = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), opening])
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1], "bos_token": special[0]}
    if template is not None:
        settings["chat_template"] = TEMPLATES[template]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Folder of a tokenizer with the named chat template, or with none."""
    made = {}

    def folder(template):
        if template not in made:
            made[template] = _write_tokenizer(tmp_path_factory.mktemp("tokenizers") / str(template), template)
        return made[template]

    return folder


@pytest.fixture
def copied_folder(tokenizer_folder, tmp_path):
    """A copy of `tokenizer_folder`, with files of its own: bytes, texts or JSON by name."""

    def copy(template, files):
        folder = shutil.copytree(tokenizer_folder(template), tmp_path / "m")
        for name, content in files.items():
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder

    return copy


@pytest.fixture(scope="session")
def make_tokenizer(tokenizer_folder):
    """The tokenizer of `tokenizer_folder`, loaded."""
    return lambda template: load_tokenizer(tokenizer_folder(template))


@pytest.fixture(scope="session")
def vision_folder(tokenizer_folder, tmp_path_factory):
    """Tokenizer and image settings of a model that sees 8 x 8 pixels as a token, and images as 4 to 64 of them."""
    folder = tmp_path_factory.mktemp("vision")
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder("chatml") / "tokenizer.json"))
    backend.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(VISION)
    (folder / "config.json").write_text(json.dumps({"image_token_id": backend.token_to_id("<|image_pad|>")}))
    size = {"shortest_edge": 4 * 8**2, "longest_edge": 64 * 8**2}
    settings = {"patch_size": 4, "merge_size": 2, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def word_tokenizer(tmp_path):
    """Write and load a tokenizer with one token per word, and a chat template, control tokens and end tokens.

    A line break is a token where it is among the words. Tokens that are `plain` are not marked as special.
    """

    def make(template, control, words, *, eos, end_ids=(), around=None, plain=()):
        vocabulary = {token: index for index, token in enumerate(["[UNK]", *control, *words])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        lines = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
        split = pre_tokenizers.Sequence(lines) if "\n" in words else pre_tokenizers.WhitespaceSplit()
        backend.pre_tokenizer = split
        backend.add_special_tokens([token for token in control if token not in plain])
        backend.add_tokens(list(plain))
        if around:
            added = [(token, vocabulary[token]) for token in control if token in around.split()]
            backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=added)
        folder = tmp_path / f"words-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        settings = {"eos_token": eos} | ({"chat_template": template} if template else {})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if end_ids:
            ids = [vocabulary[token] for token in end_ids]
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return load_tokenizer(folder)

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows as JSON lines and return the path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def bubblewrap_that(tmp_path, monkeypatch):
    """Put another bubblewrap in the place of the real one: a script, in which `words` are those after its name."""

    def does(script):
        program = tmp_path / "bwrap"
        program.write_text(f"#!{sys.executable}\nimport os, sys\nwords = sys.argv[1:]\n{script}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return does


NOBODY = 65534
PYTHON_OF_ALL = "/usr/bin/python3"


@pytest.fixture(scope="module", params=["root", "another user"])
def run_as_user(request):
    """Run a script over these packages as root or as another user, with JSON to read; returns the JSON it prints."""
    start, path = [sys.executable], os.pathsep.join(sys.path)
    if (os.geteuid() == 0) != (request.param == "root"):
        if os.geteuid() != 0:
            pytest.skip("not root")
        start = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", PYTHON_OF_ALL]
        imports = [*start, "-c", "import offbeat_data; print(offbeat_data.__file__)"]
        found = subprocess.run(imports, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False, cwd="/")
        if found.stdout.strip() != offbeat_data.__file__:
            pytest.skip(f"another user cannot import these packages with {PYTHON_OF_ALL}")

    def run(script, given):
        environment = {"PYTHONPATH": path, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        command, text = [*start, "-c", script], json.dumps(given)
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=500, check=False, cwd="/tmp"
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
