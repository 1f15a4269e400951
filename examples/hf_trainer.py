"""Train with the Trainer of transformers, the model compiled by fusec in place.

    python examples/hf_trainer.py

The model is a tiny GPT-2 with random weights, the task is to go on counting in steps of one, two or
three; nothing is downloaded. Needs ``transformers`` and ``accelerate``.

``TrainingArguments(torch_compile_backend="fusec")`` fails: accelerate (1.15) takes only backends on
a list of its own. ``model.compile(backend="fusec")`` does the same for any Trainer.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.utils.data import Dataset

try:
    import accelerate  # noqa: F401  (the Trainer says so only when it begins)
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )
except ImportError as missing:
    sys.exit(f'error: {missing.name} is missing: pip install -e ".[demo]"')

LENGTH, VOCABULARY = 24, 32


class Counting(Dataset):
    """Sequences ``start, start + step, ...`` modulo the vocabulary, one for each start and step."""

    def __len__(self) -> int:
        return 3 * VOCABULARY

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start, step = number % VOCABULARY, 1 + number // VOCABULARY
        ids = (start + step * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=64, n_positions=LENGTH, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(backend: str | None, directory: str, steps: int = 40) -> list[float]:
    """Train under a backend of torch.compile, None for eager; return the losses by step."""
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        seed=0,
    )
    model = make_model()
    if backend is not None:
        model.compile(backend=backend)
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        runs = {name: train(name, directory) for name in (None, "fusec")}
    print(f"{'step':>6}{'eager':>10}{'fusec':>10}")
    eager, fused = runs[None], runs["fusec"]
    for step in range(0, len(eager), 8):
        print(f"{step:6d}{eager[step]:10.4f}{fused[step]:10.4f}")
    print(f"{len(eager) - 1:6d}{eager[-1]:10.4f}{fused[-1]:10.4f}")


if __name__ == "__main__":
    main()
