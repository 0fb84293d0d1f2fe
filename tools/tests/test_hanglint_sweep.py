"""hanglint over a whole environment ends well; the sweep notices where it does not."""

import sys
import sysconfig
from pathlib import Path

import hanglint_sweep
import pytest
from hanglint_sweep import sweep_one, table, targets


def test_a_sweep_counts_what_it_ran_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "one" / "a.py").write_text(
        "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    (tmp_path / "one" / "b.py").write_text("no python")
    (tmp_path / "two.py").write_text("a = 1\n")
    (tmp_path / "two.txt").write_text("")
    swept = [sweep_one(path) for path in targets(tmp_path)]
    assert [(each.name, each.num_files, each.num_unreadable, each.failure) for each in swept] == [
        ("one", 1, 1, ""),
        ("two.py", 1, 0, ""),
    ]
    assert swept[0].num_findings >= 1
    assert all(0 < each.cpu_s < 30 and each.peak_bytes > 1e6 for each in swept)
    assert "all 2" in table(swept, 5)
    assert hanglint_sweep.main([str(tmp_path)]) == 0
    assert "two.py" in capsys.readouterr().out


def test_a_run_that_does_not_end_well_fails_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "broken").write_text("#!/bin/sh\nkill -SEGV $$\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "broken"))
    assert sweep_one(tmp_path / "a.py").failure.startswith("exit code -11")
    assert hanglint_sweep.main([str(tmp_path)]) == 1
    monkeypatch.setattr(sys, "executable", "/bin/cat")
    assert sweep_one(tmp_path / "a.py").failure


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_it_ends_well_on_every_file_of_this_environment(capsys: pytest.CaptureFixture[str]) -> None:
    swept = [sweep_one(path) for path in targets(Path(sysconfig.get_path("purelib")))]
    with capsys.disabled():
        print(f"\n{table(swept, 12)}")
    assert {each.name: each.failure for each in swept if each.failure} == {}
    assert sum(each.num_lines for each in swept) > 1_000_000
    assert max(each.peak_bytes for each in swept) < 1 << 30
