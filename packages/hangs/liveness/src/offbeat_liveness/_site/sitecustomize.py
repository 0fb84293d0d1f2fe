# mypy: ignore-errors
# No annotations: this runs in every Python process below the wrapper, and typing is not worth an import there.
"""Python runs this at the start of each process that inherits our PYTHONPATH; it turns the watch on where it is needed.

Costs about 0.1 ms: nothing is imported and no thread is started before the process itself calls
torch.distributed.init_process_group.
"""

import functools
import sys
from importlib._bootstrap import module_from_spec
from importlib.machinery import PathFinder
from os.path import abspath, dirname

TARGET = "torch.distributed.distributed_c10d"
HERE = dirname(abspath(__file__))


class Finder:
    """Finds torch.distributed once, and hooks it after it has been loaded."""

    def find_spec(self, name, path=None, target=None):
        """Find the module as the other finders would, with a loader that hooks it."""
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def execute_and_hook(module):
            execute(module)
            hook(module)

        spec.loader.exec_module = execute_and_hook
        return spec


def hook(module):
    """Let init_process_group turn the watch on first."""
    init = module.init_process_group

    @functools.wraps(init)
    def init_process_group(*args, **named):
        start_watch()
        return init(*args, **named)

    module.init_process_group = init_process_group


def start_watch():
    """Settings come from the environment that the wrapper has filled in."""
    try:
        import offbeat_liveness as liveness
    except ImportError as error:  # another interpreter, without offbeat
        print(f"offbeat liveness: {sys.executable} is not watched: {error}", file=sys.stderr)
    else:
        liveness.watch()


def run_theirs():
    """Run the sitecustomize that this one stands before, if there is one."""
    path = [each for each in sys.path if abspath(each or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Finder())
run_theirs()
