"""Importing the package, and asking for its table of versions, imports neither torch nor an engine."""

import subprocess
import sys

LOOK = """
import sys
import offbeat_rollout_trtllm as package
package.find_release("1.2.0")
assert len(package.USES) > 10
sys.exit(", ".join(name for name in ("torch", "tensorrt_llm", "ray", "transformers") if name in sys.modules) or 0)
"""


SERVE = """
import sys
sys.modules |= dict.fromkeys(["offbeat_mesh", "offbeat_weightsync"])  # as if they were not installed
import offbeat_rollout_trtllm.serve
import offbeat_rollout_trtllm._handles
"""


def test_the_server_needs_nothing_that_wants_another_torch_than_the_container_s():
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_is_light():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    import offbeat_rollout_trtllm

    assert offbeat_rollout_trtllm.__all__ == sorted(offbeat_rollout_trtllm.__all__, key=_constants_first)
    assert all(getattr(offbeat_rollout_trtllm, name) for name in offbeat_rollout_trtllm.__all__)


def _constants_first(name):
    """The order that ruff keeps: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
