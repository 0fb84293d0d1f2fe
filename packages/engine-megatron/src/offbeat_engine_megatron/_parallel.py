"""How the ranks share a model: sizes along each axis, and which of them cannot be. Pure: no torch, no processes."""

from collections.abc import Mapping
from dataclasses import dataclass

from offbeat_engine_megatron._options import MegatronEngineOptions
from offbeat_engine_megatron._shape import ModelShape
from offbeat_types import ConfigError

_OPTION_OF = {"tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes of the axes; vpp is the number of model parts per rank, sp whether tokens are cut between layers."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    sp: bool = False

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def sequence_multiple(self) -> int:
        """Each sequence of a pack is padded to a multiple of this: two chunks for every context parallel rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Each pack is padded to a multiple of this."""
        return self.sequence_multiple * (self.tp if self.sp else 1)

    def in_megatrons_words(self) -> dict[str, int | bool]:
        """As megatron's command line names them: what a device's patches of megatron-core are told."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "sequence_parallel": self.sp,
            "use_flash_attn": True,
        }


def choose_parallel(axes: Mapping[str, int], options: MegatronEngineOptions) -> Parallel:
    """Sizes from a mesh's axes and the options.

    A mesh with dp alone is so many ranks, and the options say how they are used; a mesh with other axes says it
    itself, and options that say otherwise are refused.

    Args:
        axes: dp, cp, tp, pp and ep of the mesh.
        options: of the engine.

    Raises:
        ConfigError: they contradict each other, do not divide the ranks, or megatron-core computes them wrongly.
    """
    asked = {axis: getattr(options, name) for axis, name in _OPTION_OF.items()}
    given = {axis: axes[axis] for axis in _OPTION_OF}
    if any(size > 1 for size in given.values()):
        wrong = [axis for axis in given if asked[axis] not in (1, given[axis])]
        if wrong:
            axis = wrong[0]
            raise ConfigError(
                f"the mesh has {axis} = {given[axis]} and option {_OPTION_OF[axis]} = {asked[axis]}: say it once"
            )
        sizes, dp = given, axes["dp"]
    else:
        sizes, dp = asked, _left_over(axes["dp"], asked)
    parallel = Parallel(**sizes, dp=dp, vpp=options.virtual_pipeline, sp=sizes["tp"] > 1 and options.sequence_parallel)
    _check_experts(parallel)
    _check_pipeline(parallel, options)
    _check_overlap(options)
    return parallel


def _left_over(num_ranks: int, asked: Mapping[str, int]) -> int:
    used = asked["tp"] * asked["cp"] * asked["pp"]
    if num_ranks % used:
        raise ConfigError(
            f"tensor_parallel · context_parallel · pipeline_parallel = {asked['tp']} · {asked['cp']} · {asked['pp']} "
            f"must divide the ranks: got {num_ranks}; choose engine.num_ranks = {used} or a multiple of it"
        )
    return num_ranks // used


def _check_experts(parallel: Parallel) -> None:
    stage = parallel.dp * parallel.cp * parallel.tp
    if stage % parallel.ep:
        raise ConfigError(
            f"expert_parallel must divide the {stage} ranks of a pipeline stage: got {parallel.ep}; "
            f"choose one of {', '.join(str(n) for n in range(1, stage + 1) if stage % n == 0)}"
        )
    if parallel.ep > 1 and parallel.tp > 1 and not parallel.sp:
        raise ConfigError(
            "experts with tensor_parallel > 1 need sequence_parallel = true: without it each rank of tp "
            "would send the same tokens to the experts"
        )


def _check_pipeline(parallel: Parallel, options: MegatronEngineOptions) -> None:
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ConfigError(
            f"virtual_pipeline = {parallel.vpp} interleaves the stages of a pipeline: pipeline_parallel is 1"
        )
    if options.overlap_p2p and (parallel.vpp == 1 or options.batch_p2p):
        raise ConfigError(
            "overlap_p2p needs virtual_pipeline > 1 and batch_p2p = false: the plain schedule waits for "
            "each stage, and batched calls cannot overlap"
        )
    if parallel.vpp > 1 and options.batch_p2p and parallel.pp == 2:
        raise ConfigError(
            "virtual_pipeline > 1 on 2 stages with batch_p2p = true computes wrong results in megatron-core: with two "
            "stages the one before is also the one after, and a batch does not tell their messages apart; set "
            "batch_p2p = false"
        )


def _check_overlap(options: MegatronEngineOptions) -> None:
    if options.overlap_param_gather and not (options.distributed_optimizer and options.overlap_grad_reduce):
        raise ConfigError("overlap_param_gather needs distributed_optimizer = true and overlap_grad_reduce = true")


def check_model_fits(shape: ModelShape, parallel: Parallel) -> None:
    """Refuse a model that the ranks cannot share evenly.

    Raises:
        ConfigError: with the first thing that does not divide, and what would.
    """
    tp, stages = parallel.tp, parallel.pp * parallel.vpp
    what = [
        ("num_attention_heads", shape.num_heads, "tensor_parallel", tp),
        ("num_key_value_heads", shape.num_groups, "tensor_parallel", tp),
        ("intermediate_size", shape.ffn_size, "tensor_parallel", tp),
        ("vocab_size", shape.vocabulary, "tensor_parallel", tp),
        ("num_hidden_layers", shape.num_layers, "pipeline_parallel · virtual_pipeline", stages),
    ]
    if shape.num_experts:
        what.append(("num_experts", shape.num_experts, "expert_parallel", parallel.ep))
    for name, value, option, size in what:
        if value % size:
            raise ConfigError(
                f"{option} must divide the model's {name} = {value}: got {size}; "
                f"choose one of {', '.join(str(n) for n in range(1, value + 1) if value % n == 0)[:60]}"
            )
    if shape.deepstack > shape.num_layers // stages:
        raise ConfigError(
            f"DeepStack of {shape.family} adds what the vision tower sees to the first {shape.deepstack} layers, which "
            f"must lie beside it: pipeline_parallel · virtual_pipeline = {stages} leaves {shape.num_layers // stages} "
            "there; set both to 1"
        )
    if parallel.ep > 1 and not shape.num_experts:
        raise ConfigError(f"expert_parallel = {parallel.ep}: the model ({shape.family}) has no experts; set it to 1")
    if shape.num_experts and parallel.tp > 1 and not parallel.sp:
        raise ConfigError("experts with tensor_parallel > 1 need sequence_parallel = true")
