"""The command line of `sft-app`."""

import sys
from typing import NoReturn

from offbeat_core import list_settings
from offbeat_run import doing, run_command, show_usage

_PROGRAM = "sft-app"
_USAGE = """\
Supervised fine-tuning, preferences (DPO, IPO, KTO, ORPO, SimPO) and reward models; full or LoRA, resumable.

  sft-app init                       write a first my.toml; asks in a terminal for what is not given
          [--model M] [--data D]     a name of the Hugging Face Hub, or a path
          [--loss L]                 sft, dpo, ipo, kto, orpo or simpo
          [--out FILE]               another file than my.toml
  sft-app train FILE                 train with the settings of a TOML file
          [--shrink]                 rehearse it on a CPU: all sizes small, on a model that is made on the spot
  sft-app plan FILE [--json]         show what a run would need; starts nothing
          [--cluster 2x8]            for 2 nodes with 8 devices each, the nodes in a FILE, or "live" on Ray
          [--fit NEW_FILE]           also write the recipe with the changes that make it fit
          [--shrink]                 plan the rehearsal instead
  sft-app slurm FILE                 write a batch script for Slurm: requeued and resumed by itself
          [--cluster 2x8]            nodes and devices of each; else those of [cluster]
          [--partition P] [--account A] [--time 24:00:00] [--container IMAGE] [--runs FOLDER] [--out FILE]
          [--set "KEY=VALUE ..."]    other options of sbatch; KEY= leaves one of ours out
  sft-app sky FILE --bucket NAME     write a task for SkyPilot
          [--accelerator H100] [--cluster 2x8] [--image IMAGE] [--out FILE]
  sft-app k8s FILE --image IMAGE     write a RayJob of KubeRay, or a Job where one node is enough
          [--cluster 2x8] [--cpus N] [--memory 256Gi] [--resource NAME] [--storage 500Gi] [--out FILE]
  sft-app import verl|trl FILE       turn the options of that framework into a TOML file (--out NEW_FILE); also
                                     trl-dpo, trl-kto, trl-orpo, trl-cpo and trl-reward, for these trainers of TRL
          [--strict]                 exit with 4 if an option that changes the result is lost
  sft-app resume RUN                 continue from the latest checkpoint in a run folder
  sft-app save RUN                   write a checkpoint of a run that goes on
  sft-app eval RUN                   loss (and rewards) of the best checkpoint on the held-out data
  sft-app push RUN --push-to WHERE   copy the best checkpoint and its model card to a folder or hub:OWNER/NAME
  sft-app report RUN [--serve PORT]  write report.html again, or serve it during a run
  sft-app doctor [FILE]              show what is missing here, and for what; for what the settings in FILE need
          [--all]                    every package with its version, and hardware that is not here

  --out FOLDER           run folder of train (default: runs/NAME-DATE)
  --push-to WHERE        with train and resume: push when the run has ended
  --section.key VALUE    with train, plan, resume, eval and doctor: set any key of the file, for example
                         --engine.lora_rank 16
  --profile.steps 3:6    with train and resume: trace updates 3, 4 and 5 for Perfetto
  --explain [KEY]        describe a key, a section or all, for example --explain engine.lora_rank
  COMMAND --help         show one command; --version shows the version

exit codes: 0 success, 1 a bug, 2 a mistake in the command or its files, 3 the run failed, 4 the run stalled,
            130 interrupted"""


def main() -> NoReturn:
    """Run the command line."""
    run_command(_main, program=_PROGRAM)


def _everyday_settings() -> str:
    from sft_app._config import EVERYDAY, SftConfig  # imported late: other help needs no configuration

    return list_settings(SftConfig, EVERYDAY)


def _main() -> int:
    words = sys.argv[1:]
    if show_usage(words, _USAGE, _PROGRAM, settings=_everyday_settings, read_by=("train",)):
        return 0
    doing("loading PyTorch")  # before that takes its seconds
    from sft_app._commands import dispatch  # imports torch: not for --help

    return dispatch(words)
