"""A script of another framework is followed as bash follows it, and what it starts is looked at."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from offbeat_core import ConfigError, load_config
from offbeat_recipes._imports.options import read_program
from offbeat_recipes._imports.shell.reading import read_shell
from offbeat_run import CommandWords


def overrides(text: str) -> Mapping[str, str]:
    """Of the first command of a script."""
    return read_program(read_shell(text).commands[0]).options


def test_words_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f'touch {mark}\nn=$(touch {mark})\npython -m verl.main a.b="$n" a.c=$(touch {mark}) a.d=1\n'
    assert overrides(text)["a.d"] == "1"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run a.b=$HOME/data", "${HOME}/data"),
        ("X=1\nif [ $Y ]; then\n  X=2\nfi\nrun a.b=$X", "1"),
        ("run a.b=${X}", "${X}"),
        ("X=$X\nrun a.b=$X", "${X}"),
        ("run a.b=1 ++a.b=2", "2"),
    ],
)
def test_what_bash_does_not_decide_is_read(text: str, value: str) -> None:
    """The rest is compared with bash."""
    assert overrides(text)["a.b"] == value


# Each starts `run` with words; options of several kinds stand in arrays, in texts, in functions and in branches.
SCRIPTS = [
    'A="a.b=1 \\\n  c.d=\'x y\'\n  e.f=$((2 + 3))"\nrun $A "$A"',
    "X=\nrun a.b=${X:-512} c.d=${X-512} e.f=${Y:=7} g.h=$Y i.j=${X:+set} k.l=${Y:+set}",
    "A=(a.b=1)\nA+=(c.d=2 # told\n  e.f='3 4')\nB=(x.y=1)\nB=(x.y=2)\n"
    'run "${A[@]}" ${B[*]} "g.h=${A[*]}" i.j=${#A[@]} k.l=${A[1]}',
    'D=gpu\nif [ "$D" = tpu ]; then A=(a.b=1); X=1;'
    ' elif [[ $D == g* && ! $D == *x ]]; then A=(a.b=2); else A=(a.b=3); fi\nrun "${A[@]}"',
    'D=${D:-b}\ncase "$D" in a) X=1 ;; b|c) X=2;; *) X=3 ;; esac\nrun a.b=$X',
    "N=8; M=$((N / 3 * 2 - 1 + (N > 4)))\n(( N > 4 )) && X=big || X=small\nrun a.b=$M c.d=$X e.f=$((M%2))",
    "P=/models/Qwen3-8B.tar.gz\nrun a.b=${P##*/} c.d=${P%%.*} e.f=${P%.gz} "
    "g.h=${P/Qwen/Q} i.j=${P^^} k.l=${P:1:6} m.n=${#P}",
    "run a.b=1 \\\n  c.d=2 # e.f=3\nrun g.h=4 `# i.j=5` \\\n  k.l=exp#3",
    'run a.b=\'["x","y"]\' c.d="[\'$HOME/a\']" e.f=[1,2] g.h="a \\"b\\" \\$c" i.j=a\\ b k.l=$\'m\\tn\'',
    'start() {\n  local n=$1; shift\n  run a.b=$n "$@"\n}\nstart 3 c.d=4 "e.f=5 6"',
    "for lr in 1e-6 2e-6 3e-6; do [ $lr = 3e-6 ] && break; run a.b=$lr; done",
    'set -- a.b=1 c.d=2\nrun "$@" e.f=$# g.h=$2',
    "cat <<EOF\nX=1 a.b=9\nEOF\nX=2\nrun a.b=$X 2>&1 | tee log.txt",
    'X=~/data\nrun a.b=$X c.d=~/data e.f="~" g.h=$(basename /a/b.sh .sh) i.j=$(echo k $X)',
    'A=1 B=2 run a.b=1\nexport X=3 Y="4 5"\nrun a.b=$X c.d="$Y" e.f=$Y',
    "false && run a.b=1\ntrue || run a.b=2\n! false && run a.b=3; { run a.b=4; }\nX=4\n"
    "(X=5; run a.b=$X; exit 1); run a.b=$X",
    'N=a.b=1\nif [ -z "$N" ] || [ ${#N} -gt 4 -a "$N" != x ]; then run $N; fi; [[ $N =~ ^a ]] && run c.d=1',
    "declare -A M=([s]=1 [l]=2)\nk=l\nrun a.b=${M[$k]}\nV=k; run a.b=${!V}",
    'eval "run a.b=1 c.d=$((1 + 1))"\nX=2\nwhile [ $X -gt 0 ]; do X=$((X - 1)); done\nrun a.b=$X',
    "run a.b=1 \\ \n  c.d=2",
    "A=7; B=3\n((A += 2)); ((B++)); let C=A*B; ((D = A - B)); ((--A))\nrun a.b=$A c.d=$B e.f=$C g.h=$D\n"
    "((E=0)) || run a.b=$((B == 4))",
    "P=/a/b/c.tar.gz\nrun a.b=${P//\\//_} c.d=${P/\\/a/} e.f=${P/#\\/a/z} g.h=${P/%gz/xz} i.j=${P//[bc]/-} k.l=${P//.}",
    'A=(x y z w)\nrun a.b=1 "${A[@]:1}" ${A[@]:1:2} "${A[@]/#/p.q=}" "${A[@]%z}" ${A[@]+"${A[@]}"}\n'
    'f() { run "$@" "${@:2}" ${@:1:1}; }\nf a.b=1 c.d=2 e.f=3',
    "for x in 1 2 3; do if [ $x = 2 ]; then continue; fi; run a.b=$x; done\n"
    "n=0; while [ $n -lt 4 ]; do n=$((n+1)); [ $n = 2 ] && continue; run c.d=$n; done",
    "X=abc.tar\n[[ $X == a*[b-d]?tar ]] && run a.b=1\n[[ $X =~ ^([a-c]+)\\.tar$ ]] && run a.b=2\n"
    '[[ $X == "a*" ]] || run a.b=3\ncase $X in *.gz|*.t?r) run a.b=4;; esac; [[ $X == *[!x] ]] && run a.b=5',
    'D=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\nrun a.b="$D/data" c.d=$(realpath $(dirname $0)/../y) '
    'e.f=$(basename "$0") g.h=$"q r"',
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_gives_the_words_that_bash_gives(script: str, tmp_path: Path) -> None:
    (tmp_path / "hooks").write_text("run() { printf '%s\\0' run \"$@\"; printf '\\1'; } >&3\n")
    (tmp_path / "script").write_text(script)
    command = ["bash", "-c", 'exec 3>"$1"; shift; bash "$@"', "-", str(tmp_path / "words"), str(tmp_path / "script")]
    environment = {"BASH_ENV": str(tmp_path / "hooks"), "HOME": "/home/user", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, env=environment, cwd=tmp_path, check=False, capture_output=True, timeout=60)
    calls = (tmp_path / "words").read_text().split("\1")[:-1]
    expected = [call.split("\0")[:-1] for call in calls]
    assert expected
    assert read_shell(script, {"HOME": "/home/user"}, str(tmp_path / "script")).commands == expected


def test_what_only_the_machine_decides_is_listed_and_what_was_set_before_stands() -> None:
    reading = read_shell(
        "N=8\nA=(a.b=1)\nif [ -f /etc/tpu ]; then N=16; A+=(c.d=2); UNUSED=1; fi\n"
        'case "$DEVICE" in gpu) T=1 ;; tpu) T=2 ;; esac\n[ "$DEVICE" = gpu ] && T=$((T + 4))\n'
        'source env.sh\nrun x.y=$N x.z=$T "${A[@]}"\nc.d=5\n'
    )
    assert reading.commands == [["run", "x.y=8", "x.z=5", "a.b=1"]]
    assert reading.undecided == [
        "[ -f /etc/tpu ]: N = 8 is assumed, not 16, c.d=2 is left out",
        'case "$DEVICE" in gpu) T=1 ;; tpu) T=2 ;; esac: DEVICE = gpu is assumed',
    ]
    assert reading.not_understood[0] == "source env.sh: what it sets is not read"
    assert reading.not_understood[1].startswith("c.d=5: stands in no command")
    given = read_shell('case "$DEVICE" in gpu) T=1 ;; tpu) T=2 ;; esac\nrun a.b=$T', {"DEVICE": "tpu"})
    assert (given.commands, given.undecided) == ([["run", "a.b=2"]], [])


def test_an_unfinished_quote_is_told_and_the_rest_is_read() -> None:
    reading = read_shell("run a.b=1\nX=$(unfinished\nrun c.d=2\n")
    assert reading.commands == [["run", "a.b=1"], ["run", "c.d=2"]]
    assert reading.not_understood == ["X=$(unfinished"]


# Options of verl's run of fully asynchronous GRPO on geo3k, in texts that are expanded unquoted as there.
# Source: verl 1dda039, verl/experimental/fully_async_policy/shell, the script that its PR 6006 brought; a part.
IN_TEXTS = """
mode=async
raw=False
if [ "$mode" = "async" ]; then raw=True; fi
DATA="
    data.train_files=${HOME}/data/geo3k/train.parquet \\
    data.train_batch_size=0 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=2048 \\
    data.return_raw_chat=${raw}"
