"""TRL's SFTTrainer on a tiny model made here, whose rank 0 takes long over the data and over each evaluation."""

import os
import tempfile
import time

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "d"]


class Samples(TrainerCallback):
    """Rank 0 generates with the model now and then."""

    def on_step_end(self, args: SFTConfig, state: object, control: object, **rest: object) -> None:
        """Run after the second step."""
        if args.process_index == 0 and state.global_step == 2:
            time.sleep(float(os.environ["PAUSE_S"]))


words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=16
)
config = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    pad_token_id=0,
    eos_token_id=1,
)
with tempfile.TemporaryDirectory() as folder:
    settings = SFTConfig(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        max_length=16,
        disable_tqdm=True,
    )
    with settings.main_process_first():
        if settings.process_index == 0:
            time.sleep(float(os.environ["PAUSE_S"]))
        data = Dataset.from_dict({"text": ["a b c d"] * 32})
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Samples()],
    )
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    print(f"rank {settings.process_index}: done", flush=True)
