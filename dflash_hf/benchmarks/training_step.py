"""Benchmark of a training step: time by phase and peak memory, compared with a plain implementation."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from ..blocks.batch import TokenBatch
from ..blocks.forward import block_hidden_states, block_losses
from ..blocks.losses import decay_weights, default_loss_decay
from ..blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
from ..model.modeling_dflash import DFlashDraftModel
from ..target.hidden_states import target_hidden_states
from .shapes import PHASES, StepShapes

STAND_IN_LAYERS = 8  # layers of a target that only provides embedding and head


@dataclass
class StepMeasurement:
    """
    Measured steps of one implementation.

    Args:
        phase_s (`dict[str, float]`): median wall seconds of each phase. The phase `loss` contains the block plan.
        draft_s (`float`): median wall seconds of forward, loss and backward of the draft together.
        draft_cpu_s (`float`): the same in CPU seconds of the process, which other load disturbs less.
        peak_bytes (`int`): greatest memory during the steps, minus that of models, optimizer and inputs.
        losses (`list[float]`): loss of each step, which is the same for every implementation.
    """

    phase_s: dict[str, float]
    draft_s: float
    draft_cpu_s: float
    peak_bytes: int
    losses: list[float]


class _Clock:
    """Seconds of the phases of one step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside the context to a phase."""
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        """Read the clock after the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Step:
    """A training step with given shapes, of this package (`"ours"`) or of the plain implementation (`"reference"`)."""

    def __init__(self, shapes: StepShapes, implementation: str, device: str, block_attention: str) -> None:
        self.shapes, self.implementation, self.device = shapes, implementation, torch.device(device)
        self.block_attention = block_attention
        torch.manual_seed(0)
        target_config = LlamaConfig(
            vocab_size=shapes.vocab_size,
            hidden_size=shapes.hidden_size,
            intermediate_size=shapes.intermediate_size if shapes.target_layers else shapes.hidden_size,
            num_hidden_layers=shapes.target_layers or STAND_IN_LAYERS,
            num_attention_heads=shapes.heads,
            num_key_value_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
            tie_word_embeddings=True,
            dtype=torch.bfloat16,
        )
        with torch.device(self.device):
            self.target = nn.Module.to(LlamaForCausalLM(target_config), torch.bfloat16).eval()
            self.draft = DFlashDraftModel.from_target(
                self.target,
                num_hidden_layers=shapes.layers,
                num_target_layers=shapes.num_target_layers,
                block_size=shapes.block_size,
                intermediate_size=shapes.intermediate_size,
                mask_token_id=shapes.vocab_size - 1,
            ).train()
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=1e-4)
        for parameter in self.draft.parameters():  # this creates the optimizer state before memory is measured
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1)
        size = (shapes.rows, shapes.length)
        documents = torch.arange(shapes.length, device=self.device) * shapes.documents // shapes.length
        self.batch = TokenBatch(
            torch.randint(0, shapes.vocab_size - 1, size, generator=generator).to(self.device),
            torch.ones(size, dtype=torch.bool, device=self.device),
            segment_ids=documents.repeat(shapes.rows, 1) if shapes.documents > 1 else None,
        )
        if not shapes.target_layers:
            width = shapes.num_target_layers * shapes.hidden_size
            states = torch.randn(*size, width, generator=generator).to(self.device, torch.bfloat16)
            self.batch = self.batch.with_hidden_states(states)
        self.count = 0
        self.start_bytes = self._memory_bytes(peak=False)

    def _memory_bytes(self, *, peak: bool) -> int:
        """Return the memory of the device, or of the process on a CPU, now or at its peak."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        if not peak:
            return psutil.Process().memory_info().rss
        import resource  # Windows does not have this module

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_bytes(self) -> int:
        """Return the peak memory above that before the first step."""
        return self._memory_bytes(peak=True) - self.start_bytes

    def run(self) -> dict[str, Any]:
        """Run one step, and return its measurements."""
        clock = _Clock(self.device)
        batch = self.batch
        if batch.hidden_states is None:
            with clock.phase("target"):
                layer_ids = self.draft.config.target_layer_ids or []
                states = target_hidden_states(self.target, batch.input_ids, batch.valid, layer_ids)
                batch = batch.with_hidden_states(states)
        cpu_start = time.process_time()
        loss_of = self._our_loss if self.implementation == "ours" else self._plain_loss
        loss = loss_of(batch, clock)
        with clock.phase("backward"):
            loss.backward()
        cpu_s = time.process_time() - cpu_start
        with clock.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.count += 1
        return {"phases": clock.seconds, "draft_cpu_s": cpu_s, "loss": loss.item(), "peak_bytes": self.peak_bytes()}

    def _plan(self) -> DFlashBatchPlan:
        """Sample the anchors of the step."""
        return build_dflash_batch_plan(
            self.batch.valid,
            torch.arange(self.shapes.rows, device=self.device),
            anchors_per_sample=self.shapes.anchors,
            gamma=self.shapes.block_size - 1,
            optimizer_step=self.count,
            seed=0,
            segment_ids=self.batch.segment_ids,
            replacement=False,
        )

    def _our_loss(self, batch: TokenBatch, clock: _Clock) -> torch.Tensor:
        """Compute the loss as the trainer does."""

        def forward(**kwargs: Any) -> Any:
            with clock.phase("forward"), torch.autocast(self.device.type, torch.bfloat16):
                return self.draft(**kwargs)

        with clock.phase("loss"):
            losses = block_losses(forward, self.draft, self._plan(), batch, block_attention=self.block_attention)
            loss = (losses.weights * losses.loss).sum() / losses.weights.sum()
        clock.seconds["loss"] -= clock.seconds["forward"]
        return loss

    def _plain_loss(self, batch: TokenBatch, clock: _Clock) -> torch.Tensor:
        """Compute the same loss with a dense mask, all logits at once, and autograd through everything."""
        plan = self._plan()
        with clock.phase("forward"), torch.autocast(self.device.type, torch.bfloat16):
            hidden_states = block_hidden_states(self.draft, self.draft, plan, batch, block_attention="dense")
        with clock.phase("loss"):
            hidden_states = hidden_states[plan.loss_mask]
            rows = plan.sample_rows[:, None].expand_as(plan.loss_mask)
            labels = batch.input_ids[rows[plan.loss_mask], plan.label_positions[plan.loss_mask]]
            logits = self.draft.compute_logits(hidden_states)
            cross_entropy = functional.cross_entropy(logits.float(), labels, reduction="none")
            weights = decay_weights(plan.loss_mask, default_loss_decay(plan.block_size))
            loss = (weights[plan.loss_mask] * cross_entropy).sum() / weights.sum()
        return loss


def _serve(pipe: Connection, shapes: StepShapes, implementation: str, kwargs: dict[str, Any]) -> None:
    """Run steps in a process of its own whenever the pipe asks for one."""
    threads = kwargs.pop("threads")
    if threads is not None:
        torch.set_num_threads(threads)
    step = _Step(shapes, implementation, **kwargs)
    pipe.send("ready")
    while pipe.recv() == "step":
        pipe.send(step.run())


def measure_steps(
    shapes: StepShapes,
    *,
    steps: int = 5,
    against_reference: bool = False,
    device: str = "cpu",
    block_attention: str = "auto",
    threads: int | None = None,
) -> dict[str, StepMeasurement]:
    """
    Measure training steps.

    Each implementation runs in a process of its own, and the processes alternate step by step.

    Args:
        shapes ([`StepShapes`]): shapes of target, draft and batch. All weights are random.
        steps (`int`, defaults to 5): number of timed steps, after a warm-up step.
        against_reference (`bool`, defaults to `False`): measure the plain implementation, too.
        device (`str`, defaults to `"cpu"`): device of the models.
        block_attention (`str`, defaults to `"auto"`): see [`DFlashTrainingArguments`].
        threads (`int`, *optional*): number of CPU threads of each process.

    Returns:
        `dict[str, StepMeasurement]`: measurements of `"ours"`, and of `"reference"` with `against_reference=True`.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    records: dict[str, list[dict[str, Any]]] = {}
    kwargs = {"device": device, "block_attention": block_attention, "threads": threads}
    for name in ("ours", "reference") if against_reference else ("ours",):
        pipes[name], other_end = context.Pipe()
        context.Process(target=_serve, args=(other_end, shapes, name, kwargs), daemon=True).start()
        records[name] = []
    for pipe in pipes.values():
        pipe.recv()
    for _ in range(steps + 1):
        for name, pipe in pipes.items():
            pipe.send("step")
            records[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send("end")
    return {name: _summarize(record) for name, record in records.items()}


def _summarize(records: list[dict[str, Any]]) -> StepMeasurement:
    """Compute the medians over all steps but the first."""
    timed = records[1:]
    return StepMeasurement(
        phase_s={name: statistics.median(record["phases"][name] for record in timed) for name in PHASES},
        draft_s=statistics.median(
            sum(record["phases"][name] for name in ("forward", "loss", "backward")) for record in timed
        ),
        draft_cpu_s=statistics.median(record["draft_cpu_s"] for record in timed),
        peak_bytes=max(record["peak_bytes"] for record in records),
        losses=[record["loss"] for record in records],
    )
