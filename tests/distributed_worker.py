"""
What test_distributed.py compares: tiny drafts trained in one process, or in the ranks of a launch of this file.

    torchrun --nproc-per-node 2 tests/distributed_worker.py <output folder>

Each scenario takes a folder and the number of ranks, and returns what rank 0 ends up with.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import torch
import torch.distributed as dist
from accelerate.state import DistributedType
from conftest import make_draft, make_target
from hub_stand_in import HubStandIn
from safetensors.torch import load
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from training_runs import rows_of
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.data.collator import DFlashCollator
from dflash_hf.training.optimizer import MuonWithAdamW

ROWS = 4
# Fields of the drafts of scenarios whose names end like these.
KINDS: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6},
    "tables": {"selector_rank": 4, "selector_top_k": 6, "selector_factored": False, "attention_sinks": True},
    "dspark": {
        "sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "rnn", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "learned_mask_embedding": True,
    },
    "vocabulary": {"draft_vocab_size": 40, "markov_rank": 4, "markov_head_type": "gated"},
}  # fmt: skip
FSDP = {
    "fsdp": True,
    "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": "DFlashDecoderLayer"},
}
SHARDED_FSDP = {"fsdp": True, "fsdp_config": {**FSDP["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}
MUON = {"use_muon": True, "learning_rate": 1e-2}


class AcceleratorArguments(DFlashTrainingArguments):
    """accelerate shards over accelerators only; the ranks on a CPU say that they are some."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.distributed_state.distributed_type = DistributedType.MULTI_GPU


def uneven_rows(target) -> list[dict[str, Any]]:
    """Rows of different lengths, one with few supervised tokens, one with a single block of a single slot."""
    rows = rows_of(target, count=ROWS)
    rows[1]["loss_mask"] = [0] * 25 + rows[1]["loss_mask"][25:]
    rows[2]["input_ids"], rows[2]["loss_mask"] = rows[2]["input_ids"][:9], [0] * 8 + [1]
    return rows


