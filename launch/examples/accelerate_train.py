"""An Accelerate script. It has never heard of SCAPE: the DeepSpeed JSON alone names the optimizer.

accelerate launch --config_file launch/examples/accelerate.yaml --module deepspeed_scape.run \
  launch/examples/accelerate_train.py --output runs/accelerate
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def windows(path: str, length: int) -> list[dict[str, torch.Tensor]]:
    """A text's bytes as samples of `length` tokens."""
    tokens = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
    return [{"input_ids": window, "labels": window} for window in tokens.unfold(0, length, length)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default="README.md")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/accelerate")
    arguments = parser.parse_args()
    PartialState(cpu=not torch.cuda.is_available())  # without a GPU Accelerate would see one process only
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))
    optimizer = DummyOptim(model.parameters(), lr=1e-3, weight_decay=0.1)  # the JSON's "auto" are filled from here
    loader = DataLoader(windows(arguments.text, 64), batch_size=4, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == arguments.steps:
                break
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
    accelerator.save_state(arguments.output)


if __name__ == "__main__":
    main()
