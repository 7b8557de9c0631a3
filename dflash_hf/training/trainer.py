"""Trainer of a DFlash draft."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, EvalPrediction, HubStrategy
from transformers.utils import logging

from ..blocks.attention import attention_kind
from ..blocks.batch import TokenBatch
from ..blocks.forward import BlockLosses, block_losses, loss_mask_of
from ..blocks.losses import loss_denominator
from ..blocks.metrics import record_of_counts, row_statistics, summarize
from ..blocks.plan import DFlashBatchPlan, blocks_of_each_row, build_dflash_batch_plan, content_sample_ids
from ..data.collator import DFlashCollator
from ..data.dataset import PREPARED_COLUMNS, PreparedStream, prepare_rows
from ..evaluation.compare import check_generation, generated_acceptance_length, plain_forward
from ..evaluation.simulate import accepted_tokens_at_every_anchor, simulate_decoding
from ..hub.model_card import DraftCard
from ..hub.push import check_pushing_run
from ..hub.trainer import HubTrainer, ModelCardWriter
from ..model.configuration_dflash import describe_target, text_tokenizer
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from ..target.batch_states import TargetStates, documents_of
from ..target.hidden_states import target_logits_function, unwrap_peft
from ..target.learned_positions import learned_positions, row_length
from ..target.loading import open_target, refuse_encoder
from ..target.token_ids import padding_token_id
from .argument_checks import check_trainer_arguments, freeze_untrained_parts
from .arguments import DFlashTrainingArguments
from .callbacks import AcceptanceWatch, StopOnSignal, TrainingInterruptedError
from .card import card_of_run, rows_are_text
from .checkpoint_files import (
    STATE,
    check_weights,
    damaged_weights,
    last_complete_checkpoint,
    missing_states,
    name_of_unwritten,
)
from .checks import (
    RowCounts,
    TrainingSummary,
    check_generated_evaluation,
    check_processes,
    hide_target,
    summarize_training,
    warn_of_dtypes,
)
from .draft_vocabulary import choose_draft_vocabulary
from .metric_names import add_old_names, check_early_stopping, check_evaluation, own_metrics
from .optimizer import TrainingClock, make_muon_with_adamw, schedule_factor
from .resume import OptimizerValues, RunRecord, SchedulerValues, check_checkpoint, run_values

logger = logging.get_logger(__name__)

EVALUATION_ANCHORS = 64  # blocks of a row for the metrics of blocks
PLAN_KEY = "dflash_plan"  # entry of a micro-batch whose plan is already built


class DFlashTrainer(HubTrainer):
    """
    Train a draft on text that its target wrote.

    Args:
        model ([`DFlashDraftModel`]):
            The draft, which is tied to `target` here. Keep its weights in fp32 and set `bf16=True` in the arguments.
        target (`PreTrainedModel` or `str`):
            The live target, or its Hub name or folder. It may be quantised, multimodal (on rows of text), or a
            `peft.PeftModel` whose adapters change weights. It is put into evaluation mode and moved to the training
            device unless it was spread with `device_map`. It is never trained and never saved.
        args ([`DFlashTrainingArguments`]):
            Training arguments.
        train_dataset, eval_dataset (`datasets.Dataset`, `datasets.IterableDataset` or a sequence of rows, *optional*):
            Rows of `messages`, of `prompt` and `completion`, or of `input_ids` (with `loss_mask`). An
            `IterableDataset` is tokenised while it is read. It needs `max_steps` and is repeated until then, all in
            one epoch; pass a seed to its `shuffle`. A resumed run reads the rows it has already trained on again. In
            several processes the last evaluation batch of an `IterableDataset` is filled up with rows that count
            twice.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The target's tokenizer; not needed for rows of `input_ids`. Of a processor, its tokenizer and its chat
            template are used.
        **kwargs:
            As in [`~transformers.Trainer`]. The metrics of `compute_metrics` are logged beside those of this class.
            Its argument holds sums and counts of each row ([`row_statistics`]) as predictions, and sample ids as
            labels.

    Raises:
        ValueError: draft and target do not fit together, no row is usable, a row contains the mask token or a token
            outside the target's embedding, or the hidden states for an `IterableDataset` are to be cached.
            No evaluation logs `metric_for_best_model`, or the target cannot generate for `eval_generate_prompts`.
        TypeError: a data set is of an unsupported type, or `processing_class` has no tokenizer.

    Training logs `loss` (the weighted loss) and `acceptance_length` of the trained blocks. Evaluation logs
    `eval_loss`, `eval_acceptance_length`, `eval_slot_accuracy_k` and `eval_serving_acceptance_length`, the acceptance
    length of `generate` simulated on the held-out responses. They depend on the rows alone: no argument of the run
    chooses their blocks, and neither order, batch size nor number of processes changes them. With
    `eval_generate_prompts`, `eval_generate_acceptance_length` is the acceptance length of `generate` itself on that
    many prompts. Every acceptance length is that of an [`AcceptanceRecord`] and is left out where there was no verify
    pass. Each is also logged under its older name, which ends in `accept_len`.
    """

    args: DFlashTrainingArguments
    # compute_loss divides by a sum over the whole accumulation window, so Trainer must not divide again.
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
        check_trainer_arguments(kwargs)
        model = local_draft(model, "model")
        processing_class = text_tokenizer(processing_class, "processing_class")
        if isinstance(target, str):
            target = open_target(target)
        target = unwrap_peft(target)
        refuse_encoder(describe_target(target), target)
        check_processes(args, model, target)
        model.tie_target(target)
        freeze_untrained_parts(model, args)
        if args.push_to_hub:
            check_pushing_run(model.config, HubStrategy(args.hub_strategy))
        check_generated_evaluation(args, target, processing_class)
        # The target is not frozen with requires_grad_(False). Nothing computes its gradients, and with frozen weights
        # `generate` would copy the whole head in every draft step on a CPU: matmul (torch 2.13) folds a sliced input
        # into one product only if the weight requires a gradient.
        self.target = target.eval()
        eos = target.generation_config.eos_token_id if target.generation_config is not None else None
        self._data_kwargs: dict[str, Any] = {
            "max_length": row_length(args.max_length, learned_positions(target)),
            "eos_token_ids": eos if isinstance(eos, list) else [eos] if eos is not None else [],
            "chat_template_kwargs": model.config.chat_template_kwargs,
            "forbidden_token_id": model.config.mask_token_id,
            "num_embeddings": model.config.vocab_size,
            "tokenizer": processing_class,
        }
        self._end_token_ids = {*self._data_kwargs["eos_token_ids"], getattr(processing_class, "eos_token_id", None)}
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
        padding = [processing_class.pad_token_id] if processing_class is not None else []
        pad_token_id = padding_token_id(target, padding)
        multiple = args.pad_to_multiple_of
        if multiple is None:
            multiple = 512 if attention_kind(args.block_attention, args.device) == "flex" else 32
        kwargs.setdefault("data_collator", DFlashCollator(pad_token_id, args.padding_side, multiple))
        self._own_metrics: Callable[[EvalPrediction], Any] | None = kwargs.get("compute_metrics")
        check_evaluation(args, model.config.tokens_per_block, eval_dataset, self._own_metrics)
        check_early_stopping(args, kwargs.get("callbacks") or ())
        kwargs["compute_metrics"] = self._evaluation_metrics
        super().__init__(
            model=model,
            args=args,
            train_dataset=self._prepared(train_dataset, "train", args, is_training=True),
            eval_dataset=self._prepared(eval_dataset, "evaluation", args),
            processing_class=processing_class,
            **kwargs,
        )
        self.draft = model
        if self.train_dataset is not None:
            choose_draft_vocabulary(model, self.train_dataset)
        self._draft_class: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
        self.clock = TrainingClock(args.max_train_minutes)
        self.add_callback(self.clock)
        self._run_record = RunRecord(**self._run_values_of(kwargs))
        self.add_callback(self._run_record)
        self._stop_on_signal = StopOnSignal(self._any_rank if self.accelerator.num_processes > 1 else None)
        self.add_callback(self._stop_on_signal)
        self.add_callback(AcceptanceWatch(self.clock))
        self.add_callback(ModelCardWriter(self.draft_card))
        self._rows_are_text = rows_are_text(train_dataset)
        self._row_counts: RowCounts | None = None
        if getattr(target, "hf_device_map", None) is None and target.device != args.device:
            nn.Module.to(target, args.device)
        if args.eval_generate_prompts > 0 and model.device == target.device:  # else the model is placed later
            check_generation(target, model, text_tokenizer(processing_class))
        self._loss_terms = args.loss_terms
        if model.confidence_head is None:
            self._loss_terms = replace(self._loss_terms, confidence_weight=0.0)
        # They are computed from the final state of the target.
        needs_logits = self._loss_terms.needs_target_logits or self._loss_terms.confidence_weight > 0
        self.target_states = TargetStates(
            target, model.config.target_layer_ids or [], include_final_state=needs_logits
        )
        self._compute_target_logits = target_logits_function(target, model.compute_logits) if needs_logits else None
        self._train_statistics: torch.Tensor | None = None

    def _prepared(
        self, dataset: Any, description: str, args: DFlashTrainingArguments, is_training: bool = False
    ) -> Any:
        """Return tokenised rows, or a dictionary of them for several named evaluation sets."""
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
                f"cache_target_states={args.cache_target_states!r} and the {description} set is a stream. Hidden "
                "states are cached before training, and a stream is only read during training. Leave "
                "cache_target_states unset."
            )
        return prepared

    def _set_signature_columns_if_needed(self) -> None:
        """Set the columns that `remove_unused_columns=True` keeps: those that the collator reads."""
        self._signature_columns: Any = list(PREPARED_COLUMNS)

    def cache_states(
        self, dataset: datasets.Dataset, description: str = "train", batch_tokens: int | None = None
    ) -> None:
        """
        Compute the target's hidden states of every row once and keep them, on disk with `cache_target_states="disk"`.

        Args:
            dataset (`datasets.Dataset`): prepared rows.
            description (`str`, defaults to `"train"`): names the set in messages.
            batch_tokens (`int`, *optional*): as in [`fill_hidden_state_cache`].

        Raises:
            ValueError: the folder holds the states of another target or of other layers; each difference is named.
            OSError: a file of the folder is damaged, or the disk is too small.
        """
        self.target_states.fill_cache(
            dataset["input_ids"],
            folder=self.args.state_cache_dir if self.args.cache_target_states == "disk" else None,
            description=description,
            batch_tokens=batch_tokens,
            accelerator=self.accelerator,
            show_progress=not self.args.disable_tqdm,
        )

    @property
    def was_interrupted(self) -> bool:
        """`bool`: whether Ctrl-C or SIGTERM ended the last `train()`."""
        return self._stop_on_signal.was_interrupted

    def _any_rank(self, answer: bool) -> bool:
        """Return whether the answer of any rank is True."""
        return bool(self.accelerator.gather(torch.tensor([answer], device=self.args.device)).any())

    def summary(self) -> TrainingSummary:
        """
        Describe the run; `train()` shows this summary before the first step.

        Returns:
            [`TrainingSummary`]
        """
        tokenizer = self.processing_class if isinstance(self.processing_class, PreTrainedTokenizerBase) else None
        return summarize_training(self.args, self.draft, self.target, self.train_dataset, tokenizer)

    def _checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the checked folder of the checkpoint; `True` means the last complete one."""
        self._run_record.changes = []
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return None
        folder = resume_from_checkpoint
        if isinstance(folder, bool):
            last = last_complete_checkpoint(str(self.args.output_dir))
            if last is None:
                raise ValueError(
                    f"resume_from_checkpoint=True needs a complete checkpoint, and {self.args.output_dir} has none. "
                    "Train without it, or set output_dir to the folder of the earlier run."
                )
            folder = last
        changes = check_checkpoint(folder, self.draft.config, self._run_record.values)
        check_weights(folder, {name: tuple(value.shape) for name, value in self.draft.state_dict().items()})
        missing = missing_states(folder, self.args)
        for state in missing:
            logger.warning(f"{Path(folder).name} is resumed in part: {state}.")
        self._run_record.changes = [*changes, *missing]
        return folder

    def _run_values_of(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that checkpoints of this run record."""
        given = kwargs.get("optimizers") or (None, None)
        optimizer = getattr(self.args.optim, "value", self.args.optim)
        if kwargs.get("optimizer_cls_and_kwargs") is not None:
            kind = kwargs["optimizer_cls_and_kwargs"][0]
            optimizer = "Muon with AdamW" if kind is make_muon_with_adamw else kind.__name__
        if given[0] is not None:
            optimizer = type(given[0]).__name__
        others: dict[str, Any] = {"optim": optimizer, "draft_dtype": str(self.draft.dtype).removeprefix("torch.")}
        if given[1] is not None:
            others["lr_scheduler_type"] = type(given[1]).__name__
        return run_values(self.args, self.target, self.train_dataset, **others)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both states as Trainer does, and keep the values of this run, which the states would replace."""
        if checkpoint is None or self.is_deepspeed_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        values = OptimizerValues(self.optimizer)
        values.check(checkpoint)
        schedule = SchedulerValues(self.lr_scheduler)
        schedule.check(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)
        schedule.restore()
        changes = values.restore(self.lr_scheduler, follows_steps=self.clock.minutes is None)
        if changes:
            logger.warning(
                f"The optimizer resumed from {Path(checkpoint).name} has other values: {'; '.join(changes)}."
            )
        self._run_record.changes += changes

    def _load_callback_state(self) -> None:
        """Load the states of callbacks as Trainer does, but not those of this class, which read them themselves."""
        entries: Any = self.state.stateful_callbacks
        own = {kind.__name__: entries.pop(kind.__name__, None) for kind in (RunRecord, TrainingClock)}
        super()._load_callback_state()
        entries |= {name: entry for name, entry in own.items() if entry is not None}
        # A callback that the checkpoint does not know would end the first save in a KeyError (transformers 5.24).
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                entries.setdefault(type(callback).__name__, callback.state())

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch as Trainer does, which takes one step too many if a resumed run is already at its end."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            logger.warning(
                f"The run ends at step {self.state.max_steps} and is at step {self.state.global_step}, so that "
                "nothing is left to train. Raise max_steps or num_train_epochs to train on."
            )
            self.control.should_training_stop = True

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """
        Train as Trainer does.

        After Ctrl-C or SIGTERM, training ends after the running micro-batch with a checkpoint of the last optimizer
        step. `train(resume_from_checkpoint=True)` then continues exactly as if training had not been interrupted. A
        second Ctrl-C ends training at once. A handler of your own for one of these signals (or that of
        `enable_jit_checkpoint`) is not replaced.

        Raises:
            ValueError: the checkpoint is incomplete, or belongs to another draft, target or optimizer.
            KeyboardInterrupt: after Ctrl-C, once the checkpoint is written.
            SystemExit: after SIGTERM, once the checkpoint is written, with exit code 143.
        """
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        if self.is_world_process_zero():
            summary = self.summary()
            self._row_counts = summary.counts
            logger.warning_advice(str(summary))
            warn_of_dtypes(self.args, self.draft, self.target)
        if self.args.cache_target_states is not None:
            self.cache_states(documents_of(self.train_dataset))
            eval_sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
            for eval_set in eval_sets.values():
                if eval_set is not None:
                    self.cache_states(documents_of(eval_set), "evaluation")
        try:
            with self._stop_on_signal.watched():
                try:
                    result = super().train(checkpoint, trial, ignore_keys_for_eval)
                    interrupted = self._stop_on_signal.agreed()  # a signal after the last step counts as well
                except TrainingInterruptedError:
                    interrupted = True
                    self._stop_on_signal.restore_random_states()
                if interrupted:
                    raise self._stop_on_signal.exception(self._keep_interrupted(trial, checkpoint))
            return result
        finally:
            self._restore_forward()

    def _keep_interrupted(self, trial: Any, checkpoint: str | None) -> str:
        """Save the last optimizer step unless a checkpoint holds it, end the loop as Trainer does, and report it."""
        step = self.state.global_step
        if step != self._stop_on_signal.saved_step:
            checkpoint = str(Path(self._get_output_dir(trial)) / f"checkpoint-{step}")
            self._save_checkpoint(self.model_wrapped, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.is_in_train:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self._finish_current_push()
            self.is_in_train = False
        message = f"Training was interrupted at step {step}"
        if checkpoint is not None:
            message += f". {checkpoint} is kept, and trainer.train(resume_from_checkpoint=True) continues from it"
        if self.is_world_process_zero():
            logger.warning(f"{message}.")
        return f"{message}."

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare model and optimizer as Trainer does, without the embedding and head of the target."""
        with hide_target(self.draft):
            return super()._prepare_for_training(*args, **kwargs)

    def draft_card(self) -> DraftCard:
        """
        Return the facts of this run and of the draft in its current state.

        Returns:
            [`DraftCard`]; [`write_model_card`] renders it.
        """
        return card_of_run(
            self.args,
            self.state,
            self.draft,
            self.processing_class if isinstance(self.processing_class, PreTrainedTokenizerBase) else None,
            self._row_counts,
            is_text=self._rows_are_text,
            native_repo=self.hub_model_id or self.args.hub_model_id,
            resumptions=self._run_record.resumptions,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the draft and its model card as Trainer does.

        Where checkpoints are sharded, the draft is also saved unsharded, since it is small.
        """
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as Trainer does, under the draft's own class name, which FSDP2 replaces (torch 2.13)."""
        sharded_class, self.draft.__class__ = self.draft.__class__, self._draft_class
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.draft.__class__ = sharded_class

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint as Trainer does, and name the last complete one if a file cannot be written."""
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with name_of_unwritten(folder):
            if self.args.should_save:
                # It is written last. That of an earlier run would make the folder look complete until then.
                (folder / STATE).unlink(missing_ok=True)
            super()._save_checkpoint(model, trial)

    def _load_best_model(self) -> None:
        """Load the best draft as Trainer does, or keep the last one if the files of the best one are damaged."""
        problem = damaged_weights(str(self.state.best_model_checkpoint))
        if problem is None:
            return super()._load_best_model()
        logger.warning(
            f"The best draft, of {self.state.best_model_checkpoint}, cannot be loaded: {problem}. The draft keeps the "
            f"weights of step {self.state.global_step}."
        )
        self.state.best_model_checkpoint = None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the loader of all evaluation rows as Trainer does; `dataloader_drop_last` is for training alone."""
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = drop_last

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """
        Compute the loss and the gradient of a micro-batch as Trainer does.

        Raises:
            RuntimeError: the loss is not finite. In float16, which skips such steps, it is only logged.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.args.fp16 and not loss.isfinite():
            raise RuntimeError(
                f"The loss is {loss.item()} after {self.state.global_step} optimizer steps, and the weights would be "
                "lost with the next one. Continue from the last checkpoint with a smaller learning_rate or "
                "max_grad_norm, and check with dflash-hf doctor that weights and hidden states are finite."
            )
        return loss

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Trainer does; `eval_dataset` may also hold raw rows."""
        if isinstance(eval_dataset, str):
            if not isinstance(self.eval_dataset, dict) or eval_dataset not in self.eval_dataset:
                names = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else "without names"
                raise ValueError(
                    f"eval_dataset={eval_dataset!r} names no evaluation set of this trainer; they are {names}. Pass "
                    "rows, or the name of a set."
                )
        else:
            eval_dataset = self._prepared(eval_dataset, "evaluation", self.args)
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if not self.is_in_train:
            self._restore_forward()
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as Trainer does; the predictions are sums and counts of each row, and the rows may be raw ones."""
        output = super().predict(self._prepared(test_dataset, "test", self.args), *args, **kwargs)
        if not self.is_in_train:
            self._restore_forward()
        return output

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run Trainer's loop and, with `eval_generate_prompts`, add the acceptance length of `generate` itself."""
        if self.accelerator.is_fsdp2 and not any(isinstance(module, FSDPModule) for module in self.draft.modules()):
            raise RuntimeError(
                "FSDP2 splits the draft when training starts, so it cannot be evaluated before. Evaluate after "
                "train(), set eval_on_start=True, or evaluate without fsdp."
            )
        # Ranks of one tensor-parallel group evaluate the same rows, which _evaluation_metrics removes. The usual
        # removal of repeated rows (accelerate 1.15, gather_for_metrics) would remove others.
        if self.get_tp_size() > 1:
            self.gather_function = self.accelerator.gather
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )
        if self.args.eval_generate_prompts > 0 and output.metrics is not None:
            with plain_forward(self.draft):  # the forward that users call; the prepared one always returns fp32
                length = generated_acceptance_length(
                    self.target,
                    self.draft,
                    itertools.islice(dataloader.dataset, self.args.eval_generate_prompts),
                    max_new_tokens=self.args.eval_generate_max_new_tokens,
                    tokenizer=text_tokenizer(self.processing_class),
                )
            if length is not None:
                output.metrics[f"{metric_key_prefix}_generate_acceptance_length"] = length
        add_old_names(output.metrics if output.metrics is not None else {})
        return output

    def _restore_forward(self) -> None:
        """Undo that accelerate (1.15) makes `forward` return fp32, so that the draft fits a target of any dtype."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def _plan(self, inputs: Mapping[str, Any], optimizer_step: int) -> DFlashBatchPlan:
        """Build the plan of a micro-batch of training."""
        return build_dflash_batch_plan(
            inputs["token_valid_mask"],
            inputs["sample_ids"],
            supervised_mask=inputs["supervised_mask"],
            segment_ids=inputs.get("segment_ids"),
            anchors_per_sample=self.args.anchors_per_sample,
            gamma=self.draft.config.tokens_per_block - 1,
            sample_from_anchor=self.draft.config.sample_from_anchor,
            optimizer_step=optimizer_step,
            seed=self.args.seed,
            replacement=self.args.anchor_replacement,
            partial_windows=self.args.partial_windows,
        )

    def _evaluation_plan(self, batch: TokenBatch) -> DFlashBatchPlan:
        """Build the plan of an evaluation batch, which depends on the rows alone and on no argument of the run."""
        return build_dflash_batch_plan(
            batch.valid,
            content_sample_ids(batch.input_ids, batch.valid),
            supervised_mask=batch.supervised,
            segment_ids=batch.segment_ids,
            anchors_per_sample=EVALUATION_ANCHORS,
            gamma=self.draft.config.tokens_per_block - 1,
            sample_from_anchor=self.draft.config.sample_from_anchor,
            optimizer_step=0,
            seed=0,
            replacement=False,
            partial_windows=True,
        )

    def _forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Return the forward of the model with the autocast that Trainer uses."""

        def forward(**kwargs: Any) -> Any:
            with self.accelerator.autocast():
                return model(**kwargs)

        return forward

    def _block_losses(self, model: nn.Module, batch: TokenBatch, plan: DFlashBatchPlan) -> BlockLosses:
        """Compute the losses of a plan as the arguments say; the batch has the states of the target."""
        return block_losses(
            self._forward_of(model),
            self.draft,
            plan,
            batch,
            slot_weights=self.args.slot_weights,
            loss_decay=self.args.loss_decay,
            dpace_alpha=self.args.dpace_alpha,
            terms=self._loss_terms,
            compute_target_logits=self._compute_target_logits,
            head_chunk_size=self.args.head_chunk_size,
            block_attention=self.args.block_attention,
        )

    def _denominator(self, plan: DFlashBatchPlan, input_ids: torch.Tensor) -> torch.Tensor:
        """Return what a micro-batch adds to the divisor of the loss."""
        loss_mask = loss_mask_of(self.draft, plan, input_ids)
        return loss_denominator(loss_mask, self.args.slot_weights, self.args.loss_decay)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """
        Return the divisor of the loss for the accumulation window of all ranks, as Trainer asks for it.

        The divisor depends on the plans, which are built here and handed to [`compute_loss`] inside the micro-batches:
        every entry of `batch_samples` is replaced by a copy that holds its plan.
        """
        total = torch.zeros((), device=device)
        for index, batch in enumerate(batch_samples):
            inputs = self._prepare_inputs(batch)
            plan = self._plan(inputs, self.state.global_step)
            batch_samples[index] = {**batch, PLAN_KEY: plan}
            total = total + self._denominator(plan, inputs["input_ids"])
        return self.accelerator.gather(total).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """
        Compute the share of a micro-batch in the loss of the whole optimizer step.

        A batch that does not come from Trainer's training loop has no plan yet; its plan is built here, and its loss
        is divided by its own weights if `num_items_in_batch` is not given.
        """
        plan = inputs.get(PLAN_KEY)
        if plan is None:
            plan = self._plan(inputs, self.state.global_step)
        batch = self.target_states.attach_to(TokenBatch.from_inputs(inputs))
        losses = self._block_losses(model, batch, plan)
        if num_items_in_batch is None:
            num_items_in_batch = self._denominator(plan, inputs["input_ids"])
        denominator = torch.as_tensor(num_items_in_batch, device=losses.weights.device)
        # Distributed wrappers average gradients over ranks, and the denominator is already the sum over ranks.
        loss = (losses.weights * losses.loss).sum() / denominator.clamp(min=1e-9)
        loss = loss * self.accelerator.num_processes
        statistics = _statistics(losses, batch.num_rows).sum(0, keepdim=True)
        previous = self._train_statistics
        self._train_statistics = statistics if previous is None else previous + statistics
        return (loss, losses) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """
        Log as Trainer does, with more entries.

        Entries of training get the acceptance length of the blocks that all ranks trained since the last entry.
        Entries of evaluation get the minutes of the optimizer steps before it.
        """
        if "loss" in logs and self._train_statistics is not None:
            metrics = summarize(self.accelerator.gather(self._train_statistics))
            logs |= {name: value for name, value in metrics.items() if name == "acceptance_length"}
            self._train_statistics = None
        add_old_names(logs)
        is_evaluation = any(name.endswith("_runtime") for name in logs) and "train_runtime" not in logs
        if self.state.global_step and is_evaluation:
            logs["train_minutes"] = self.clock.elapsed_s / 60
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Return what Trainer expects (loss, predictions, labels); the predictions are sums and counts of each row."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            batch = self.target_states.attach_to(TokenBatch.from_inputs(inputs))
            plan = self._evaluation_plan(batch)
            at_a_time = self.args.anchors_per_sample  # bounds the memory, and does not choose the blocks
            statistics = torch.stack(
                [
                    _statistics(self._block_losses(model, batch, part), batch.num_rows)
                    for part in (
                        blocks_of_each_row(plan, batch.num_rows, slice(start, start + at_a_time))
                        for start in range(0, EVALUATION_ANCHORS, at_a_time)
                    )
                ]
            ).sum(0)
            if self.args.eval_serving:
                passes = self._simulate_decoding(model, batch)
                statistics = torch.cat([statistics, passes.to(statistics)], dim=-1)
        return None, statistics, inputs["sample_ids"]

    def _simulate_decoding(self, model: nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Return the simulated verify passes of each row, counted by the tokens they commit."""

        def largest_of_all_ranks(count: int) -> int:
            return int(self.accelerator.gather(torch.tensor([count], device=batch.input_ids.device)).max())

        accepted = accepted_tokens_at_every_anchor(
            self._forward_of(model),
            self.draft,
            batch,
            blocks_per_pass=self.args.anchors_per_sample,
            head_chunk_size=self.args.head_chunk_size,
            block_attention=self.args.block_attention,
            agree_on=largest_of_all_ranks if self.accelerator.num_processes > 1 else int,
        )
        return simulate_decoding(
            accepted, batch, block_size=self.draft.config.tokens_per_block, end_token_ids=self._end_token_ids
        )

    def _evaluation_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute the metrics of an evaluation from the statistics of all rows."""
        statistics = torch.as_tensor(prediction.predictions)
        if self.get_tp_size() > 1:  # the ranks of a tensor-parallel group evaluate the same rows
            _, first = numpy.unique(prediction.label_ids, return_index=True)
            statistics = statistics[torch.as_tensor(first)]
        block_size = self.draft.config.tokens_per_block
        statistics, simulated = statistics.tensor_split([3 * block_size], dim=-1)
        denominator = None
        if self.args.slot_weights == "dpace":
            denominator = float(statistics[:, 1 - block_size :].sum())
        metrics = summarize(statistics, denominator)
        length = record_of_counts(simulated).acceptance_length if self.args.eval_serving else None
        if length is not None:
            metrics["serving_acceptance_length"] = length
        if self._own_metrics is not None:
            metrics |= own_metrics(self._own_metrics, prediction, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Find out as Trainer does whether the draft is the best so far; without the metric it is not."""
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        if self.args.metric_for_best_model is None or name in metrics:
            return super()._determine_best_metric(metrics, trial)
        logger.warning(
            f"Step {self.state.global_step} is not compared with the best one: metric_for_best_model="
            f"{self.args.metric_for_best_model!r} is not among the metrics {', '.join(sorted(metrics))}."
        )
        return False

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate as Trainer does; without the metric that a scheduler follows, the rate stays."""
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR) and not skip_scheduler:
            name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
            if name in metrics:
                self.lr_scheduler.step(metrics[name])
            else:
                logger.warning(f"The evaluation at step {self.state.global_step} has no {name} to set the rate by.")
        return metrics

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the scheduler as Trainer does; with `max_train_minutes` it follows the clock instead of the steps."""
        clock = self.clock
        if clock.minutes is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup, shape = self.args.warmup_steps, str(getattr(self.args.lr_scheduler_type, "value", "linear"))
        scheduled: Any = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            scheduled,
            lambda _: schedule_factor(max(clock.progress, 1e-3), warmup, shape),
        )
        return self.lr_scheduler


def _statistics(losses: BlockLosses, rows: int) -> torch.Tensor:
    """Return the statistics of each row from its block losses."""
    return row_statistics(losses.loss.detach(), losses.weights, losses.is_correct, losses.plan.loss_mask, rows)
