import torch.distributed as dist


def generate(engine, prompts, group):
    outputs = [engine.generate(prompts)]
    dist.broadcast_object_list(outputs, src=0)
    return outputs[0]
