"""vLLM's objects to ours and back. Imports vLLM when called, not before."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from offbeat_rollout_vllm._form import AdapterUse
from offbeat_rollout_vllm._options import check_arguments
from offbeat_rollout_vllm._samples import Delta
from offbeat_rollout_vllm._scoring import prompt_logprobs


def make_arguments(name: str, arguments: Mapping[str, Any]) -> Any:
    """Make vLLM's EngineArgs or AsyncEngineArgs.

    Raises:
        ConfigError: an argument that this vLLM does not have.
    """
    kind: Any = getattr(import_module("vllm.engine.arg_utils"), name)
    check_arguments(arguments, [each.name for each in fields(kind)])
    return kind(**arguments)


def engine_prompt(prompt: Any) -> Any:
    """A prompt that needs no further preparation: of a list of ids, or one that was prepared already."""
    return import_module("vllm.inputs").tokens_input(prompt) if isinstance(prompt, list) else prompt


def adapter_request(adapter: AdapterUse | None) -> Any:
    """Make vLLM's LoRARequest for an adapter that its workers have; it names a folder because it must."""
    if adapter is None:
        return None
    name, number = adapter
    return import_module("vllm.lora.request").LoRARequest(lora_name=name, lora_int_id=number, lora_path=name)


def sampling_params(params: dict[str, Any]) -> Any:
    """Make vLLM's SamplingParams: each output holds only what is new, in the cheap format."""
    module: Any = import_module("vllm.sampling_params")
    return module.SamplingParams(**params, output_kind=module.RequestOutputKind.DELTA, flat_logprobs=True)


def read_output(output: Any, label: int | None) -> Delta:
    """What a RequestOutput adds to its sample.

    Args:
        output: vLLM's, of a request with one sample, in DELTA form.
        label: the engine's now, when it is known to be that of these tokens; else the labels come at the end.
    """
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    stopped_by = completion.stop_reason
    return Delta(
        ids=ids,
        logprobs=_sampled_logprobs(completion.logprobs, ids),
        label=label,
        spans=_spans(completion.weight_versions) if label is None else (),
        finish_reason=completion.finish_reason,
        stop_string=stopped_by if isinstance(stopped_by, str) else "",
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs, output.prompt_token_ids),
    )


def _sampled_logprobs(logprobs: Any, ids: list[int]) -> list[float]:
    """Of the sampled tokens: the only ones asked for, but vLLM may give the likeliest as well."""
    if not ids:
        return []
    found = [position[token].logprob for position, token in zip(logprobs, ids, strict=True)]
    return [float(logprob) for logprob in found]


def _spans(spans: Any) -> tuple[tuple[int, int], ...]:
    """(label, number of tokens), oldest first."""
    return tuple((int(span.version), span.end - span.start) for span in spans or ())
