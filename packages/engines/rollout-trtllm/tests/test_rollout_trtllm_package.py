"""What the package promises before an engine is asked: light imports, its public names, and the README's examples."""

import asyncio
import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trtllm_peers import open_in

from offbeat_core import (
    BackendError,
    ConfigError,
    PeerFailedError,
    RolloutEngineConfig,
    RolloutEngineSettings,
    TensorSpec,
)
from offbeat_rollout_trtllm import TrtllmRolloutEngine, is_fp8_weight
from offbeat_rollout_trtllm._server_link import ServerLink
from offbeat_rollout_trtllm._versions import find_release
from offbeat_testing import tiny_model

LOOK = """
import sys
import offbeat_rollout_trtllm as package
assert package.SUPPORTED_VERSIONS
assert len(package.USES) > 10
sys.exit(", ".join(name for name in ("torch", "tensorrt_llm", "ray", "transformers") if name in sys.modules) or 0)
"""


SERVE = """
import sys
sys.modules |= dict.fromkeys(["offbeat_mesh", "offbeat_weightsync"])  # as if they were not installed
import offbeat_rollout_trtllm.serve
import offbeat_rollout_trtllm._handles
"""


@pytest.mark.nightly
def test_the_server_needs_nothing_that_wants_another_torch_than_the_container_s():
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_is_light():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_example_prints_what_was_sampled(start_engine, tmp_path, capsys):
    folder = tiny_model(tmp_path / "model")
    source = EXAMPLES[0].replace("504, 3575, 282", "10, 44, 81").replace("num_samples=8", "num_samples=2")
    source = source.replace("127.0.0.1:8000", start_engine(folder).address)
    names = {}
    exec(compile(source, "README.md", "exec"), names)
    asyncio.run(names["main"](str(folder)))
    printed = capsys.readouterr().out.splitlines()
    assert sum("VersionSegment(version=0" in line for line in printed) == 2


def test_the_second_example_names_what_there_is():
    names = {}
    exec(compile(EXAMPLES[1], "README.md", "exec"), names)
    assert callable(names["publish"])


def test_routers_tables_and_vision_models_stay_out_of_fp8(folder, tmp_path):
    layer = "model.layers.0.mlp."
    names = {"down_proj.weight": True, "gate_proj.weight": True, "experts.3.up_proj.weight": True, "gate.weight": False}
    assert {name: is_fp8_weight(TensorSpec(layer + name, "bfloat16", (256, 512))) for name in names} == names
    assert not is_fp8_weight(TensorSpec("lm_head.weight", "bfloat16", (256, 512)))
    seeing = tmp_path / "seeing"
    shutil.copytree(folder, seeing)
    config = json.loads((seeing / "config.json").read_text())
    (seeing / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    with pytest.raises(ConfigError, match="language alone"):
        TrtllmRolloutEngine(
            RolloutEngineConfig(model_path=str(seeing), options={"weights": "fp8_blocks"}),
            ServerLink("127.0.0.1:9", deadline_s=1),
            find_release("1.2.0"),
            functools.partial(open_in, tmp_path),
        )


def test_no_server_is_named_at_start(folder, tmp_path):
    config = RolloutEngineConfig(model_path=str(folder), options={"server": "127.0.0.1:9"})
    with pytest.raises(PeerFailedError, match=r"127\.0\.0\.1:9"):
        asyncio.run(TrtllmRolloutEngine.create(config))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sever": "x"}, "no option 'sever'"),
        ({"server": "somewhere"}, "host:port"),
        ({"weights": "fp4"}, "as_stored, fp8_blocks"),
        ({"bucket_bytes": 0}, ">= 64"),
        ({"reuse_blocks": 1}, "must be bool"),
    ],
)
def test_options_that_cannot_be_are_refused(folder, options, text):
    config = RolloutEngineConfig(model_path=str(folder), options=options)
    with pytest.raises(ConfigError, match=text):
        asyncio.run(TrtllmRolloutEngine.create(config))


def test_without_tensorrt_llm_the_error_says_where_it_runs(folder):
    with pytest.raises(BackendError, match="container"):
        asyncio.run(TrtllmRolloutEngine.create(RolloutEngineConfig(model_path=str(folder))))


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1", "1.2.3.post1"])
def test_listed_versions_are_taken(version):
    assert find_release(version).series == "1.2"


@pytest.mark.parametrize("version", ["1.1.0", "1.3.0", "1.2.0rc6", "1.20.0", "", "nightly"])
def test_versions_that_are_not_listed_are_refused_or_tried_on_request(version):
    with pytest.raises(BackendError, match=r"1\.2\.x"):
        find_release(version)
    assert find_release(version, allow_unlisted=True).series == "1.2"


def test_what_is_not_installed_is_said_with_what_is_possible_all_the_same():
    with pytest.raises(BackendError, match=r"options\.server alone; it comes with NVIDIA's"):
        TrtllmRolloutEngine.check_installed()
    with pytest.raises(BackendError, match=r"options\.server alone"):
        TrtllmRolloutEngine.check_installed(RolloutEngineSettings())
    TrtllmRolloutEngine.check_installed(RolloutEngineSettings(options={"server": "http://127.0.0.1:8000"}))


def test_a_plan_without_a_server_is_refused_where_torch_is_another_than_the_engine_s(monkeypatch):
    settings = RolloutEngineSettings(options={"kv_cache_fraction": 0.5})
    with pytest.raises(ConfigError, match=r"rollout\.options\.server must .* pins torch 2\.9 and here is torch 2\.1"):
        TrtllmRolloutEngine.notices_of(settings)
    for options in ({"server": "127.0.0.1:8000"}, {"allow_unlisted_version": True}):
        assert TrtllmRolloutEngine.notices_of(RolloutEngineSettings(options=options)) == []
    monkeypatch.setattr("offbeat_rollout_trtllm._versions.metadata.version", lambda name: "2.9.1+cu130")
    assert TrtllmRolloutEngine.notices_of(settings) == []
