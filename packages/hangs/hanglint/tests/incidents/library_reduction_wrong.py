from megatron.core import parallel_state as mpu
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


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
            metrics["mtp"] = track(metrics)
        return metrics


def track(metrics):
    MTPLossLoggingHelper.track_mtp_metrics(1.0, 0, None)
    return metrics
