"""Train a tiny BERT with Hugging Face's Trainer; print the sum of its parameters."""

import sys
import tempfile

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": torch.arange(8) * (i + 1) % 50, "labels": i % 2}


torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=3, report_to=[], use_cpu=True, save_strategy="no",
    disable_tqdm=True, seed=0,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
trainer.train()
loss = trainer.evaluate()["eval_loss"]
total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
if dist.get_rank() == 0:
    print(f"RESULT {arguments.world_size} {type(trainer.model_wrapped).__name__} {loss:.5f} {total:.5f}")
dist.destroy_process_group()
