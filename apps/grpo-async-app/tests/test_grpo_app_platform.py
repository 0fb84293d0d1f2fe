"""What is left to the machine: number format and batch of the rollout engines."""

from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight import platform
from grpo_async_app._preflight.platform import choose_for_platform, device_kinds, slow_formats
from offbeat_core import parse_config
from offbeat_placement import ClusterView, grid_nodes

PLAIN = '[model]\npath = "m"\n[data]\npath = "d"\n'


@pytest.mark.parametrize(
    ("kind", "flags", "dtype", "max_running"),
    [
        ("", "fpu avx512f", "float32", 64),
        ("", "fpu avx512f avx512_bf16", "bfloat16", 64),
        ("", "amx_bf16 amx_tile", "bfloat16", 64),
        ("GPU", "fpu", "bfloat16", 256),
        ("XPU", "fpu", "bfloat16", 256),
    ],
)
@pytest.mark.parametrize("training", ["", "GPU"])
def test_a_machine_decides_what_is_left_open_and_says_why(
    kind: str, flags: str, dtype: str, max_running: int, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(platform, "_CPU_INFO", info)
    config, choices = choose_for_platform(parse_config(PLAIN, GrpoConfig), kind, training)
    assert (config.rollout.dtype, config.rollout.max_running) == (dtype, max_running)
    trained = "bfloat16" if training else "float32"
    assert config.engine.dtype == trained
    assert [choice.partition(" (")[0] for choice in choices] == [
        f"rollout.dtype = {dtype}",
        f"rollout.max_running = {max_running}",
        f"engine.dtype = {trained}",
    ]


def test_what_is_written_stays_as_it_is() -> None:
    written = '[rollout]\ndtype = "float16"\nmax_running = 3\n[engine]\ndtype = "float32"\n'
    config = parse_config(PLAIN + written, GrpoConfig)
    assert choose_for_platform(config, "GPU", "GPU") == (config, [])


@pytest.mark.parametrize(
    ("kind", "flags", "num_notices"), [("", "avx2", 2), ("", "avx2 avx512_bf16", 0), ("", "", 0), ("GPU", "avx2", 0)]
)
def test_bfloat16_on_a_cpu_without_its_products_is_noticed(
    kind: str, flags: str, num_notices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags : {flags}\n" if flags else "Features : bf16\n")
    monkeypatch.setattr(platform, "_CPU_INFO", info)
    config = parse_config(PLAIN, GrpoConfig, ["--engine.dtype=bfloat16", "--rollout.dtype=bfloat16"])
    notices = slow_formats(config, kind)
    assert [notice.partition(".")[0] for notice in notices] == ["engine", "rollout"][:num_notices]
    on_cpu = parse_config(PLAIN, GrpoConfig, ["--engine.dtype=bfloat16", "--engine.device=cpu"])
    assert len(slow_formats(on_cpu, "GPU")) == (flags == "avx2"), "the trainer computes here, wherever samples are made"


@pytest.mark.parametrize(
    ("device", "reserves", "kind"),
    [("auto", True, "GPU"), ("cuda:0", False, "GPU"), ("cpu", True, ""), ("xpu", False, "XPU")],
)
def test_where_it_samples_tells_the_kind(device: str, reserves: bool, kind: str) -> None:
    config = parse_config(f'{PLAIN}[rollout]\ndevice = "{device}"\n[engine]\ndevice = "cpu"\n', GrpoConfig)
    view = ClusterView(nodes=tuple(grid_nodes(1, 8)) if reserves else (), reserves=reserves)
    assert device_kinds(config, view) == (kind, "")