def make_trainer(out: Path, ranks: int, draft=None, target=None, rows=None, **overrides: Any) -> DFlashTrainer:
    """A step takes all rows, whatever the number of ranks; its weights then differ by as much as its gradients."""
    target = make_target() if target is None else target
    rows = uneven_rows(make_target()) if rows is None else rows
    values = {
        "output_dir": str(out),
        "max_steps": 3,
        "per_device_train_batch_size": ROWS // ranks // overrides.get("gradient_accumulation_steps", 1),
        "per_device_eval_batch_size": 2,
        "eval_serving": True,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "anchors_per_sample": 8,
        "slot_weights": "decay",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    draft = make_draft(target) if draft is None else draft
    arguments = (
        AcceleratorArguments if "fsdp" in overrides or draft.tp_size not in (None, 1) else DFlashTrainingArguments
    )
    return DFlashTrainer(
        model=draft,
        target=target,
        args=arguments(**{**values, **overrides}),
        train_dataset=rows,
        eval_dataset=[*rows, rows[0]],  # five rows: the last batch of two ranks is uneven
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def results_of(trainer: DFlashTrainer) -> dict[str, Any]:
    """Weights, what was logged in each step, the metrics of an evaluation, and what the saved folder gives."""
    metrics = trainer.evaluate()
    trainer.save_model()
    return {
        "weights": {name: whole(parameter) for name, parameter in trainer.draft.named_parameters()},
        "logs": [
            {name: entry[name] for name in ("loss", "acceptance_length", "grad_norm")}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
        "metrics": {name: value for name, value in metrics.items() if "loss" in name or "acc" in name},
        "wrapper": type(trainer.model_wrapped).__name__,
        "dtypes": {str(parameter.dtype) for parameter in trainer.draft.parameters()},
    }


def trained(out: Path, ranks: int, **kwargs: Any) -> dict[str, Any]:
    trainer = make_trainer(out, ranks, **kwargs)
    trainer.train()
    return results_of(trainer)


def fully_sharded(out: Path, ranks: int, **kwargs: Any) -> dict[str, Any]:
    """Evaluated when training starts; before that it cannot be."""
    trainer = make_trainer(out, ranks, eval_strategy="steps", eval_steps=3, eval_on_start=True, **kwargs)
    refusal = None
    if ranks > 1:
        try:
            trainer.evaluate()
        except RuntimeError as error:
            refusal = str(error)
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    return {**results_of(trainer), "refusal": refusal, "first_eval_loss": first["eval_loss"]}


def resumed(out: Path, ranks: int, **kwargs: Any) -> dict[str, Any]:
    """Four steps; and, in a new trainer, the last two of them from the checkpoint of the second one."""
    kwargs = {**kwargs, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    found = trained(out, ranks, **kwargs)
    trainer = make_trainer(out, ranks, **copy.deepcopy(kwargs))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {**found, "resumed": results_of(trainer)}


def gradients(out: Path, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Of one step through Trainer's own calls, where the second half of the rows, or all, have nothing supervised."""
    trainer = make_trainer(out, ranks)
    rank = dist.get_rank() if ranks > 1 else 0
    model = trainer.accelerator.prepare_model(trainer.model)
    found = {}
    for name, num_supervised in (("half", 2), ("none", 0)):
        rows = [
            row if index < num_supervised else {**row, "supervised_mask": [False] * len(row["input_ids"])}
            for index, row in enumerate(trainer.train_dataset)
        ]
        share = len(rows) // ranks
        batch = DFlashCollator()(rows[share * rank : share * (rank + 1)])
        model.zero_grad()
        (batch,), total = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        loss = trainer.training_step(model, batch, total)
        found[name] = {key: parameter.grad.clone() for key, parameter in trainer.draft.named_parameters()}
        found[name]["loss"] = trainer.accelerator.gather(loss).mean()
    return found


def clocks(out: Path, ranks: int) -> list[Any]:
    """Of a run that ends by the clock: the used time and the last weights of every rank."""
    trainer = make_trainer(
        out, ranks, max_steps=-1, max_train_minutes=0.005, lr_scheduler_type="linear", learning_rate=0.1
    )
    trainer.train()
    mine = (trainer.state.global_step, trainer.clock.elapsed_s, trainer.draft.norm.weight.tolist())
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    return everyone


def muon_steps(out: Path, ranks: int) -> dict[str, Any]:
    """Weights after three steps, plain and sharded, with the same gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 9))
    sharded = copy.deepcopy(plain)
    for module in (*sharded, sharded):
        fully_shard(module)
    optimizers = [MuonWithAdamW(model, lr=0.1, weight_decay=0.1) for model in (plain, sharded)]
    for _ in range(3):
        for parameter, part in zip(plain.parameters(), sharded.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            part.grad = distribute_tensor(parameter.grad, part.device_mesh, part.placements)
        for optimizer in optimizers:
            optimizer.step()
    momentum = [state["momentum_buffer"] for state in optimizers[1].state.values() if "momentum_buffer" in state]
    return {
        "plain": [parameter.detach() for parameter in plain.parameters()],
        "sharded": [whole(parameter) for parameter in sharded.parameters()],
        "momentum_is_sharded": [buffer.placements[0].is_shard() for buffer in momentum],
    }


def tensor_parallel_draft(out: Path, ranks: int, **overrides: Any) -> DFlashDraftModel:
    """A draft that was saved and loaded for two ranks; the same draft in one process."""
    draft = make_draft(make_target(), **overrides)
    if ranks == 1:
        return draft
    if dist.get_rank() == 0:
        draft.save_pretrained(out / "draft")
    dist.barrier()
    return DFlashDraftModel.from_pretrained(
        out / "draft", target=make_target(), distributed_config=DistributedConfig(tp_size=ranks)
    ).train()


def tensor_parallel_passes(out: Path, ranks: int) -> dict[str, Any]:
    """Outputs and gradients of two passes, as in a step of two micro-batches; and the draft saved again."""
    draft = tensor_parallel_draft(out, ranks, attention_bias=True)
    torch.manual_seed(5)
    outputs = []
    for _ in range(2):
        noise_embeds, context_hidden_states = torch.randn(2, 8, 32), torch.randn(2, 6, 64)
        output = draft(noise_embeds=noise_embeds, context_hidden_states=context_hidden_states).last_hidden_state
        (output * torch.linspace(-1, 1, 32)).pow(2).mean().backward()
        outputs.append(output.detach())
    draft.save_pretrained(out / "again")
    return {
        "outputs": torch.stack(outputs),
        "gradients": {name: whole(parameter.grad) for name, parameter in draft.named_parameters()},
        "split": [name for name, parameter in draft.named_parameters() if isinstance(parameter, DTensor)],
    }


def tensor_parallel_trained(out: Path, ranks: int, kind: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """The ranks see the same rows: two rows a micro-batch, two micro-batches a step."""
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2} if ranks > 1 else {}
    fields = {} if kind is None else KINDS[kind]
    return trained(out, ranks, draft=tensor_parallel_draft(out, ranks, **fields), **split, **kwargs)


def kind_trained(out: Path, ranks: int, kind: str, **kwargs: Any) -> dict[str, Any]:
    return trained(out, ranks, draft=make_draft(make_target(), **KINDS[kind]), **kwargs)


def with_fully_sharded_target(out: Path, ranks: int) -> dict[str, Any]:
    target = make_target(tie_word_embeddings=True)
    if ranks > 1:
        for module in (*target.model.layers, target):
            fully_shard(module)
        target(torch.ones(1, 3, dtype=torch.long))  # leaves the weights of the root gathered
    draft = make_draft(make_target(tie_word_embeddings=True))
    found = trained(out, ranks, draft=draft, target=target, soft_labels=True)  # which needs the target's logits, too
    found["target_has_gradients"] = any(parameter.grad is not None for parameter in target.parameters())
    return found


def with_tensor_parallel_target(out: Path, ranks: int) -> dict[str, Any]:
    target = make_target()
    if ranks > 1:
        if dist.get_rank() == 0:
            target.save_pretrained(out / "target")
        dist.barrier()
        target = AutoModelForCausalLM.from_pretrained(
            out / "target", distributed_config=DistributedConfig(tp_size=ranks)
        )
    found = trained(
        out, ranks, target=target, draft=tensor_parallel_draft(out, ranks), per_device_train_batch_size=ROWS
    )
    if ranks > 1:
        try:
            make_trainer(out, ranks, target=target)
        except ValueError as error:
            found["mismatch"] = str(error)
    return found


def pushed(out: Path, ranks: int) -> dict[str, Any]:
    """A sharded run that is pushed, each rank with a Hub of its own: what is there, and how often each rank asked."""
    draft = make_draft(make_target())
    draft.config.target_name_or_path = "org/target"
    saving = {"save_strategy": "steps", "save_steps": 3, "push_to_hub": True, "hub_model_id": "org/trained"}
    with HubStandIn() as hub, pytest.MonkeyPatch.context() as patch:
        hub.connect(patch, out / "home")
        trainer = make_trainer(out, ranks, draft=draft, **saving, **sharding(ranks, SHARDED_FSDP))
        trainer.train()
        in_progress = sorted(hub.repositories["org/trained"].files()) if dist.get_rank() == 0 else []
        trainer.push_to_hub(serving_repo="org/trained-DFlash")
        num_requests: list[Any] = [None] * ranks
        dist.all_gather_object(num_requests, len(hub.requests))
        files = {name: repository.files() for name, repository in hub.repositories.items()}
    return {
        "weights": {name: whole(parameter) for name, parameter in trainer.draft.named_parameters()},
        "in_progress": in_progress,
        "files": {name: sorted(content) for name, content in files.items()},
        "tensors": {name: load(content["model.safetensors"]) for name, content in files.items()},
        "num_requests": num_requests,
    }


SCENARIOS: dict[str, Callable[[Path, int], Any]] = {
    "ddp": trained,
    "ddp_accumulated": lambda out, ranks: trained(
        out, ranks, gradient_accumulation_steps=2 if ranks > 1 else 1, slot_weights="dpace"
    ),
    "ddp_bf16": lambda out, ranks: trained(out, ranks, bf16=True, learning_rate=0.1),
    "ddp_dflash2": lambda out, ranks: kind_trained(out, ranks, "dflash2"),
    "ddp_tables": lambda out, ranks: kind_trained(out, ranks, "tables"),
    "ddp_dspark": lambda out, ranks: kind_trained(out, ranks, "dspark", l1_weight=0.9),
    "ddp_vocabulary": lambda out, ranks: kind_trained(out, ranks, "vocabulary", slot_weights="dpace"),
    "fsdp_dflash2": lambda out, ranks: kind_trained(out, ranks, "dflash2", **sharding(ranks)),
    "fsdp_dspark": lambda out, ranks: kind_trained(out, ranks, "dspark", l1_weight=0.9, **sharding(ranks)),
    "tensor_parallel_dflash2": lambda out, ranks: tensor_parallel_trained(out, ranks, "dflash2"),
    "tensor_parallel_tables": lambda out, ranks: tensor_parallel_trained(out, ranks, "tables"),
    "ddp_resumed": lambda out, ranks: resumed(out, ranks, **ADAMW),
    "gradients": gradients,
    "fully_sharded_target": with_fully_sharded_target,
    "tensor_parallel_passes": tensor_parallel_passes,
    "tensor_parallel": tensor_parallel_trained,
    "tensor_parallel_muon": lambda out, ranks: tensor_parallel_trained(out, ranks, max_steps=1, **MUON),
    "tensor_parallel_target": with_tensor_parallel_target,
    "fsdp": lambda out, ranks: fully_sharded(
        out, ranks, gradient_accumulation_steps=2 if ranks > 1 else 1, **sharding(ranks)
    ),
    "fsdp_checkpointing": lambda out, ranks: trained(out, ranks, gradient_checkpointing=ranks > 1, **sharding(ranks)),
    "fsdp_bf16": lambda out, ranks: trained(out, ranks, bf16=True, learning_rate=0.1, **sharding(ranks)),
    "fsdp_muon": lambda out, ranks: resumed(out, ranks, **MUON, **sharding(ranks)),
    "fsdp_sharded_checkpoints": lambda out, ranks: resumed(out, ranks, **ADAMW, **sharding(ranks, SHARDED_FSDP)),
}
RANKS_ONLY: dict[str, Callable[[Path, int], Any]] = {"clocks": clocks, "muon_steps": muon_steps, "pushed": pushed}


def sharding(ranks: int, settings: dict[str, Any] = FSDP) -> dict[str, Any]:
    return copy.deepcopy(settings) if ranks > 1 else {}


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    results = {}
    for name, scenario in {**RANKS_ONLY, **SCENARIOS}.items():
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate leaves it set
        results[name] = scenario(out / name, dist.get_world_size())
        dist.barrier()
    if dist.get_rank() == 0:
        torch.save(results, out / "results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
