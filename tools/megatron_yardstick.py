"""The yardstick for layouts of offbeat-engine-megatron: two steps by plain transformers, in one process.

transformers' own model of the same folder, each sequence alone, torch's autograd and AdamW; with `lora` a low-rank
update beside each linear layer, written out.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from offbeat_core import LossTokens, Metrics, TrainEngine, TrainSequence

NUM_STEPS: Final = 2
LORA_RANK: Final = 3
PADDING_ID: Final = 0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of two steps.

    Args:
        losses: of each step.
        grad_norms: before clipping.
        gradients: of the first step, by Hugging Face name; empty where it cannot be seen.
        weights: afterwards.
        logprobs: of the sequences, afterwards: [T] each.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    logprobs: list[Any]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest differences; of losses and norms relative where above 1, of tensors against their largest value."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float
    logprob_nats: float


def make_sequences(seed: int) -> list[TrainSequence]:
    """Make sequences of 4 to 30 tokens with holes in their masks; some tokens are the model's padding id."""
    rng = np.random.default_rng(seed)
    made = []
    for length in rng.integers(4, 31, 9):
        mask = np.arange(length) >= rng.integers(1, 4)
        mask[3:-1:5] = False
        extras = {"advantage": rng.normal(size=length).astype(np.float32)}
        ids = rng.integers(3, 300, length).astype(np.int32)
        ids[2::7] = PADDING_ID
        made.append(TrainSequence(ids=ids, loss_mask=mask, extras=extras))
    return made


def policy_loss(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    """Return a policy gradient with an entropy bonus and a term per sequence, as sequence-level losses have."""
    per_sequence = torch.zeros(tokens.num_sequences).index_add(0, tokens.sequence_N, tokens.logprobs_N)
    loss = -(tokens.logprobs_N * tokens.extras["advantage"]).sum() - 0.1 * tokens.entropy_N.sum()
    return loss / tokens.total_tokens + 1e-4 * (per_sequence**2).sum() / tokens.total_sequences, {}


def train_steps(engine: TrainEngine, first: int, last: int) -> list[float]:
    """Make the updates [first, last) of the run that all tests make; loss and norm of each."""
    values = []
    for step in range(first, last):
        values.append(engine.forward_backward(make_sequences(step), policy_loss)["loss"].value)
        values.append(engine.step()["grad_norm"].value)
    return values


class _LowRankLinear(nn.Module):
    """A frozen layer and its update, alpha twice the rank."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(LORA_RANK, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, LORA_RANK))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + 2.0 * nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)


def _add_adapters(network: Any) -> None:
    network.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    places = [
        (parent, name, layer)
        for parent in network.model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    for parent, name, layer in places:
        setattr(parent, name, _LowRankLinear(layer, generator))


def _merged(network: nn.Module) -> dict[str, Tensor]:
    """Return weights, and buffers that are saved with them, by name; with each adapter added to its own."""
    found = {name: each.detach().clone() for name, each in network.named_parameters() if ".lora_" not in name}
    saved = network.state_dict()
    found |= {name: each.clone() for name, each in network.named_buffers() if name in saved}
    for name, layer in network.named_modules():
        if isinstance(layer, _LowRankLinear):
            update = 2.0 * layer.lora_B.detach() @ layer.lora_A.detach()
            found[f"{name}.weight"] = found.pop(f"{name}.base.weight") + update
            if f"{name}.base.bias" in found:
                found[f"{name}.bias"] = found.pop(f"{name}.base.bias")
    return found


def train_with_transformers(folder: Path, *, lora: bool = False) -> Trained:
    """Return the yardstick."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if lora:
        _add_adapters(network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    matrices = [each for each in network.parameters() if each.ndim >= 2 and each.requires_grad]
    others = [each for each in network.parameters() if each.ndim < 2 and each.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        loss = reference_loss(network, make_sequences(step))
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            gradients = {names[id(each)]: each.grad.clone() for each in network.parameters() if each.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), 0.5)))
        losses.append(float(loss))
        adam.step()
        adam.zero_grad()
    weights = _merged(network)
    with torch.no_grad():
        logprobs = [_token_values(network, each)[0].numpy() for each in make_sequences(9)]
    return Trained(
        losses=losses,
        grad_norms=norms,
        gradients=per_expert(gradients),
        weights=per_expert(weights),
        logprobs=logprobs,
    )


def reference_loss(network: nn.Module, sequences: list[TrainSequence]) -> Tensor:
    """Compute `policy_loss` of all sequences by transformers, each alone."""
    values = [_token_values(network, sequence) for sequence in sequences]
    counts = [len(each) for each, _ in values]
    extras = [each.extras["advantage"][each.loss_mask] for each in sequences]
    tokens = LossTokens(
        logprobs_N=torch.cat([each for each, _ in values]),
        entropy_N=torch.cat([each for _, each in values]),
        sequence_N=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        num_sequences=len(sequences),
        extras={"advantage": torch.from_numpy(np.concatenate(extras))},
        total_tokens=sum(counts),
        total_sequences=len(sequences),
    )
    loss: Tensor = policy_loss(tokens)[0]
    return loss


def _token_values(network: nn.Module, sequence: TrainSequence) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of one sequence's loss tokens."""
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    logits = network(ids, use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits.float(), -1)[torch.from_numpy(sequence.loss_mask[1:])]
    chosen = logp.gather(1, ids[0, 1:][torch.from_numpy(sequence.loss_mask[1:])][:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(1)


def per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names of checkpoints, which hold each expert separately."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            if last == "gate_up_proj":
                found[f"{stem}.{expert}.gate_proj.weight"], found[f"{stem}.{expert}.up_proj.weight"] = part.chunk(2)
            else:
                found[f"{stem}.{expert}.down_proj.weight"] = part
    return found


def compare(found: Trained, wanted: Trained) -> Errors:
    """Return how far two runs are apart."""
    assert not found.gradients or found.gradients.keys() == wanted.gradients.keys()
    assert found.weights.keys() == wanted.weights.keys()
    return Errors(
        loss=_relative(found.losses, wanted.losses),
        grad_norm=_relative(found.grad_norms, wanted.grad_norms),
        gradient=max((_apart(each, wanted.gradients[name]) for name, each in found.gradients.items()), default=0.0),
        weight=max(_apart(each, wanted.weights[name]) for name, each in found.weights.items()),
        logprob_nats=max(float(np.abs(a - b).max()) for a, b in zip(found.logprobs, wanted.logprobs, strict=True)),
    )


def _relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) / max(abs(other), 1.0) for one, other in zip(found, wanted, strict=True))


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))
