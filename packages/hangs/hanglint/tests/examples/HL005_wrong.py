import torch.distributed as dist


def generate(engine, prompts, group):
    outputs = [None]
    if dist.get_rank() == 0:
        outputs = [engine.generate(prompts)]
    dist.broadcast_object_list(outputs, src=0)
    return outputs[0]
