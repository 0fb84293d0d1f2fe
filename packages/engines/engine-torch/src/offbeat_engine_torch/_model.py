"""Loads a Hugging Face causal language model, and refuses what the engine could not train faithfully."""

import json
import re
import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as hf_logging

from offbeat_core import ModelError
from offbeat_engine_torch._formats import hold_biases_as_buffers, route_as_the_family
from offbeat_engine_torch._layers.attention import ATTENTION_NAME, register_attention
from offbeat_engine_torch._layers.context import PackShare
from offbeat_engine_torch._layers.exchange import here
from offbeat_engine_torch._layers.experts import EXPERTS_NAME, register_experts
from offbeat_engine_torch._layers.norm import fuse_norms
from offbeat_engine_torch._layers.plan import AttentionPlan, to_device
from offbeat_engine_torch._layers.recurrence import DELTA_RULE_FAMILIES, pack_recurrence
from offbeat_engine_torch._layers.replay import Routing
from offbeat_engine_torch._layers.vision import ImagePatches, VisionFamily, find_vision
from offbeat_engine_torch._mxfp4 import decoding, forget_mxfp4, settle_decoded
from offbeat_training import Indices, VocabularyPart, token_logprobs

ADAPTER_SIDES = (".lora_A", ".lora_B")
SCORE_WEIGHT = "score.weight"
"""Weight of the classification head that transformers puts on causal families."""
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SCALING_IS_A_FACTOR = {"hyperclovax"}
_ATTENTION = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


@dataclass(frozen=True, kw_only=True)
class HeadQuery:
    """Loss tokens of a pack that the vocabulary head is asked for, and how it computes them.

    Args:
        predictor_N: packed index of the token whose hidden state predicts each loss token; on the host, like the next.
        target_N: id of each loss token.
        temperature: the sampler's.
        coarse: compute the logits in bfloat16. (The products of gradients are in the format of the backbone's.)
        entropy_gradient: let gradient flow through the entropy.
        fused: compile what is done to logits.
    """

    predictor_N: Indices
    target_N: Indices
    temperature: float = 1.0
    coarse: bool = False
    entropy_gradient: bool = False
    fused: bool = False


