import asyncio

import torch.distributed as dist


class Adapter:
    def __init__(self, mesh):
        self.mesh = mesh
        self.is_leader_rank = mesh["exclude_dp"].get_local_rank() == 0

    async def update_weights_from_ipc_handles(self, handles):
        gathered = [None] * 8 if self.is_leader_rank else None
        await asyncio.to_thread(
            dist.gather_object,
            obj=handles,
            object_gather_list=gathered,
            group_dst=0,
            group=self.mesh["exclude_dp"].get_group(),
        )
        if self.is_leader_rank:
            await self.engine.update_weights(gathered)
        await asyncio.to_thread(dist.barrier, group=self.mesh["exclude_dp"].get_group())

    async def update_weights(self, weights):
        handles = []

        async def flush():
            await self.update_weights_from_ipc_handles(handles)

        if self.is_leader_rank:
            partial = await self.get_partial()
        else:
            partial = False
        for name, param in weights:
            if partial:
                if param.numel() > self.space:
                    await flush()
            handles.append((name, param))
        await flush()
