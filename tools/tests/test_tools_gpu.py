"""The pieces for a GPU run here in their tiny form; what one of them does wrong is noted and stops no other."""

import json
import runpy
import subprocess
import sys
from collections import Counter
from importlib import import_module

import pytest
import torch
from gpu import kernels, pack, piece, report, run, shapes, whole_run

from offbeat_device import open_device
from offbeat_testing import RunningCommand, tiny_model

torch.set_num_threads(1)  # pieces run in forks of this process, which must not have computed with several threads
IMPORTED = ("gpu.parked_memory", "gpu.two_ranks_one_gpu", "transformers.models.qwen3.modeling_qwen3")
"""Modules that the pieces need, and their forks then do not read again."""
LONG = {
    "quickstart": "starts a whole run, as grpo_shared does",
    "learning": "starts two",
    "decoding_speed": "loads the engine again",
}
OF_MEGATRON = "megatron_against_cpu"
"""Needs megatron-core: its tiny form runs among the tests of engine-megatron."""
SCRIPT = "import sys, time\nsys.path.insert(0, {tools!r})\nfrom gpu.piece import main\n{body}\nmain(run)\n"


def write_piece(folder, name, body):
    path = folder / f"{name}.py"
    path.write_text(f'"""{name}."""\n' + SCRIPT.format(tools=str(piece.FOLDER.parent), body=body))
    return path


