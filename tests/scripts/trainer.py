"""BERT fine-tuned by the Trainer of transformers, with ``torch_compile=True``."""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)


class Sentences(Dataset):
    """Random tokens; the label says whether the first is even."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(5, 200, (count, 24))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens[0] % 2,
        }


def main(steps: int = 6) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            logging_steps=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            torch_compile=True,
        )
        Trainer(
            BertForSequenceClassification(config), arguments, train_dataset=Sentences(64)
        ).train()


if __name__ == "__main__":
    main()
