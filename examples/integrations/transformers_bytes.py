"""A small GPT of transformers learns the bytes of this file: accumulation, a schedule, evaluation, and a resumed run.

python examples/integrations/transformers_bytes.py --epochs 8
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from monograph.integrations.transformers import GraphTrainer

LENGTH = 32  # bytes in a row


def model() -> GPT2LMHeadModel:
    set_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 256, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def rows() -> list[dict[str, torch.Tensor]]:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    parts = text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return [{"input_ids": part, "labels": part} for part in parts]


def trainer(folder: Path, epochs: int) -> GraphTrainer:
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        dataloader_drop_last=True,  # a batch of another size is captured once more
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    return GraphTrainer(model=model(), args=arguments, train_dataset=rows(), eval_dataset=rows()[::4])


def main(epochs: int) -> None:
    with TemporaryDirectory() as folder:
        first = trainer(Path(folder), epochs)
        first.train()
        half = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        second = trainer(Path(folder), epochs)
        second.train(resume_from_checkpoint=str(half[len(half) // 2 - 1]))
    same = all(
        torch.equal(value, second.model.state_dict()[name])
        for name, value in first.model.state_dict().items()
    )
    print(f"{first.state.global_step} steps, {len(first.graph.builds)} builds")
    print(f"the resumed run has {'the same' if same else 'other'} bits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    main(parser.parse_args().epochs)
