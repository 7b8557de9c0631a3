"""`dflash-hf bench`: what a training step costs, and what decoding with a draft or refilled slots gains."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..benchmarks.shapes import PHASES, SHAPES, StepShapes
from .bench_decode import decode
from .bench_regenerate import regenerate
from .command import Command

if TYPE_CHECKING:
    from ..benchmarks.training_step import StepMeasurement

bench = typer.Typer(
    help="Measure what a training step costs, what decoding with a draft gains, and how fast prompts are answered.",
    no_args_is_help=True,
)
bench.command(cls=Command)(decode)
bench.command(cls=Command)(regenerate)


@bench.command(cls=Command)
def train(
    context: typer.Context,
    shapes: Annotated[str, typer.Option(help=f"Start from these shapes: {', '.join(SHAPES)}.")] = "smollm2-135m",
    rows: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a row.")] = None,
    anchors: Annotated[int | None, typer.Option(help="Blocks a row.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents packed into a row.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Slots a block, the anchor included.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the draft.")] = None,
    num_target_layers: Annotated[int | None, typer.Option(help="Target layers the draft reads.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width of target and draft.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width inside the MLPs.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Vocabulary.")] = None,
    target_layers: Annotated[int | None, typer.Option(help="Depth of the target; 0: random states instead.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps, after one that warms up.")] = 5,
    against: Annotated[str | None, typer.Option(help="'reference': also the plain implementation.")] = None,
    block_attention: Annotated[str, typer.Option(help="auto, flex, structured or dense.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: an accelerator if there is one, else the CPU.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each process.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="The device's matrix peak, to print the share of it.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
) -> None:
    """Time a training step by phase, with its peak memory, for given shapes and random weights."""
    import torch

    from ..benchmarks.training_step import measure_steps

    if shapes not in SHAPES:
        raise ValueError(f"--shapes {shapes!r} must be one of {', '.join(SHAPES)}.")
    if against not in (None, "reference"):
        raise ValueError(f"--against {against!r} must be 'reference'.")
    names = [field.name for field in fields(StepShapes)]
    given = {name: context.params[name] for name in names if context.params[name] is not None}
    chosen = replace(SHAPES[shapes], **given)
    for name in names:
        minimum = 0 if name == "target_layers" else 1
        if getattr(chosen, name) < minimum:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(chosen, name)} must be at least {minimum}.")
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator.type if accelerator is not None else "cpu"
    console = Console()
    with console.status(f"{steps + 1} steps …"):
        measured = measure_steps(
            chosen,
            steps=steps,
            against_reference=against == "reference",
            device=device,
            block_attention=block_attention,
            threads=threads,
        )
    _show(chosen, measured, steps, device, peak_tflops, console)
    if json_file is not None:
        record = {name: asdict(measurement) for name, measurement in measured.items()}
        json_file.write_text(json.dumps({"shapes": asdict(chosen), "device": device, **record}, indent=1))


def _show(
    shapes: StepShapes,
    measured: dict[str, StepMeasurement],
    steps: int,
    device: str,
    peak_tflops: float | None,
    console: Console,
) -> None:
    slots = shapes.rows * shapes.anchors * shapes.block_size
    table = Table(title=f"{shapes.rows} rows × {shapes.length} tokens, {slots:,} slots, {device}, median of {steps}")
    table.add_column("seconds a step")
    for name in measured:
        table.add_column(name, justify="right")
    for phase in PHASES:
        table.add_row(phase, *(f"{measurement.phase_s[phase]:.3f}" for measurement in measured.values()))
    table.add_row("forward + loss + backward", *(f"{item.draft_s:.3f}" for item in measured.values()))
    table.add_row("  CPU seconds of it", *(f"{item.draft_cpu_s:.3f}" for item in measured.values()))
    table.add_row("peak memory beyond models, MiB", *(f"{item.peak_bytes / 2**20:,.0f}" for item in measured.values()))
    console.print(table)
    ours = measured["ours"]
    rate = shapes.matrix_flops / ours.draft_s / 1e12
    share = f", {rate / peak_tflops:.0%} of the peak" if peak_tflops else ""
    console.print(f"ours: {rate:.2f} TFLOP/s in matrix products{share}")
    if "reference" in measured:
        reference = measured["reference"]
        console.print(
            f"ours against reference: {ours.draft_s / reference.draft_s:.2f}× the time "
            f"({ours.draft_cpu_s / reference.draft_cpu_s:.2f}× in CPU seconds), "
            f"{ours.peak_bytes / reference.peak_bytes:.2f}× the peak memory"
        )