def test_there_is_a_script_for_every_piece_whose_first_line_says_what_it_is():
    for name in run.PIECES:
        text = (piece.FOLDER / f"{name}.py").read_text()
        assert piece.title_of(text.removeprefix('"""'))
        assert "def run(place: Place) -> Figures:" in text


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name
        for name in run.PIECES
        if name != OF_MEGATRON
    ],
)
@pytest.mark.timeout(600)
def test_a_piece_runs_on_a_cpu(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process
    for module in IMPORTED:
        import_module(module)
    script, out = piece.FOLDER / f"{name}.py", tmp_path / f"{name}.json"
    main = lambda: runpy.run_path(str(script), run_name="__main__")  # noqa: E731
    with RunningCommand(main, "--device", "cpu", "--out", out) as command:
        command.wait(500)
        assert out.is_file(), command.output
    result = json.loads(out.read_text())
    assert result["passed"], result["error"]
    assert result["piece"] == name
    assert result["tiny"]
    assert result["device"] == "cpu"
    assert result["torch"] == torch.__version__
    assert result["figures"]


def test_a_piece_that_fails_crashes_or_does_not_end_says_so(tmp_path):
    wrong = {
        "raises": ("def run(place):\n    raise ValueError('of this')", 60.0, "ValueError: of this"),
        "crashes": (
            "import os\ndef run(place):\n    print('last words', flush=True)\n    os.abort()",
            60.0,
            "ended with -6",
        ),
        "hangs": ("time.sleep(60)", 1.0, "did not end within 1 s"),
    }
    for name, (body, limit_s, words) in wrong.items():
        result = run.run_piece(write_piece(tmp_path, name, body), "cpu", tmp_path / f"{name}.json", limit_s)
        assert not result["passed"]
        assert words in result["error"]
        assert json.loads((tmp_path / f"{name}.json").read_text()) == result


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("raise ValueError('of this')", "ValueError: of this"),
        ("__import__('os').abort()", "ended with -6"),
        ("time.sleep(60)", "did not end within"),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_figures_that_came_before_the_end_are_kept_however_it_ends(tmp_path, ending, words):
    body = f"def run(place):\n    place.note({{'a': 1.5}})\n    place.note({{'b': 2}})\n    {ending}"
    script, out = write_piece(tmp_path, "piece", body), tmp_path / "piece.json"
    limit_s = 10.0 if "sleep" in ending else 60.0  # a loaded machine takes long to import torch
    result = run.run_piece(script, "cpu", out, limit_s)
    assert result["figures"] == {"a": 1.5, "b": 2}
    assert not result["passed"]
    assert words in result["error"]
    assert json.loads(out.read_text()) == result


def test_a_speed_below_what_the_same_device_has_reached_is_an_error(tmp_path):
    recorded = {"tokens_per_s": 1000.0, "tokens_per_s_by_transformers": 50.0, "mfu": None, "peak_gib": 4.0}
    result = piece.record("speed", "what", "NVIDIA H200") | {"passed": True, "figures": recorded}
    (tmp_path / "speed.json").write_text(json.dumps(result))
    slow = {"tokens_per_s": 799.0}
    piece.require_recorded_speed("speed", "NVIDIA H200", {"tokens_per_s": 800.0}, tmp_path)
    piece.require_recorded_speed("speed", "NVIDIA H100", slow, tmp_path)
    piece.require_recorded_speed("others", "NVIDIA H200", slow, tmp_path)
    for figures in (slow, {}):
        with pytest.raises(piece.CheckError, match=r"tokens_per_s is .*, and 1000 was recorded"):
            piece.require_recorded_speed("speed", "NVIDIA H200", figures, tmp_path)
    (tmp_path / "speed.json").write_text(json.dumps(result | {"passed": False}))
    piece.require_recorded_speed("speed", "NVIDIA H200", slow, tmp_path)


@pytest.mark.parametrize("name", ["decoding_speed", "training_speed"])
def test_the_recorded_figures_of_speed_are_a_bound(name):
    result = report.read_results()[name]
    halved = {what: figure / 2 for what, figure in result["figures"].items() if figure is not None}
    piece.require_recorded_speed(name, result["device"], result["figures"])
    with pytest.raises(piece.CheckError, match="was recorded on this device"):
        piece.require_recorded_speed(name, result["device"], halved)


def test_an_engine_that_keeps_its_cache_asleep_is_noticed():
    from gpu.parked_memory import check_freed

    check_freed(1000, 1500, [1000, 0])
    check_freed(1000, 1500, [1050, 150])
    wrong = {
        "beside the weights": (1500, [1500, 0]),
        "still held": (1500, [1000, 1000]),
        "alone are": (1000, [1000, 0]),
    }
    for words, (awake, asleep) in wrong.items():
        with pytest.raises(piece.CheckError, match=words):
            check_freed(1000, awake, asleep)


def test_one_that_fails_does_not_stop_the_next_one(tmp_path, monkeypatch, capsys):
    ran = []

    def instead(script, device, out, limit_s, tree):
        ran.append(script.stem)
        passed = script.stem != "device_seam"
        return piece.record(script.stem, "", "cpu") | {"passed": passed, "error": "" if passed else "CheckError: no"}

    monkeypatch.setattr(run, "run_piece", instead)
    assert run.main(["device_seam", "decoding", "--device", "cpu", "--out", str(tmp_path)]) == run.SOME_FAILED
    assert ran == ["device_seam", "decoding"]
    assert "device_seam: FAILED" in capsys.readouterr().out
    assert run.main(["decoding", "--device", "cpu", "--out", str(tmp_path)]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path, capsys):
    assert run.main(["--out", str(tmp_path / "out")]) == run.NO_DEVICE
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("nothing was run: device 'cuda' is not here")
    assert not (tmp_path / "out").exists()
    assert run.main(["nothing", "--device", "cpu", "--out", str(tmp_path)]) == run.UNKNOWN_PIECE


def test_peaks_are_found_by_the_name_that_a_driver_gives():
    assert piece.peaks_of("NVIDIA H100 80GB HBM3") == piece.Peaks(bfloat16_tflops=989.4, memory_gb_per_s=3350)
    assert piece.peaks_of("NVIDIA H200").memory_gb_per_s == 4800
    assert piece.peaks_of("NVIDIA GeForce RTX 9999") is None
    assert piece.share(495.0, None) is None
    assert piece.share(495.0, 990.0) == 0.5


def place_of(noted):
    return piece.Place(device=open_device("cpu"), tiny=True, keep=noted.update)


def test_goals_that_are_missed_are_named_all_at_once():
    figures = {"samples_per_s": 99.0, "share": None, "keeps_gib": 1.5, "fast": 3.0}
    piece.require_goals(figures, {"fast": 3.0}, {"fast": 3.0})
    with pytest.raises(piece.CheckError) as error:
        piece.require_goals(figures, {"samples_per_s": 100.0, "share": 0.5, "fast": 3.0, "gone": 1}, {"keeps_gib": 1.0})
    wanted = {"samples_per_s is 99, the goal is at least 100", "share is None, the goal is at least 0.5"}
    wanted |= {"gone is None, the goal is at least 1", "keeps_gib is 1.5, the goal is at most 1"}
    assert set(str(error.value).split("; ")) == wanted
    with pytest.raises(piece.CheckError):
        piece.require_goals({"speed": float("nan")}, {"speed": 1.0})


def test_a_budget_leaves_out_what_has_no_time_left_and_says_so(tmp_path, monkeypatch, capsys):
    ran = {}

    def instead(script, device, out, limit_s, tree):
        ran[script.stem] = limit_s
        return piece.record(script.stem, "", "cpu") | {"passed": True}

    monkeypatch.setattr(run, "run_piece", instead)
    names, seconds = ["grpo_shared", "decoding", "quickstart"], run.PIECES["decoding"].seconds
    budget = ["--budget-s", str(seconds + 1), "--device", "cpu", "--out", str(tmp_path)]
    assert run.main([*names, *budget]) == 0
    assert list(ran) == ["decoding"]
    assert seconds <= ran["decoding"] <= seconds + 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("left out: grpo_shared (about 150 s, 2")
    assert "quickstart" in said[-1]
    assert run.main(["decoding", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert ran["decoding"] == run.LIMIT_S
    assert "left out" not in capsys.readouterr().out


def make_tree(folder, seconds):
    package = folder / "packages" / "core" / "speed"
    (package / "src" / "offbeat_speed").mkdir(parents=True)
    (package / "src" / "offbeat_speed" / "__init__.py").write_text(f"SECONDS = {seconds}")
    for place, name in ((folder, "offbeat"), (package, "offbeat-speed")):
        (place / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0"')
    return folder


def test_a_piece_runs_with_the_sources_of_two_trees_and_their_figures_are_shown_side_by_side(
    tmp_path, monkeypatch, capsys
):
    trees = [f"--tree={name}={make_tree(tmp_path / name, seconds)}" for name, seconds in (("old", 4), ("new", 1))]
    result = piece.record("decoding", "what", "cpu") | {"passed": True}
    body = f"import json, sys\nfrom offbeat_speed import SECONDS\nresult = {result!r}\n"  # without torch: it is quick
    body += "result['figures'] = {'step_s': SECONDS, 'name': 'x'}\njson.dump(result, open(sys.argv[-1], 'w'))\n"
    (tmp_path / "decoding.py").write_text(body)
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    assert run.main(["decoding", "--device", "cpu", "--out", str(tmp_path / "out"), *trees]) == 0
    results = [json.loads((tmp_path / "out" / name / "decoding.json").read_text()) for name in ("old", "new")]
    assert [result["figures"]["step_s"] for result in results] == [4, 1]
    assert "decoding: old, new, last over first\n  step_s: 4, 1, 0.250\n" in capsys.readouterr().out
    for wrong in ("old", "old=/nowhere", f"={tmp_path}"):
        assert run.main(["decoding", "--device", "cpu", "--out", str(tmp_path), "--tree", wrong]) == run.UNKNOWN_PIECE
        assert "NAME=PATH" in capsys.readouterr().out


def test_the_speed_of_a_whole_run_is_that_of_the_updates_after_the_first_ones():
    speed = {"perf/samples_per_s": 64.0, "perf/update_s": 0.5, "perf/tokens_per_s": 512.0}
    slow = {"perf/samples_per_s": 3.2, "perf/update_s": 10.0, "perf/tokens_per_s": 25.6}
    lines = [(10.0, slow), (10.2, {"eval/accuracy": 1.0}), (10.5, speed), (11.0, speed)]
    spans = [("train", 1.0, 9.0), ("train", 10.1, 10.3), ("train", 10.6, 10.8), ("sleep 2", 10.8, 10.9)]
    events = [{"ph": "X", "name": name, "ts": 1e6 * at, "dur": 1e6 * (end - at)} for name, at, end in spans]
    found = whole_run.figures_of(lines, [*events, {"ph": "M", "name": "train"}], 1)
    assert found["samples_per_s"] == pytest.approx(64.0)
    assert found["sampled_tokens_per_s"] == pytest.approx(512.0)
    assert found["update_s"] == pytest.approx(0.5)
    assert found["training_s"] == pytest.approx(0.2)
    assert found["parking_s"] == pytest.approx(0.05)
    assert "generation_s" not in found
    assert whole_run.figures_of(lines, events, 3) == {"updates": 3}


def test_the_figures_of_a_run_that_fails_are_noted(tmp_path):
    noted = {}
    model = tiny_model(tmp_path / "model", "qwen3")
    (model / "config.json").write_text("{}")
    with pytest.raises(piece.CheckError, match="ended with 2"):
        whole_run.train(tmp_path, model, place_of(noted), "wrong", 300.0)
    assert noted.keys() == {"peak_gib, wrong"}


def test_kernels_of_a_step_are_those_of_a_longer_batch_beyond_a_shorter_one():
    gemm, norm = "nvjet_tst_128x8", "void rms<float>|x"
    more = kernels.Kernels(Counter({gemm: 10, norm: 6, "once": 1}), Counter({gemm: 1.0, norm: 0.5, "once": 3.0}))
    one = kernels.Kernels(Counter({gemm: 2, "once": 1}), Counter({gemm: 0.2, "once": 3.0}))
    figures = more.beyond(one, 4).figures("x", wall_s=0.65)
    assert figures["kernels, x"] == 3.5
    assert figures["kernels_share_of_step, x"] == pytest.approx(0.5)
    assert figures["share_of_products, x"] == pytest.approx(0.2 / 0.325)
    assert figures["top 01, x"] == "61.5% 200.000 ms x 2 `nvjet_tst_128x8`"
    assert figures["top 02, x"].endswith("x 1.5 `void rms<float>/x`")
    assert "top 03, x" not in figures


def test_kernels_are_recorded_with_their_number():
    one = torch.ones(8, 8)
    with kernels.recorded(place_of({})) as found:
        for _ in range(3):
            one = one @ one
    assert found.counts["aten::mm"] == 3
    assert found.seconds["aten::mm"] > 0


@pytest.mark.parametrize("wait", [lambda one: one.sum().item(), lambda one: one.nonzero()], ids=["item", "nonzero"])
def test_a_wait_is_noticed_in_a_block_and_in_a_backward_pass(wait, tmp_path):
    from gpu import sync_guard, training_speed

    place, one = place_of({}), torch.ones(4)
    with sync_guard.no_waits(place, "a sum"):
        one + one
    with pytest.raises(piece.CheckError, match="a sum has run"), sync_guard.no_waits(place, "a sum"):
        wait(one)
    engine, sequences = training_speed.open_trainer(place, tiny_model(tmp_path / "model", "qwen3"), {})

    def wait_there(*_):
        wait(one)

    engine._policy.model.backbone.norm.register_full_backward_hook(wait_there)
    with pytest.raises(piece.CheckError, match="backward has run"), sync_guard.GuardedModel(place, engine) as guarded:
        engine.forward_backward(sequences, guarded.loss)


def test_a_shape_counts_the_parameters_of_its_model(tmp_path):
    from safetensors.torch import load_file

    tensors = load_file(shapes.make_model(tmp_path / "model", tiny=True) / "model.safetensors").values()
    assert shapes.TINY.num_parameters == sum(tensor.numel() for tensor in tensors if tensor.ndim > 1)
    assert 0.59e9 < shapes.QWEN3_0_6B.num_parameters < 0.6e9


def test_packed_attention_without_its_window_is_noticed(monkeypatch):
    from gpu import packed_attention

    place = piece.Place(device=open_device("cpu"), tiny=True)
    segments, shape = packed_attention.pack(1, 2, 12), packed_attention.Shape(2, 1, 8, 5)
    assert packed_attention.compare(shape, segments, place, torch.float32) < 1e-5
    real = packed_attention.packed_attention
    monkeypatch.setattr(packed_attention, "packed_attention", lambda *given, sliding_window, **how: real(*given, **how))
    assert packed_attention.compare(shape, segments, place, torch.float32) > 0.1


def test_the_page_is_what_the_results_say():
    assert report.PAGE.read_text() == report.page(report.read_results())


def test_a_row_says_when_and_on_what_or_that_it_was_not_run(tmp_path):
    result = piece.record("decoding", "what", "NVIDIA H100 80GB HBM3")
    result |= {"passed": True, "date": "2026-11-23", "commit": "abc", "figures": {"mfu": 0.41234, "share": None}}
    failed = piece.record("cuda_ipc", "what", "NVIDIA H100 80GB HBM3") | {"error": "CheckError: other weights\nmore"}
    text = report.page({"decoding": result, "cuda_ipc": failed})
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert list(rows) == list(run.PIECES)
    assert "2026-11-23 (abc) | NVIDIA H100 80GB HBM3, torch" in rows["decoding"]
    assert rows["decoding"].endswith("| yes |")
    assert rows["cuda_ipc"].endswith("| no: CheckError: other weights |")
    assert rows["quickstart"].endswith("| not run yet | – | – |")
    assert "| mfu | 0.4123 |" in text
    assert "| share | unknown peak of this device |" in text


def test_results_of_a_cpu_are_not_taken(tmp_path):
    for name, tiny in (("decoding", True), ("cuda_ipc", False)):
        result = piece.record(name, "what", "a device") | {"tiny": tiny}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert report.take_results(tmp_path, tmp_path / "into") == ["decoding.json"]
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["cuda_ipc.json"]


@pytest.mark.nightly
def test_what_is_packed_runs_a_piece_without_the_workspace(tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert pack.main([str(tmp_path / "site"), "--python", version]) == 0
    words = [sys.executable, str(piece.FOLDER / "run.py"), "device_seam", "--device", "cpu", "--out", str(tmp_path)]
    assert pack.main([str(tmp_path / "site"), "--python", version]) == pack.FOLDER_IS_THERE
    done = subprocess.run(
        words, env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
