"""A Hugging Face Trainer script. It has never heard of SCAPE: the DeepSpeed JSON alone names the optimizer.

deepspeed --num_gpus 2 --module deepspeed_scape.run launch/examples/hf_trainer.py \
  --deepspeed launch/examples/scape_auto.json --output_dir runs/hf --max_steps 40 --learning_rate 1e-3
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class TextArguments:
    text: str = "README.md"  # any file; its bytes are the tokens
    length: int = 64  # tokens of a sample


class Windows(Dataset):
    def __init__(self, path: str, length: int) -> None:
        tokens = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.windows = tokens.unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


def main() -> None:
    parser = HfArgumentParser((TextArguments, TrainingArguments))
    text, arguments = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows(text.text, text.length))
    started = Path(arguments.output_dir).is_dir()  # then go on from its newest checkpoint-N, if there is one
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if started else None)
    trainer.save_model()


if __name__ == "__main__":
    main()
