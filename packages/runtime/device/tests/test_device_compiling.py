"""Compiled functions are kept safely."""

import os
import shutil
import stat

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from offbeat_device import _compiling, compiled, prepare_compiler


@pytest.mark.parametrize("is_imported", [False, True], ids=["", "torch has set its own folder"])
def test_compiled_code_is_kept_where_the_user_alone_can_write(is_imported, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    if not is_imported:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepare_compiler()
    folder = tmp_path / "offbeat" / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_the_user_has_chosen_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    prepare_compiler()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


def test_a_home_that_cannot_be_written_to_does_not_forbid_compiling(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    monkeypatch.setattr(_compiling.tempfile, "tempdir", str(tmp_path))
    prepare_compiler()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "offbeat-compiled-"))


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
def test_no_pickles_are_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    assert torch.equal(compiled(lambda x: x * 2 + 1)(torch.ones(3)), torch.full((3,), 3.0))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} <= {".py", ".cpp", ".so", ".h", ".gch", ".lock"}, "pickles would be read"
