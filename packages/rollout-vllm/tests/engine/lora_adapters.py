"""LoRA adapters drawn at random, and the model that a merged one makes: the yardstick of the adapters' tests."""

from contextlib import contextmanager

PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def draw_adapter(model, *, rank=4, seed=0, spread=0.25, layers=ALL):
    """PEFT name -> matrix, float32, for every layer of `model` that ends in one of `layers`."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(layers):
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                adapter[f"{PREFIX}{layer}.lora_{part}.weight"] = spread * torch.randn(shape, generator=draw)
    return adapter


@contextmanager
def merged(model, adapter, scale):
    """The model with the adapter in its weights; as it was, afterwards."""
    import torch

    weights = dict(model.named_parameters())
    before = {}
    with torch.no_grad():
        for name, down in adapter.items():
            if ".lora_A." in name:
                target = name.removeprefix(PREFIX).replace(".lora_A", "")
                before[target] = weights[target].clone()
                weights[target] += scale * (adapter[name.replace("lora_A", "lora_B")] @ down)
    try:
        yield model
    finally:
        with torch.no_grad():
            for target, weight in before.items():
                weights[target].copy_(weight)