class CausalModel(nn.Module):
    """A transformers model and what the engine asks of it, in one module: its forward never makes all logits.

    Head and backbone are called from one forward pass, so that sharding the whole (FSDP2) finds every parameter in
    place there.

    Args:
        whole: the transformers model.
        logit_scale: factor the model puts on its logits.
        logit_cap: soft cap that it puts on them; None for none.
        vision: what its family adds to a language model; None for a model of text alone.
        scores: the head gives one score instead of logits: see `TrainEngineConfig.head`.

    Attributes:
        part: which rows of the head are here; None for all.
        context: how ranks share the tokens of a pack; None where this rank computes all of them.
        routing: the routers of a mixture of experts.
        exact: format of the products of exact numerics; None for native ones.
    """

    def __init__(
        self,
        whole: Any,
        logit_scale: float,
        *,
        logit_cap: float | None = None,
        vision: VisionFamily | None = None,
        scores: bool = False,
    ) -> None:
        super().__init__()
        self.scores, self.vision = scores, vision
        self.exact: torch.dtype | None = None
        self.part: VocabularyPart | None = None
        self.context: PackShare | None = None
        self.routing = Routing(whole)
        self.whole: Any = whole
        self.logit_scale, self.logit_cap = logit_scale, logit_cap

    @property
    def backbone(self) -> nn.Module:
        """Ids to hidden states, within `whole`."""
        backbone: nn.Module = getattr(self.whole, self.whole.base_model_prefix)
        return backbone

    @property
    def decoder(self) -> nn.Module:
        """The part of `backbone` that reads embeddings: all of it but the tower."""
        decoder: nn.Module = getattr(self.backbone, "language_model", self.backbone)
        return decoder

    @property
    def head(self) -> nn.Linear:
        """Hidden states to logits, or to the score, within `whole`."""
        head: nn.Linear = self.whole.score if self.scores else self.whole.get_output_embeddings()
        return head

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        return self.whole.get_input_embeddings().num_embeddings if self.scores else self.head.out_features

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.whole.config.get_text_config().num_attention_heads)

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Let the decoder attend as transformers writes it down for its family, on one sequence at a time."""
        config = self.whole.config
        config._attn_implementation = {**_ATTENTION, "": "eager", "text_config": "eager"}
        try:
            yield
        finally:
            config._attn_implementation = _ATTENTION

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor | None = None,
        plan: AttentionPlan | None = None,
        kernel: str = "rows",
        query: HeadQuery | None = None,
        autocast: torch.dtype | None = None,
        patches: ImagePatches | None = None,
        routes_LKT: Tensor | None = None,
        *,
        replays: bool = True,
    ) -> Any:
        """[N] log-probabilities and [N] entropies of the loss tokens asked for; [T, E] hidden states for None.

        With routes a third [N]: `Routing.differing` of the token that predicts each. Of a model that scores: [N] scores
        and zeros. Of ids alone it gives the [T, V] logits of the transformers model itself ([T, 1] scores).

        Args:
            ids_T: token ids of one pack.
            positions_T: position of each in its own sequence; [3, T] where a position has three axes. None for the
                model's own logits.
            plan: which tokens attend to which.
            kernel: of the packed attention.
            query: what the head computes.
            autocast: format of the backbone's matrix products, and of those of the head's gradients; None for that of
                the weights.
            patches: of the pack's images; None where no rank has one in this micro-batch.
            routes_LKT: see `Routing.follow`.
            replays: see there.
        """
        computing = torch.autocast(ids_T.device.type, dtype=autocast) if autocast else nullcontext()
        if positions_T is None:
            with computing:
                if self.scores:  # transformers' own forward pass scores the last token alone
                    seen = self.backbone(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
                    return functional.linear(seen, here(self.head.weight)).float()
                if self.vision is not None:
                    return self.vision.logits(ids_T).float()
                logits_TV: Tensor = self.whole(input_ids=ids_T[None], use_cache=False).logits[0]
            return logits_TV.float()
        if self.context is None or plan is None:
            self.routing.follow(routes_LKT, replays=replays)
            return self._ask(ids_T, positions_T, plan, kernel, query, autocast, patches)
        cut = self.context.cut(ids_T, positions_T, plan, query, routes_LKT)
        self.routing.follow(cut.routes_LKt, replays=replays)
        if patches is not None:
            patches = replace(patches, run=cut.run)
        return cut.join(self._ask(cut.ids_t, cut.positions_t, cut.plan, kernel, cut.query, autocast, patches))

    def _ask(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan | None,
        kernel: str,
        query: HeadQuery | None,
        autocast: torch.dtype | None,
        patches: ImagePatches | None,
    ) -> Any:
        """Answer for tokens that are here: see `forward`."""
        rounds = autocast is not None and self.exact is None
        computing = torch.autocast(ids_T.device.type, dtype=autocast) if rounds else nullcontext()
        packed = plan.arguments(kernel) if plan is not None else {}
        rest = {"position_ids": positions_T.unsqueeze(-2), "use_cache": False, **packed}
        with computing:
            if self.vision is None:
                out = self.backbone(input_ids=ids_T[None], **rest)
            else:
                given = {"input_ids": ids_T[None]} if patches is None else self.vision.embed(ids_T, patches)
                out = self.decoder(**given, **rest)
        hidden_TE: Tensor = out.last_hidden_state[0]
        if query is None:
            return hidden_TE
        weight_VE, bias_V = here(self.head.weight), here(self.head.bias)
        predictor_N, target_N = (to_device(each, ids_T.device) for each in (query.predictor_N, query.target_N))
        hidden_NE = hidden_TE.index_select(0, predictor_N)
        if self.scores:
            score_N = functional.linear(hidden_NE.to(weight_VE.dtype), weight_VE)[:, 0]
            return score_N, torch.zeros_like(score_N)
        logprobs_N, entropy_N = token_logprobs(
            hidden_NE,
            weight_VE,
            bias_V,
            target_N,
            scale=self.logit_scale / query.temperature,
            cap=self.logit_cap,
            matmul_dtype=torch.bfloat16 if query.coarse else weight_VE.dtype,
            gradient_dtype=autocast,
            entropy_gradient=query.entropy_gradient,
            part=self.part,
            fused=query.fused,
            exact=self.exact,
        )
        differing_T = self.routing.differing()
        if differing_T is None:
            return logprobs_N, entropy_N
        return logprobs_N, entropy_N, differing_T.index_select(0, predictor_N)


def plain_name(name: str) -> str:
    """Hugging Face name of a parameter, whether or not its layer carries an adapter; `<layer>.lora_A` of an adapter."""
    side = name.removesuffix(".weight")
    return side if side.endswith(ADAPTER_SIDES) else name.replace(".lora_base.", ".")


def load_model(
    path: str,
    *,
    device: torch.device,
    trust_remote_code: bool = False,
    scores: bool = False,
    in_bfloat16: Collection[str] = (),
) -> CausalModel:
    """Load a model folder in float32, with packed attention, onto a device; ModelError as `read_config`.

    With `scores` it has a classification head with one output; one that is not in the folder is left open. Parameters
    named `in_bfloat16` are read from the files in that format, one after the other.
    """
    folder = Path(path).expanduser()
    config = read_config(path, trust_remote_code=trust_remote_code, scores=scores)
    kind, family, more = _kind(config, scores), None, decoding(config)
    if in_bfloat16:
        family = type(outline_model(path, trust_remote_code=trust_remote_code, scores=scores).whole)
        kind = _loading_in_bfloat16(family, in_bfloat16)
    with _readable(folder), _quietly(warns=not scores):
        loaded: Any = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            experts_implementation=EXPERTS_NAME,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **more,
        )
    whole, info = loaded
    if more:
        settle_decoded(whole, in_bfloat16)
    if family is not None:
        whole.__class__ = family
        rounded = {name for name, parameter in whole.named_parameters() if parameter.dtype == torch.bfloat16}
        unlike = rounded ^ {name for name, _ in whole.named_parameters() if name in in_bfloat16}
        assert not unlike, f"transformers has loaded {len(unlike)} tensors in another format, first {min(unlike)}"
    missing = sorted(set(info["missing_keys"]) - ({SCORE_WEIGHT} if scores else set()))
    if missing:
        raise ModelError(
            f"{folder}: the weights lack {len(missing)} tensors, first {missing[0]}; download the folder again"
        )
    whole.to(device).eval()  # and so it stays: the policy that is trained must be the policy that was sampled
    whole.tie_weights()  # torch keeps ties on the way to some kinds of device only: not to one of a plugin's
    return _take_apart(whole, folder, scores=scores)


def _loading_in_bfloat16(family: Any, names: Collection[str]) -> Any:
    """Return a family's class that loads its parameters of these names in bfloat16, the others as it is asked to.

    Its name and module are the family's, by which transformers finds what else belongs to it.
    """
    # A few patterns instead of every layer's names: transformers tries each on every name in the files.
    patterns = sorted({"^" + re.sub(r"\d+", "[0-9]+", name) + "$" for name in names})

    def plan(self: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {**super(family, self)._get_dtype_plan(dtype), **dict.fromkeys(patterns, torch.bfloat16)}

    return type(family.__name__, (family,), {"_get_dtype_plan": plan, "__module__": family.__module__})


def outline_model(path: str, *, trust_remote_code: bool = False, scores: bool = False) -> CausalModel:
    """Build a folder's model without memory for its weights (on torch's meta device)."""
    folder = Path(path).expanduser()
    config = read_config(path, trust_remote_code=trust_remote_code, scores=scores)
    forget_mxfp4(config)
    with _readable(folder), torch.device("meta"):
        whole: Any = _kind(config, scores).from_config(
            config,
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            experts_implementation=EXPERTS_NAME,
            trust_remote_code=trust_remote_code,
        )
    if (folder / "generation_config.json").is_file() and not scores:
        whole.generation_config = GenerationConfig.from_pretrained(folder)
    return _take_apart(whole.eval(), folder, scores=scores)


def read_config(path: str, *, trust_remote_code: bool = False, scores: bool = False) -> Any:
    """Return the transformers config of a model folder, after a look at what else is in the folder.

    With `scores` that of a classifier with one output.

    Raises:
        ModelError: the folder is missing, incomplete or corrupt, or the family is not supported.
    """
    folder = Path(path).expanduser()
    _check_folder(folder)
    register_attention()
    register_experts()
    with _readable(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    _check_config(config, folder)
    if scores:
        _make_scorer(config, folder)
    return config


def _make_scorer(config: Any, folder: Path) -> None:
    if getattr(config, "vision_config", None) is not None:
        raise ModelError(f"{folder}: {config.model_type} has images, and a score head is put on models of text alone")
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ModelError(f"{folder}: transformers has no sequence classification of the family {config.model_type}")
    config.num_labels = 1
    # By it a classifier finds the end of a padded sequence; a token that ends answers too would hide that end.
    if config.pad_token_id is None and (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.pad_token_id != tokenizer.eos_token_id:
            config.pad_token_id = tokenizer.pad_token_id


def _kind(config: Any, scores: bool) -> Any:
    """Return the family of transformers' classes to load a model with."""
    if scores:
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Name the folder in what transformers raises about it."""
    try:
        yield
    except Exception as error:  # transformers has no error of its own for a folder it cannot read
        if ATTENTION_NAME in str(error):
            reason = "its family's attention layers cannot be exchanged for packed ones: family not supported"
        else:
            reason = f"transformers cannot load a causal language model from it: {one_line(error)}"
        raise ModelError(f"{folder}: {reason}") from error


def one_line(error: Exception) -> str:
    """Its message, in one line of a bearable length: transformers' come in paragraphs, with lists of all families."""
    return textwrap.shorten(str(error), 500, placeholder=" …")


