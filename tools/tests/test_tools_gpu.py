"""The pieces for a GPU run here in their tiny form; what one of them does wrong is noted and stops no other."""

import json
import subprocess
import sys

import pytest
import torch
from gpu import pack, piece, report, run

LONG = {
    "quickstart": "starts a whole run",
    "cuda_ipc": "starts six processes",
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
def test_a_piece_runs_on_a_cpu(name, tmp_path):
    result = run.run_piece(piece.FOLDER / f"{name}.py", "cpu", tmp_path / f"{name}.json")
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
    result = run.run_piece(script, "cpu", out, 10.0)
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

    def instead(script, device, out):
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


def test_packed_attention_without_its_window_is_noticed(monkeypatch):
    from gpu import packed_attention

    from offbeat_device import open_device

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
