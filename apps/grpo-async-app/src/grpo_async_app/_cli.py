"""The command line of `grpo-async-app`."""

import sys
from typing import NoReturn

from offbeat_core import list_settings
from offbeat_run import doing, run_command, show_usage

_PROGRAM = "grpo-async-app"
_USAGE = """\
Asynchronous GRPO: rollouts and training run at the same time, and every wait has a deadline.

  grpo-async-app quickstart [--seed N]      train a small model that is made on the spot; nothing to download
                 [--lesson NAME]            addition (the default), calculator (calls a tool) or agent (a program)
  grpo-async-app init                       write a first my.toml; asks in a terminal for what is not given
                 [--model M] [--data D]     a name of the Hugging Face Hub, or a path
                 [--reward R]               math_verify, exact_match, ..., or my_reward.py:score
                 [--out FILE]               another file than my.toml
  grpo-async-app train FILE                 train with the settings of a TOML file
                 [--shrink]                 rehearse it on a CPU: all sizes small, on a model that is made on the spot
  grpo-async-app plan FILE [--json]         show what a run would need and where its processes go; starts nothing
                 [--cluster 4x8]            for 4 nodes with 8 devices each, the nodes in a FILE, or "live" on Ray
                 [--fit NEW_FILE]           also write the recipe with the changes that make it fit
                 [--shrink]                 plan the rehearsal instead
  grpo-async-app slurm FILE                 write a batch script for Slurm: requeued and resumed by itself
                 [--cluster 4x8]            nodes and devices of each; else those of [cluster]
                 [--partition P] [--account A] [--time 24:00:00] [--container IMAGE] [--runs FOLDER] [--out FILE]
                 [--set "KEY=VALUE ..."]    other options of sbatch; KEY= leaves one of ours out
  grpo-async-app sky FILE --bucket NAME     write a task for SkyPilot
                 [--accelerator H100] [--cluster 4x8] [--image IMAGE] [--out FILE]
  grpo-async-app k8s FILE --image IMAGE     write a RayJob of KubeRay, or a Job where one node is enough
                 [--cluster 4x8] [--cpus N] [--memory 256Gi] [--resource NAME] [--storage 500Gi] [--out FILE]
  grpo-async-app import verl FILE           turn the options of a verl script or YAML file into a TOML file
                 [--out NEW_FILE]           (--out); also import trl, import openrlhf and import prime-rl
                 [--strict]                 exit with 4 if an option that changes the result is lost
  grpo-async-app resume RUN                 continue from the latest checkpoint in a run folder
  grpo-async-app save RUN                   write a checkpoint of a run that goes on
  grpo-async-app scale RUN --engines N      add or remove rollout engines during a run
  grpo-async-app where RUN [--json]         show which node runs which role: process, devices, state, policy version
  grpo-async-app eval RUN|MODEL             evaluate a checkpoint or any model folder, and write a table; continues an
                                            evaluation that was interrupted
                 [--set NAME,...]           only these: names of [eval.sets.NAME], or held-out
                 [--config FILE]            take the sets from this file
                 [--step N]                 use the checkpoint of update N instead of the best one
  grpo-async-app compare EVAL EVAL          compare two evaluations item by item
  grpo-async-app push RUN --push-to WHERE   copy the best checkpoint and its model card to a folder or hub:OWNER/NAME
                 [--step N]                 use the checkpoint of update N instead of the best one
  grpo-async-app report RUN [--serve PORT]  write report.html again, or serve it during a run
  grpo-async-app doctor [FILE]              show what is missing here, and for what; for what the settings in FILE need
                 [--all]                    every package with its version, and hardware that is not here
                 [--probe-engines FILE]     start engines with tensor parallel 1, 2, 4, ... on every node, and show
                                            where they stop working

  --out FOLDER           run folder of quickstart and train (default: runs/NAME-DATE)
  --push-to WHERE        with quickstart, train and resume: push when the run has ended
  --section.key VALUE    with quickstart, train, plan, resume, eval and doctor: set any key of the file, for example
                         --rollout.temperature 0.8
  --explain [KEY]        describe a key, a section or all, for example --explain async.staleness_threshold
  COMMAND --help         show one command; --version shows the version

exit codes: 0 success, 1 a bug, 2 a mistake in the command or its files, 3 the run failed, 4 the run stalled,
            130 interrupted"""


def main() -> NoReturn:
    """Run the command line."""
    run_command(_main, program=_PROGRAM)


def _everyday_settings() -> str:
    from grpo_async_app._config.everyday import EVERYDAY  # imported late: other help needs no configuration
    from grpo_async_app._config.sections import GrpoConfig

    return list_settings(GrpoConfig, EVERYDAY)


def _main() -> int:
    words = sys.argv[1:]
    if show_usage(words, _USAGE, _PROGRAM, settings=_everyday_settings, read_by=("quickstart", "train")):
        return 0
    doing("loading PyTorch")  # before that takes its seconds
    from grpo_async_app._commands.dispatch import dispatch  # imports torch by way of the objectives: not for --help

    return dispatch(words)
