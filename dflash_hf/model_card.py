"""The model card of a draft: what it is for, how it was made, what was measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from .configuration_dflash import DFlashConfig
from .evaluation import Summary
from .training_args import DFlashTrainingArguments

TEMPLATE = Path(__file__).with_name("model_card_template.md")


def environment() -> dict[str, str]:
    """Hardware and software a measurement was made with, in words."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    cpu_info = Path("/proc/cpuinfo")  # the only place where Linux names the processor
    lines = cpu_info.read_text().splitlines() if cpu_info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = next(iter(names), platform.processor() or platform.machine())
    hardware = torch.cuda.get_device_name() if accelerator is not None and accelerator.type == "cuda" else cpu
    packages = ("torch", "transformers", "dflash-hf")
    return {
        "hardware": f"{hardware}, {torch.get_num_threads()} CPU threads",
        "software": ", ".join(f"{name} {version(name)}" for name in packages),
    }


def changed_arguments(args: DFlashTrainingArguments) -> dict[str, Any]:
    """Training arguments that differ from their defaults and bear on the result: no folders, reports or schedules of
    saving."""
    default = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    skipped = {"output_dir", "logging_dir", "run_name", "disable_tqdm", "report_to", "use_cpu", "mixed_precision"}
    if args.max_train_minutes is not None:
        skipped.add("max_steps")  # the clock ended the run
    changed = {}
    for name, value in vars(args).items():
        if name in skipped or name.startswith(("_", "logging", "save", "eval", "hub", "push")):
            continue
        if value != getattr(default, name, None) and isinstance(value, str | int | float):
            changed[name] = getattr(value, "value", value)
    return changed


def write_model_card(
    folder: str | Path,
    config: DFlashConfig,
    summary: Summary,
    *,
    protocol: str,
    training: Mapping[str, Any],
    base_model: str | None = None,
    draft_name: str | None = None,
    picture: str | None = None,
) -> ModelCard:
    """
    Write `README.md` into a draft's folder.

    Args:
        folder (`str` or `Path`): where the draft is saved.
        config ([`DFlashConfig`]): of the draft.
        summary ([`Summary`]): what was measured.
        protocol (`str`): prompts, temperature, length, dtype, in one or two sentences.
        training (`Mapping`): how it was trained: data, arguments, steps.
        base_model (`str`, *optional*): Hub name of the target; default: the one in the configuration.
        draft_name (`str`, *optional*): heading, and what the usage snippet loads; default: the folder's name.
        picture (`str`, *optional*): file name of the per-slot picture inside the folder.

    Returns:
        `ModelCard`: what was written.
    """
    folder = Path(folder)
    name = base_model or config.target_name_or_path or "the target"
    slots = "  ".join(f"{slot}: {share:.0%}" for slot, share in enumerate(summary.slot_acceptance, start=1))
    where = environment()
    card = ModelCard.from_template(
        ModelCardData(
            base_model=name if "/" in name and not Path(name).exists() else None,
            library_name="transformers",
            license="apache-2.0",
            pipeline_tag="text-generation",
            tags=["dflash", "speculative-decoding", "draft-model"],
        ),
        template_path=str(TEMPLATE),
        title=draft_name or folder.resolve().name,
        base_model_name=name,
        draft_name=draft_name or folder.resolve().name,
        block_size=config.block_size,
        num_drafted=config.block_size - 1,
        protocol=protocol,
        picture=picture,
        measured=[
            ("acceptance length", f"{summary.accept_len:.2f} of {config.block_size}"),
            ("slots 1 … k all accepted", slots),
            (
                "plain → with the draft",
                f"{summary.plain_tokens_per_s:.1f} → {summary.drafted_tokens_per_s:.1f} tokens/s",
            ),
            ("speed-up (median of the prompts)", f"{summary.speed_up:.2f}×"),
            ("answers identical token by token", f"{summary.num_identical} of {summary.num_prompts}"),
            *where.items(),
        ],
        geometry=[
            ("draft layers", config.num_hidden_layers),
            ("target layers read", f"{config.target_layer_ids} of {config.target_num_hidden_layers}, counted from 0"),
            ("block size", config.block_size),
            ("mask token", config.mask_token_id),
            ("target revision", config.target_revision or "not pinned"),
            ("chat-template arguments", config.chat_template_kwargs or "none"),
        ],
        training=list(training.items()),
    )
    card.save(folder / "README.md")
    return card


def draw_slot_acceptance(summary: Summary, path: str | Path) -> None:
    """
    Draw the share of verify passes in which the first k drafted tokens were all accepted.

    Args:
        summary ([`Summary`]): what was measured.
        path (`str` or `Path`): PNG to write.
    """
    from matplotlib.figure import Figure  # an extra; the rest of the package works without it

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    slots = range(1, len(summary.slot_acceptance) + 1)
    bars = axes.bar(slots, summary.slot_acceptance, color="#4c78a8")
    axes.bar_label(bars, [f"{share:.0%}" for share in summary.slot_acceptance], padding=2, fontsize=9)
    axes.set(
        xlabel="slot k",
        ylabel="slots 1 … k accepted",
        ylim=(0, 1),
        xticks=list(slots),
        title=f"Acceptance length {summary.accept_len:.2f}, speed-up {summary.speed_up:.2f}×",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