@contextmanager
def _quietly(*, warns: bool) -> Iterator[None]:
    """Keep transformers' bars out of the logs of a role process; and its warnings, where a new head is meant."""
    shown, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    if not warns:
        hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()


def _check_folder(folder: Path) -> None:
    """Find what is missing or cut short before transformers does."""
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ModelError(f"model_path must be a Hugging Face model folder: {folder} {what}")
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (ValueError, KeyError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error}; download the folder again") from error
    files = sorted(folder / name for name in names) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors; convert the weights with transformers' save_pretrained")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is missing or cut short ({error}); download the folder again") from error


def _check_config(config: Any, folder: Path) -> None:
    """Refuse models whose sequences or logits the engine would get wrong."""
    config = config.get_text_config()
    known = KNOWN_LAYER_TYPES | ({"linear_attention"} if config.model_type in DELTA_RULE_FAMILIES else set())
    others = set(getattr(config, "layer_types", None) or ()) - known
    if others:
        raise ModelError(f"{folder}: layers of type {', '.join(sorted(others))} would mix packed sequences")
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(
            f"{folder}: {config.model_type} uses attn_logit_softcapping, which packed attention does not compute"
        )


def _take_apart(whole: Any, folder: Path, *, scores: bool) -> CausalModel:
    head = getattr(whole, "score", None) if scores else whole.get_output_embeddings()
    backbone = getattr(whole, whole.base_model_prefix, None)
    if scores and not isinstance(head, nn.Linear):
        raise ModelError(f"{folder}: {type(whole).__name__} has no linear score head on its last layer")
    if not isinstance(head, nn.Linear) or not isinstance(backbone, nn.Module):
        raise ModelError(f"{folder}: {type(whole).__name__} has no linear vocabulary head on a backbone")
    cap = getattr(whole.config.get_text_config(), "final_logit_softcapping", None)
    vision = find_vision(whole, folder)
    model = CausalModel(whole, _logit_scale(whole.config), logit_cap=cap, vision=vision, scores=scores)
    hold_biases_as_buffers(whole)
    fuse_norms(whole, getattr(model.decoder, "norm", None))
    route_as_the_family(whole)
    pack_recurrence(whole)
    return model


def _logit_scale(config: Any) -> float:
    """Factor on the logits: `logit_scale` of Cohere, 1 / `logits_scaling` of Granite, `logits_scaling` of some."""
    scaling, factor = getattr(config, "logits_scaling", None) or 1.0, getattr(config, "logit_scale", None) or 1.0
    return float(factor * scaling if config.model_type in _SCALING_IS_A_FACTOR else factor / scaling)
