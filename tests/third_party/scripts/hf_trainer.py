"""Train a tiny language model, made from a config, with transformers' Trainer."""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config
from transformers import GPT2LMHeadModel
from transformers import Trainer
from transformers import TrainerCallback
from transformers import TrainingArguments
from transformers import set_seed


class RandomTokens(Dataset):
    def __init__(self, num_samples: int, length: int, vocab_size: int):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(
            vocab_size, (num_samples, length), generator=generator
        )

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i].clone()}


class KeepNothing(TrainerCallback):
    """A callback, as most scripts have one."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--deepspeed", type=Path, default=None)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    more = {}
    if args.fsdp:
        wrapped = ["GPT2Block"]
        more = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": wrapped},
        }
    training_args = TrainingArguments(
        output_dir=str(args.output / "checkpoints"),
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        deepspeed=str(args.deepspeed) if args.deepspeed else None,
        **more,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=RandomTokens(64, 12, config.vocab_size),
        callbacks=[KeepNothing()],
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        (args.output / "losses.json").write_text(json.dumps(losses))
        torch.save(state, args.output / "model.pt")


if __name__ == "__main__":
    main()
