"""A BERT of transformers, made from its configuration, learns to find a word; its embeddings and its first layer are frozen.

Run it with `python examples/finetuning.py`; it needs `pip install transformers`. With the Trainer, see `examples/integrations`.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import monograph as mg


class Train(mg.Graph):
    """A step on sentences of different lengths: the mask tells what is padding."""

    def __init__(self, model, optimizer, scheduler):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)
        self.config.enable_amp(dtype=torch.bfloat16)

    def build(self, **batch):
        given = self.model(**batch)
        given.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return given.loss, (given.logits.argmax(1) == batch["labels"]).sum()


def drawn(number, length):
    """Sentences of the words 1 to 9; is the word 7 in there?"""
    words = torch.randint(1, 10, (number, length))
    mask = (torch.arange(length) < torch.randint(3, length + 1, (number, 1))).long()
    words = words * mask
    return {"input_ids": words, "attention_mask": mask, "labels": (words == 7).any(1).long()}


def main(steps=150, batch=32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=10, problem_type="single_label_classification", **sizes)
    )
    for frozen in (model.bert.embeddings, model.bert.encoder.layer[0]):
        frozen.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    step = Train(model, optimizer, scheduler)
    step.config.dynamic("input_ids", 1)  # lengths vary
    losses = []
    for number in range(steps):
        loss, right = step(**drawn(batch, 8 + number % 5))
        losses.append(loss.item())
        if number % 30 == 0:
            print(f"step {number}: loss {losses[-1]:.3f}, {right / batch:.0%} right")
    print(f"builds for the lengths 8 to 12: {len(step.builds)}")
    return losses


if __name__ == "__main__":
    main()
