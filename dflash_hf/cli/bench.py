"""`dflash-hf bench`: measure training steps, decoding with a draft, and the regeneration of responses."""

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
    help="Measure the time of a training step, the speed-up of a draft, and the speed of regenerating responses.",
    no_args_is_help=True,
)
bench.command(cls=Command)(decode)
bench.command(cls=Command)(regenerate)


@bench.command(cls=Command)
def train(
    context: typer.Context,
    shapes: Annotated[str, typer.Option(help=f"Shapes to start from: {', '.join(SHAPES)}.")] = "smollm2-135m",
    rows: Annotated[int | None, typer.Option(help="Rows per step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    anchors: Annotated[int | None, typer.Option(help="Blocks per row.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents that are packed into a row.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Slots per block, the anchor included.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers of the draft.")] = None,
    num_target_layers: Annotated[
        int | None, typer.Option(help="Number of target layers that the draft reads.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Hidden size of target and draft.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Intermediate size of the MLPs.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Number of key-value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Dimension of a head.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    target_layers: Annotated[
        int | None, typer.Option(help="Number of layers of the target. With 0, random hidden states replace it.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of timed steps, after a warm-up step.")] = 5,
    against: Annotated[
        str | None, typer.Option(help="Pass reference to measure the plain implementation, too.")
    ] = None,
    block_attention: Annotated[
        str, typer.Option(help="Attention of the blocks: auto, flex, structured or dense.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Device; default: an accelerator if there is one, else the CPU.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads of each process.")] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(help="Peak throughput of the device in matrix products, to print the share that is used."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to which the results are written, too.")
    ] = None,
) -> None:
    """Measure time and peak memory of a training step with random weights of given shapes."""
    import torch

    from ..benchmarks.training_step import measure_steps

    if shapes not in SHAPES:
        raise ValueError(f"--shapes {shapes!r} is not known. Pass one of {', '.join(SHAPES)}.")
    if against not in (None, "reference"):
        raise ValueError(f"--against {against!r} must be 'reference'. Pass that, or leave the option out.")
    names = [field.name for field in fields(StepShapes)]
    given = {name: context.params[name] for name in names if context.params[name] is not None}
    chosen = replace(SHAPES[shapes], **given)
    for name in names:
        minimum = 0 if name == "target_layers" else 1
        if getattr(chosen, name) < minimum:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(chosen, name)} must be at least {minimum}. Pass a larger number."
            )
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
    """Print the table of the measured implementations."""
    slots = shapes.rows * shapes.anchors * shapes.block_size
    table = Table(title=f"{shapes.rows} rows × {shapes.length} tokens, {slots:,} slots, {device}, median of {steps}")
    table.add_column("seconds per step")
    for name in measured:
        table.add_column(name, justify="right")
    for phase in PHASES:
        table.add_row(phase, *(f"{measurement.phase_s[phase]:.3f}" for measurement in measured.values()))
    table.add_row("forward + loss + backward", *(f"{item.draft_s:.3f}" for item in measured.values()))
    table.add_row("  the same in CPU seconds", *(f"{item.draft_cpu_s:.3f}" for item in measured.values()))
    table.add_row(
        "peak memory above the models, MiB", *(f"{item.peak_bytes / 2**20:,.0f}" for item in measured.values())
    )
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
