"""vLLM in a process and an environment of its own: takes the updates that it is sent, and answers with samples.

Its argument is the model's folder. Each line of standard input is a JSON object: a version, and the sender's address.
Each line of standard output is JSON too: "started", then the samples of each version.
"""

import asyncio
import json
import os
import sys

import numpy as np

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams
from offbeat_rollout_vllm import VllmRolloutEngine
from offbeat_weightsync import WeightGroup, receive

DEADLINE_S = 60.0
PROMPTS = [[10, 44, 81, 7, 200, 31], [5, 262, 19]]


async def sample(engine, version):
    params = SamplingParams(max_tokens=24, seed=version, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        name = f"{version}-{number}"
        request = GenerateRequest(request_id=name, prompt_ids=np.array(prompt, np.int32), num_samples=2, params=params)
        for completion in await engine.generate(request):
            assert [segment.version for segment in completion.segments] == [version]
            yield {"prompt": prompt, "ids": completion.ids.tolist(), "logprobs": completion.logprobs.tolist()}


async def serve(folder, answers):
    engine = await VllmRolloutEngine.create(RolloutEngineConfig(model_path=folder, device="cpu", max_model_len=64))
    print(json.dumps("started"), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        version, group = asked["version"], WeightGroup("cpu")
        with receive(asked["address"], version, DEADLINE_S, group=group) as stream:
            stream.confirm(await engine.update_weights(stream, version))
        print(json.dumps([each async for each in sample(engine, version)]), file=answers, flush=True)
    await engine.close()


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    asyncio.run(serve(sys.argv[1], own))
