"""Trainer of a DFlash draft: target states, plan, masked blocks and the loss over whole optimizer steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalPrediction
from transformers.utils import logging

from .batch_plan import DFlashBatchPlan, build_dflash_batch_plan
from .block_losses import BlockLosses, block_losses
from .data import PREPARED_COLUMNS, DFlashCollator, PreparedStream, prepare_rows
from .losses import decay_weights, default_loss_decay
from .metrics import row_statistics, summarize
from .modeling_dflash import DFlashDraftModel
from .optimization import TimeBudget, make_muon_with_adamw, schedule_factor
from .packing import documents_of, states_of_packed_rows
from .target import target_hidden_states
from .training_args import DFlashTrainingArguments

logger = logging.get_logger(__name__)

EVAL_PLAN_STEP = 0  # every evaluation looks at the same blocks


class DFlashTrainer(Trainer):
    """
    Train a draft on rows whose answers the target wrote.

    Args:
        model ([`DFlashDraftModel`]):
            The draft; tied to `target` here. Keep its weights in fp32 and use `bf16=True` in the arguments.
        target (`PreTrainedModel` or `str`):
            The live target, or its Hub name or folder. Put in evaluation mode, moved to the training device unless it
            was spread with `device_map`; never trained, never saved.
        args ([`DFlashTrainingArguments`]):
            Training arguments.
        train_dataset, eval_dataset (`datasets.Dataset`, `datasets.IterableDataset` or a sequence of rows, *optional*):
            Rows of `messages`, of `prompt` and `completion`, or of `input_ids` (with `loss_mask`). A stream
            (`IterableDataset`) is tokenised while it is read, needs `max_steps` and is repeated until then, all
            in one epoch; give `shuffle` a seed. A resumed run reads again what it has trained on. In several processes
            the last batch of an evaluation stream is filled up with rows that count twice.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The target's tokenizer; not needed for rows of `input_ids`.
        **kwargs:
            As in [`~transformers.Trainer`].

    Raises:
        ValueError: draft and target do not fit, no row is usable, a row contains the mask token or a token outside
            the target's embedding, or the target states of a stream are to be cached.
        TypeError: a data set is of a kind that cannot be used.

    Logged while training: `loss` (weighted cross-entropy) and `accept_len` on the trained blocks. Evaluation logs
    `eval_loss`, `eval_accept_len` and `eval_slot_accuracy_k`, the same for any batch size and number of workers.
    """

    args: DFlashTrainingArguments
    # The loss is divided by the sum over the whole accumulation window, so Trainer must not divide again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: DFlashDraftModel,
        target: PreTrainedModel | str,
        args: DFlashTrainingArguments,
        train_dataset: datasets.Dataset | datasets.IterableDataset | Sequence[Mapping[str, Any]] | None = None,
        eval_dataset: datasets.Dataset | datasets.IterableDataset | Sequence[Mapping[str, Any]] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(target, str):
            target = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        model.tie_target(target)
        # Not frozen with requires_grad_(False): nothing here asks for its gradients, and generate on a CPU would then
        # copy the whole head in every draft step (matmul folds a sliced input only if the weight requires a gradient).
        self.target = target.eval()
        eos = target.generation_config.eos_token_id if target.generation_config is not None else None
        self._data_kwargs: dict[str, Any] = {
            "max_length": args.max_length,
            "eos_token_ids": eos if isinstance(eos, list) else [eos] if eos is not None else [],
            "chat_template_kwargs": model.config.chat_template_kwargs,
            "forbidden_token_id": model.config.mask_token_id,
            "num_embeddings": model.config.vocab_size,
            "tokenizer": processing_class,
        }
        if args.use_muon and "optimizer_cls_and_kwargs" not in kwargs:
            kwargs["optimizer_cls_and_kwargs"] = (
                make_muon_with_adamw,
                {
                    "lr": args.learning_rate,
                    "weight_decay": args.weight_decay,
                    "betas": (args.adam_beta1, args.adam_beta2),
                    "eps": args.adam_epsilon,
                },
            )
        pad_token_id = processing_class.pad_token_id if processing_class is not None else None
        kwargs.setdefault("data_collator", DFlashCollator(pad_token_id or 0, args.padding_side))
        kwargs.setdefault("compute_metrics", self._evaluation_metrics)
        super().__init__(
            model=model,
            args=args,
            train_dataset=self._prepared(train_dataset, "train", args, is_training=True),
            eval_dataset=self._prepared(eval_dataset, "evaluation", args),
            processing_class=processing_class,
            **kwargs,
        )
        self.draft = model
        self.time_budget = TimeBudget(args.max_train_minutes) if args.max_train_minutes is not None else None
        if self.time_budget is not None:
            self.add_callback(self.time_budget)
        if getattr(target, "hf_device_map", None) is None and target.device != args.device:
            nn.Module.to(target, args.device)
        self._state_cache: dict[bytes, torch.Tensor] = {}
        self._train_statistics: torch.Tensor | None = None

    def _prepared(
        self, dataset: Any, description: str, args: DFlashTrainingArguments, is_training: bool = False
    ) -> Any:
        """Tokenised rows; several named evaluation sets stay a dict."""
        if isinstance(dataset, dict) and not is_training:
            return {name: self._prepared(part, f"{description} ({name})", args) for name, part in dataset.items()}
        if dataset is None:
            return None
        with args.main_process_first(desc=f"preparing the {description} set"):
            prepared = prepare_rows(
                dataset,
                **self._data_kwargs,
                description=description,
                is_quiet=not args.should_log,
                is_packed=is_training and args.packing,
                is_repeated=is_training,
            )
        if isinstance(prepared, PreparedStream) and args.cache_target_states is not None:
            raise ValueError(
                f"cache_target_states={args.cache_target_states!r} and the {description} set is a stream: states are "
                "cached before training, and a stream is read while training. Leave cache_target_states unset."
            )
        return prepared

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps Trainer's contract (columns that `remove_unused_columns=True` leaves): those of the collator."""
        self._signature_columns: Any = list(PREPARED_COLUMNS)

    # ---- target states ----

    def _states(self, input_ids: torch.Tensor, token_valid_mask: torch.Tensor) -> torch.Tensor:
        """Target states of a batch: out of the cache where all its rows are in it, else from the target."""
        layer_ids = self.draft.config.target_layer_ids or []
        if self._state_cache:
            rows = [ids[valid] for ids, valid in zip(input_ids, token_valid_mask, strict=True)]
            cached = [state for row in rows if (state := self._state_cache.get(_row_key(row))) is not None]
            if len(cached) == len(rows):
                width = len(layer_ids) * self.draft.config.hidden_size
                states = torch.zeros(*input_ids.shape, width, dtype=self.target.dtype, device=input_ids.device)
                for row, valid, state in zip(states, token_valid_mask, cached, strict=True):
                    row[valid] = state.to(states.device, non_blocking=True)
                return states
        return target_hidden_states(self.target, input_ids, token_valid_mask, layer_ids)

    def cache_states(
        self, dataset: datasets.Dataset, description: str = "train", batch_tokens: int | None = None
    ) -> None:
        """
        Compute the target's hidden states of every row once and keep them in memory.

        Args:
            dataset (`datasets.Dataset`): prepared rows.
            description (`str`, defaults to `"train"`): names the set in the progress bar.
            batch_tokens (`int`, *optional*): tokens a target pass, padding included; by default 2,048 on a CPU, whose
                caches a larger batch leaves, and 16,384 elsewhere.
        """
        if batch_tokens is None:
            batch_tokens = 2048 if self.target.device.type == "cpu" else 16384
        all_ids = [row["input_ids"] for row in dataset if _row_key(row["input_ids"]) not in self._state_cache]
        config = self.draft.config
        num_tokens = sum(len(ids) for ids in all_ids)
        row_bytes = len(config.target_layer_ids or []) * config.hidden_size * self.target.dtype.itemsize
        needed = f"{num_tokens * row_bytes / 2**30:.2f} GiB"
        logger.warning_advice(
            f"Target states of {len(all_ids):,} {description} rows ({num_tokens:,} tokens) take {needed}."
        )
        progress = logging.tqdm(
            total=num_tokens,
            desc=f"Target states of the {description} rows, {needed} of memory",
            unit="token",
            unit_scale=True,
            disable=self.args.disable_tqdm,
        )
        collate = DFlashCollator()
        for batch_ids in _batches_by_length(all_ids, batch_tokens):
            rows = [{"input_ids": ids, "supervised_mask": [False] * len(ids), "sample_id": 0} for ids in batch_ids]
            batch = self._prepare_inputs(collate(rows))
            states = target_hidden_states(
                self.target, batch["input_ids"], batch["token_valid_mask"], config.target_layer_ids or []
            )
            for ids, state in zip(batch_ids, states, strict=True):
                self._state_cache[_row_key(ids)] = state[: len(ids)].cpu().clone()
            progress.update(sum(len(ids) for ids in batch_ids))
        progress.close()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.cache_target_states == "memory":
            self.cache_states(documents_of(self.train_dataset))
            eval_sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
            for eval_set in eval_sets.values():
                if eval_set is not None:
                    self.cache_states(documents_of(eval_set), "evaluation")
        try:
            return super().train(*args, **kwargs)
        finally:
            self._restore_forward()

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Keeps Trainer's contract; raw rows are taken too."""
        if not isinstance(eval_dataset, str):  # a name of one of several evaluation sets
            eval_dataset = self._prepared(eval_dataset, "evaluation", self.args)
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if not self.is_in_train:
            self._restore_forward()
        return metrics

    def _restore_forward(self) -> None:
        """accelerate makes `forward` return fp32; the draft that is handed back must fit a target of any dtype."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    # ---- loss ----

    def _plan(self, inputs: Mapping[str, torch.Tensor], optimizer_step: int) -> DFlashBatchPlan:
        return build_dflash_batch_plan(
            inputs["token_valid_mask"],
            inputs["sample_ids"],
            supervised_mask=inputs["supervised_mask"],
            segment_ids=inputs.get("segment_ids"),
            anchors_per_sample=self.args.anchors_per_sample,
            gamma=self.draft.config.block_size - 1,
            optimizer_step=optimizer_step,
            seed=self.args.seed,
            replacement=False,
            partial_windows=True,
        )

    def _context(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Target states of the batch's rows; of packed rows, those of each document by itself."""
        if "segment_ids" not in inputs:
            return self._states(inputs["input_ids"], inputs["token_valid_mask"])
        return states_of_packed_rows(
            self._states, inputs["input_ids"], inputs["token_valid_mask"], inputs["segment_ids"]
        )

    def _block_losses(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], optimizer_step: int) -> BlockLosses:
        def forward(**kwargs: Any) -> Any:
            with self.accelerator.autocast():
                return model(**kwargs)

        return block_losses(
            forward,
            self.draft,
            self._plan(inputs, optimizer_step),
            inputs["input_ids"],
            inputs["token_valid_mask"],
            self._context(inputs),
            segment_ids=inputs.get("segment_ids"),
            slot_weights=self.args.slot_weights,
            loss_decay=self.args.loss_decay,
            dpace_alpha=self.args.dpace_alpha,
            head_chunk_size=self.args.head_chunk_size,
            block_attention=self.args.block_attention,
        )

    def _denominator(self, plan: DFlashBatchPlan) -> torch.Tensor:
        """What this batch adds to the divisor of the loss: known before the forward pass."""
        if self.args.slot_weights == "dpace":
            return plan.loss_mask.sum().float()
        decay = self.args.loss_decay or default_loss_decay(plan.block_size)
        return decay_weights(plan.loss_mask, None if self.args.slot_weights == "uniform" else decay).sum()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """Keeps Trainer's contract (one number for the accumulation window of all ranks): the sum of the weights."""
        total = torch.zeros((), device=device)
        for batch in batch_samples:
            total = total + self._denominator(self._plan(self._prepare_inputs(batch), self.state.global_step))
        return self.accelerator.gather(total).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Keeps Trainer's contract: this micro-batch's share of the loss of the whole optimizer step."""
        losses = self._block_losses(model, inputs, self.state.global_step)
        if num_items_in_batch is None:
            num_items_in_batch = self._denominator(losses.plan)
        denominator = torch.as_tensor(num_items_in_batch, device=losses.weights.device)
        # Distributed wrappers average gradients over ranks; the denominator is the sum over ranks already.
        loss = (losses.weights * losses.loss).sum() / denominator.clamp(min=1e-9)
        loss = loss * self.accelerator.num_processes
        statistics = _statistics(losses, len(inputs["input_ids"])).sum(0, keepdim=True)
        previous = self._train_statistics
        self._train_statistics = statistics if previous is None else previous + statistics
        return (loss, losses) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keeps Trainer's contract; adds the acceptance length of the blocks trained since the last log."""
        if "loss" in logs and self._train_statistics is not None:
            logs["accept_len"] = summarize(self._train_statistics)["accept_len"]
            self._train_statistics = None
        super().log(logs, start_time)

    # ---- evaluation ----

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Keeps Trainer's contract (loss, predictions, labels): predictions are sums and counts of each row."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            losses = self._block_losses(model, inputs, EVAL_PLAN_STEP)
        return None, _statistics(losses, len(inputs["input_ids"])), inputs["sample_ids"]

    def _evaluation_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        statistics = torch.as_tensor(prediction.predictions)
        denominator = None
        if self.args.slot_weights == "dpace":
            denominator = float(statistics[:, 4:].chunk(2, dim=-1)[1].sum())
        return summarize(statistics, denominator)

    # ---- schedule ----

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Keeps Trainer's contract; with `max_train_minutes` the schedule follows the clock instead of the steps."""
        budget = self.time_budget
        if budget is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup, shape = self.args.warmup_steps, str(getattr(self.args.lr_scheduler_type, "value", "linear"))
        scheduled: Any = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            scheduled,
            lambda _: schedule_factor(max(budget.progress, 1e-3), warmup, shape),
        )
        return self.lr_scheduler


def _statistics(losses: BlockLosses, rows: int) -> torch.Tensor:
    return row_statistics(losses.loss.detach(), losses.weights, losses.is_correct, losses.plan.loss_mask, rows)


def _row_key(input_ids: Sequence[int] | torch.Tensor) -> bytes:
    """Rows are known by their tokens: the same text has the same target states in any data set."""
    return hashlib.blake2b(torch.as_tensor(input_ids).cpu().numpy().tobytes(), digest_size=16).digest()


def _batches_by_length(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for row in sorted(rows, key=len):
        if batch and (len(batch) + 1) * len(row) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
