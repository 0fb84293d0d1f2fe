import torch.distributed as dist
from megatron.core import parallel_state as mpu


class Engine:
    def is_mp_src_rank_with_outputs(self):
        return (
            mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1
            and mpu.get_context_parallel_rank() == 0
        )

    def is_last_stage(self):
        return mpu.is_pipeline_last_stage(ignore_virtual=True)

    def run(self, metrics):
        if self.is_mp_src_rank_with_outputs():
            metrics["mtp"] = reduce_mtp_loss(metrics["tracker"])
        return metrics


def reduce_mtp_loss(tracker):
    dist.all_reduce(tracker, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return tracker
