"""The optimizer (Muon for matrices, AdamW for other weights), the clock of a run and its schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

# Weights with a row for each token, most of which have no gradient in a step.
VOCABULARY_TABLES = ("predecessor_codebook", "successor_codebook", "markov_w1.weight", "markov_w2.weight")


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Muon (orthogonalised updates) for 2-D weights and AdamW for norms, biases and tables over the vocabulary, at one
    learning rate.

    A sharded weight (FSDP2, tensor parallelism) gets the update of the unsharded weight: its gradient and momentum are
    gathered during its update, one matrix after another. Parameter groups and state are shared with the two inner
    optimizers, so that schedulers, checkpoints and `zero_grad` see one ordinary optimizer.

    Args:
        model (`nn.Module`): the model whose trainable parameters are optimised.
        lr (`float`): learning rate of both; the updates of Muon are scaled to the size of AdamW's.
        weight_decay (`float`, defaults to 0.0): weight decay of the 2-D weights.
        betas (`tuple[float, float]`), eps (`float`): arguments of AdamW.
        momentum (`float`, defaults to 0.95): momentum of Muon.

    Source: `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        is_matrix = {name: value.ndim == 2 and not name.endswith(VOCABULARY_TABLES) for name, value in trained.items()}
        matrices = [parameter for name, parameter in trained.items() if is_matrix[name]]
        others = [parameter for name, parameter in trained.items() if not is_matrix[name]]
        self._muon = torch.optim.Muon(
            [{"params": matrices}], lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW([{"params": others}], lr=lr, weight_decay=0.0, betas=betas, eps=eps)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})
        self._link()

    def _link(self) -> None:
        """Share groups and state with the inner optimizers; `load_state_dict` replaces both, so it is called again."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as [`torch.optim.Optimizer`] does, for both inner optimizers."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        self._adamw.step()
        return loss

    def _step_matrices(self) -> None:
        """Step Muon on one unsharded matrix after another; its update of a shard is not a shard of its update."""
        (group,) = groups = self._muon.param_groups
        for parameter in group["params"]:
            self._muon.param_groups = [{**group, "params": [parameter]}]
            if not isinstance(parameter, DTensor) or parameter.grad is None:
                self._muon.step()
                continue
            state: dict[str, DTensor] = self.state[parameter]
            sharded_gradient: Any = parameter.grad
            whole = [Replicate()] * parameter.device_mesh.ndim
            parameter.grad = sharded_gradient.redistribute(placements=whole)
            if "momentum_buffer" in state:
                state["momentum_buffer"] = state["momentum_buffer"].redistribute(placements=whole)
            self._muon.step()
            parameter.grad = sharded_gradient
            state["momentum_buffer"] = state["momentum_buffer"].redistribute(placements=parameter.placements)
        self._muon.param_groups = groups


def make_muon_with_adamw() -> type[MuonWithAdamW]:
    """Return the optimizer class in the form that Trainer calls with the model instead of parameter groups."""
    return MuonWithAdamW


class TrainingClock(TrainerCallback, ExportableState):
    """
    Measure the time of the optimizer steps of a run, and stop the run when an optional budget is used up.

    Evaluation, saving and data preparation do not count. In several processes with a budget, the clock of the first
    one is used by all, so that they stop and set the learning rate at the same step.

    Args:
        minutes (`float`, *optional*): the budget. Checkpoints record how much of it is used.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.minutes = minutes
        self.elapsed_s = 0.0
        self._step_start: float | None = None

    @property
    def progress(self) -> float:
        """`float`: used share of the budget, 0 to 1; 0 without a budget."""
        return 0.0 if self.minutes is None else min(self.elapsed_s / (60 * self.minutes), 1.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run finds the record of its checkpoint here, a new run its own state.
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        self.elapsed_s = saved["attributes"]["elapsed_s"] if saved else 0.0
        # A checkpoint of a run without a clock has no entry, and Trainer (transformers 5.24) updates only existing
        # ones.
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step_start is not None:
            self.elapsed_s += time.monotonic() - self._step_start
        if self.minutes is None:
            return
        if args.world_size > 1:
            self.elapsed_s = broadcast(torch.tensor(self.elapsed_s, dtype=torch.float64, device=args.device)).item()
        if self.progress >= 1.0:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {"args": {"minutes": self.minutes}, "attributes": {"elapsed_s": self.elapsed_s}}


def schedule_factor(progress: float, warmup: float, shape: str) -> float:
    """
    Return the learning rate at a point of the run as a share of its peak.

    Args:
        progress (`float`): used share of the run, 0 to 1.
        warmup (`float`): share of the run in which the learning rate rises from 0.
        shape (`str`): `"linear"`, `"cosine"` (both fall to 0) or `"constant"`.

    Returns:
        `float` in 0 … 1.

    Example:

    ```python
    >>> [round(schedule_factor(progress, 0.1, "linear"), 3) for progress in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]

    ```
    """
    if progress < warmup:
        return progress / warmup
    rest = (1 - progress) / (1 - warmup)
    return {"linear": rest, "cosine": 0.5 - 0.5 * math.cos(math.pi * rest), "constant": 1.0}[shape]
