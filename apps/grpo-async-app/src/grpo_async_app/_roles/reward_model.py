"""The reward model role: one replica of a sequence classification model, which reads several completions at once."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_async_app._config.reward_model import RewardModelAsk, RewardModelOptions, reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._roles.scorer import ScorerAnswer
from offbeat_core import Ids
from offbeat_data import RewardError, RewardScore, Tokenizer, load_tokenizer
from offbeat_device import open_device
from offbeat_run import inspect_model, log_line, log_loaded, log_start


@dataclass(frozen=True)
class _Waiting:
    ids: Ids
    score: "asyncio.Future[float]"


class RewardModelRole:
    """Scores completions; what is asked while a batch is read makes the next one.

    Args:
        config: of the run.
        num_threads: of torch.
    """

    _tokenizer: Tokenizer
    _model: Any
    _loop: "asyncio.Task[None]"

    def __init__(self, *, config: GrpoConfig, num_threads: int) -> None:
        options = reward_model_of(config.reward)
        assert options is not None
        log_start(options.device, num_threads)
        self._options: RewardModelOptions = options
        self._trust = config.model.trust_remote_code
        torch.set_num_threads(num_threads)
        self._waiting: list[_Waiting] = []
        self._asked = asyncio.Event()

    async def start(self) -> None:
        """Load the model, and score one token."""
        began_s = time.monotonic()
        await asyncio.to_thread(self._load)
        log_loaded(self._options.path, self._options.dtype, began_s)
        self._loop = asyncio.create_task(self._serve())
        [answer] = await self.score(RewardModelAsk(messages=[], text="a", completions=["b"]))
        answer.judged()
        log_line("ready")

    async def score(self, ask: RewardModelAsk) -> list[ScorerAnswer]:
        """Return the score of each completion; an error for one that is too long or whose score is not finite."""
        encoded = await asyncio.to_thread(self._encode, ask)
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(ids, loop.create_future()) for ids in encoded]
        self._waiting += [each for each in waiting if len(each.ids) <= self._options.max_tokens]
        self._asked.set()
        return [await self._answer(each) for each in waiting]

    async def health(self) -> None:
        """Answer that the process lives."""

    async def close(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        log_line("ended")

    async def _answer(self, one: _Waiting) -> ScorerAnswer:
        limit = self._options.max_tokens
        if len(one.ids) > limit:
            return _failed(f"{len(one.ids)} tokens are more than reward.reward_model.max_tokens = {limit}")
        value = await one.score
        if not math.isfinite(value):
            return _failed(f"the reward model gives {value}")
        return ScorerAnswer(score=RewardScore(value=value, parts={"reward_model": value}))

    def _load(self) -> None:
        from transformers import AutoModelForSequenceClassification

        options = self._options
        self._device = open_device(options.device).torch_device
        folder = inspect_model(options.path).path
        self._tokenizer = load_tokenizer(folder, self._trust)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=getattr(torch, options.dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=self._trust,
        )
        self._model = model.to(self._device).eval()
        self._pad_id = model.config.get_text_config().pad_token_id

    def _encode(self, ask: RewardModelAsk) -> list[Ids]:
        has_template = self._tokenizer.chat_template is not None
        # A policy may learn to write "<|im_end|>" and a praise of its own after it: to the reward model that is text.
        completions = [self._tokenizer.escape(each) for each in ask.completions]
        if self._options.input == "text" or (self._options.input == "auto" and not has_template):
            return [self._encode_text(ask.text + each) for each in completions]
        template = self._tokenizer.require_template()
        words = [(role, self._tokenizer.escape(content)) for role, content in ask.messages or [("user", ask.text)]]
        asked = [{"role": role, "content": content} for role, content in words]
        chats = [[*asked, {"role": "assistant", "content": each}] for each in completions]
        texts = [template.render(chat, add_generation_prompt=False, options={}).text for chat in chats]
        return self._tokenizer.encode(texts, add_special_tokens=False)

    def _encode_text(self, text: str) -> Ids:
        """Encode with what the tokenizer puts around a text; bos comes once, also where a template wrote it."""
        [ids] = self._tokenizer.encode([text], add_special_tokens=True)
        has_two = len(ids) > 1 and ids[0] == ids[1] and int(ids[0]) in self._tokenizer.control_ids
        return ids[1:] if has_two else ids

    async def _serve(self) -> None:
        while True:
            await self._asked.wait()
            batch = self._take_batch()
            if not batch:
                self._asked.clear()
                continue
            try:
                scores = await asyncio.to_thread(self._forward, [each.ids for each in batch])
            except Exception as error:  # noqa: BLE001  such as out of memory: the caller gets it
                for each in batch:
                    each.score.set_exception(error)
                continue
            for each, score in zip(batch, scores, strict=True):
                each.score.set_result(score)

    def _take_batch(self) -> list[_Waiting]:
        """Return the oldest that waits, with others that are nearest to it in length."""
        if not self._waiting:
            return []
        # Classifiers of transformers find a text's last token by the padding token, and without one they read a text
        # at a time: texts of one length too are refused as a batch.
        length, limit = len(self._waiting[0].ids), 1 if self._pad_id is None else self._options.max_batch
        chosen = sorted(self._waiting, key=lambda each: abs(len(each.ids) - length))[:limit]
        taken = set(map(id, chosen))
        self._waiting = [each for each in self._waiting if id(each) not in taken]
        return chosen

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[Ids]) -> list[float]:
        ids_BT, mask_BT = _padded(sequences, self._pad_id or 0)
        logits_B1 = self._model(input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device)).logits
        logits_B = logits_B1[:, 0].float()
        return list((logits_B.sigmoid() if self._options.squash == "sigmoid" else logits_B).tolist())


def _padded(sequences: Sequence[Ids], pad_id: int) -> tuple[Tensor, Tensor]:
    """[B, T] int64 ids filled up on the right, and where they are no filling."""
    length = max(map(len, sequences))
    ids_BT = torch.full((len(sequences), length), pad_id, dtype=torch.int64)
    mask_BT = torch.zeros((len(sequences), length), dtype=torch.int64)
    for row, ids in enumerate(sequences):
        ids_BT[row, : len(ids)] = torch.from_numpy(ids).long()
        mask_BT[row, : len(ids)] = 1
    return ids_BT, mask_BT


def _failed(text: str) -> ScorerAnswer:
    return ScorerAnswer(error=RewardError.__name__, text=text)
