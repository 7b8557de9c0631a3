"""Tiny training runs: rows the target wrote, a trainer for them, and callbacks that stop it or note its time."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from conftest import greedy, make_draft
from transformers import TrainerCallback

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.data.collator import DFlashCollator

WRITTEN: dict[tuple[Any, ...], list[dict[str, Any]]] = {}  # rows that a target with these weights wrote before


def rows_of(target, count: int = 4, prompt_length: int = 5, new_tokens: int = 30) -> list[dict[str, Any]]:
    """Answers the target wrote itself, never with the mask token."""
    parameters = torch.cat([value.detach().float().flatten() for value in target.parameters()])
    digest = hashlib.sha256(parameters.cpu().numpy().tobytes()).hexdigest()
    key = (digest, target.config.to_json_string(), count, prompt_length, new_tokens)
    if key not in WRITTEN:
        generator = torch.Generator().manual_seed(0)
        rows = []
        for index in range(count):
            prompt = torch.randint(1, 96, (1, prompt_length + index), generator=generator)
            answer = greedy(target, prompt, new_tokens, suppress_tokens=[96])
            mask = [0] * prompt.shape[1] + [1] * len(answer)
            rows.append({"input_ids": prompt[0].tolist() + answer, "loss_mask": mask})
        WRITTEN[key] = rows
    return copy.deepcopy(WRITTEN[key])


def make_trainer(
    target, tmp_path, draft=None, rows=None, eval_rows=None, compute_metrics=None, **overrides
) -> DFlashTrainer:
    values = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_muon": False,
        "slot_weights": "decay",
        "anchors_per_sample": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return DFlashTrainer(
        model=make_draft(target) if draft is None else draft,
        target=target,
        args=DFlashTrainingArguments(**{**values, **overrides}),
        train_dataset=rows_of(target) if rows is None else rows,
        eval_dataset=eval_rows,
        compute_metrics=compute_metrics,
    )


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gradients_of(trainer: DFlashTrainer, micro_batches: list[list[int]]) -> dict[str, torch.Tensor]:
    """Gradient of one optimizer step whose rows come in these micro-batches, through Trainer's own calls."""
    collate = DFlashCollator()
    batches = [collate([trainer.train_dataset[index] for index in indices]) for indices in micro_batches]
    trainer.model.zero_grad()
    _, total = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = len(batches)
    for batch in batches:
        trainer.training_step(trainer.model, batch, total)
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


class StopAt(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class RecordElapsed(TrainerCallback):
    """Notes the used time before every step."""

    def __init__(self, budget, seen):
        self.budget, self.seen = budget, seen

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append(self.budget.elapsed_s)