ACTOR="
    actor_rollout_ref.model.path=${HF_MODEL_PATH:-"/models/Qwen3-VL-8B-Instruct"} \\
    actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.strategy=fsdp2 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.max_model_len=32768 \\
    actor_rollout_ref.rollout.max_num_batched_tokens=32768"
REST="
    algorithm.adv_estimator=grpo \\
    algorithm.rollout_correction.rollout_is=sequence \\
    algorithm.rollout_correction.rollout_rs=token_k1 \\
    algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=16 \\
    rollout.n_gpus_per_node=16 \\
    rollout.total_rollout_steps=$(( 512 * 100 )) \\
    trainer.save_freq=10 \\
    async_training.staleness_threshold=0.1 \\
    async_training.trigger_parameter_sync_step=4 \\
    async_training.require_batches=2 \\
    async_training.partial_rollout=True"
python3 -m verl.experimental.fully_async_policy.fully_async_main --config-path=config \\
    --config-name='fully_async_ppo_trainer.yaml' $DATA $ACTOR $REST
"""


def test_options_that_stand_in_texts_become_a_run_with_its_own_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    (tmp_path / "run.sh").write_text(IN_TEXTS)
    target = tmp_path / "run.toml"
    assert import_command(CommandWords(options={"out": str(target)}), "verl", str(tmp_path / "run.sh")) == 0
    config = load_config(target, GrpoConfig)
    assert (config.model.path, config.data.path) == (
        "/models/Qwen3-VL-8B-Instruct",
        "/home/user/data/geo3k/train.parquet",
    )
    policy = config.async_
    assert (policy.mini_batch_size, policy.require_batches, policy.trigger_parameter_sync_step) == (64, 2, 4)
    assert (policy.staleness_threshold, policy.partial_rollout) == (0.1, True)
    assert (config.engine.num_ranks, config.rollout.num_engines, config.rollout.tensor_parallel) == (16, 16, 1)
    assert (config.engine.max_updates, config.checkpoint.every, config.log.trackers) == (400, 40, ("wandb",))
    assert config.rollout.options == {"max_num_batched_tokens": 32768}
    algorithm = config.algorithm
    assert (algorithm.correction, algorithm.rs_low, algorithm.rs_high) == ("sequence_tis_token_rs", 1 / 1.6, 1 / 0.6)
    assert (config.rollout.samples_per_prompt, algorithm.kl_coefficient, config.cluster.colocate) == (4, 0.01, False)


@pytest.mark.parametrize(
    ("framework", "text", "said"),
    [
        ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x model.lora_rank=8", "is SFT"),
        ("verl", "python -m recipe.spin.main_spin data.train_files=x actor_rollout_ref.model.path=x", "SPIN"),
        ("verl", "python -m verl.trainer.main_generation data.path=x model.path=y", "generation without training"),
        ("verl", "run data.train_files=x tool.schema=y", "is something else"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_sft --data.max_len 9", "not openrlhf.cli.train_ppo_ray"),
        ("openrlhf", "python -m openrlhf.cli.train_ppo_ray --max_len 9", "names no model"),
        ("trl", "model_name_or_path: m\npacking: true", "is SFT"),
        ("trl", "beta: 0.1\nloss_type: [sigmoid, sft]\nmax_length: 9", "is DPO"),
        ("trl", "desirable_weight: 1.0\nbeta: 0.1", "is KTO"),
        ("trl", "num_generations: 4\nnormalize_advantages: true", "is RLOO"),
        ("trl", "num_ppo_epochs: 4\nvf_coef: 0.1", "is PPO with a critic, not GRPO: write a file with"),
        ("trl", "datasets: [{path: x}]", "is a mixture of data sets"),
        ("trl", "learning_rate: 1.0", "give a GRPOConfig"),
    ],
)
def test_what_is_no_run_to_import_is_refused_in_one_line(framework: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / ("run.yaml" if framework == "trl" else "run.sh")
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        import_command(CommandWords(options={"out": str(tmp_path / "run.toml")}), framework, str(path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run.toml").exists()


def test_a_configuration_that_is_named_and_words_that_are_no_options_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        'case "$DEVICE" in gpu) N=8 ;; tpu) N=16 ;; esac\npython -m verl.trainer.main_generation data.path=x\n'
        "ray job submit -- python3 -m recipe.own.main_own --config-name=own_grpo trainer.n_gpus_per_node=$N "
        "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m $EXTRA data.train_files=/d stray\n"
    )
    (tmp_path / "run.sh").write_text(script)
    words = CommandWords(options={"out": str(tmp_path / "run.toml"), "set": "DEVICE=tpu"})
    assert import_command(words, "verl", str(tmp_path / "run.sh")) == 0
    output, text = capsys.readouterr().out, (tmp_path / "run.toml").read_text()
    for line in (
        "recipe.own.main_own: not known, read as verl.trainer.main_ppo",
        "--config-name=own_grpo: what this file sets is not read; verl's defaults stand",
        "${EXTRA}: unknown here, and so are the options it holds",
        "stray: no option",
        "verl.trainer.main_generation: another command, not read",
    ):
        assert line in output
        assert line in text
    assert "num_ranks = 16" in text
    assert "not decided" not in output
    with pytest.raises(ConfigError, match="DEVICE=gpu"):
        import_command(CommandWords(options={"set": "tpu"}), "verl", str(tmp_path / "run.sh"))


# Source: OpenRLHF 3c3be62, examples/scripts/train_reinforce_baseline_ray_agent_async.sh; a part of its options.
OPENRLHF = """
SAVE="$(cd "$(dirname "$0")" && pwd)/exp"
ROLLOUT=(
   --data.prompt_dataset zhuzilin/dapo-math-17k
   --data.label_key label   # the answer
   --data.max_len 74240
   --rollout.max_new_tokens 64000
   --rollout.batch_size 256
   --rollout.n_samples_per_prompt 8
   --train.batch_size 1024
   --algo.dynamic_filtering_range 0.0 1.0
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-4B ${ROLLOUT[@]} \\
   --train.async_enable --train.partial_rollout_enable --actor.num_gpus_per_node 4 --vllm.num_engines 2 \\
   --vllm.tensor_parallel_size 2 --vllm.enforce_eager --ckpt.path ${SAVE} --ckpt.save_steps 10 --eval.steps -1 \\
   --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2 \\
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop --ds.ring_attn_size 2
"""


def test_a_command_line_of_openrlhf_becomes_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(OPENRLHF)
    target = tmp_path / "run.toml"
    assert import_command(CommandWords(options={"out": str(target)}), "openrlhf", str(tmp_path / "run.sh")) == 0
    config = load_config(target, GrpoConfig)
    policy = config.async_
    assert (policy.mini_batch_size, policy.require_batches, policy.staleness_threshold) == (128, 2, 1)
    assert (policy.partial_rollout, config.cluster.colocate, config.checkpoint.every) == (True, False, 10)
    assert (config.engine.num_ranks, config.rollout.num_engines, config.rollout.tensor_parallel) == (4, 2, 2)
    assert (config.data.max_prompt_tokens, config.rollout.max_tokens) == (10240, 64000)
    assert (config.engine.schedule, config.engine.min_learning_rate_ratio) == ("cosine", 0.1)
    assert config.rollout.options == {"gpu_memory_utilization": 0.95, "enforce_eager": True}
    algorithm = config.algorithm
    assert (algorithm.correction, algorithm.rs_low, algorithm.rs_high) == ("icepop", 0.5, 5.0)
    assert (algorithm.advantage, algorithm.kl_coefficient, algorithm.kl_estimator) == ("grpo", 1e-5, "k2")
    output = capsys.readouterr().out
    assert "ds.ring_attn_size = 2" in output
    assert "train.batch_size = 1024: counts completions there: 128 prompts" in output
    assert "not understood" not in output
