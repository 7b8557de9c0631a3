"""Trainer of a DFlash draft: target states, plan, masked blocks and the loss over whole optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy
import torch
from huggingface_hub import CommitInfo, run_as_future
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, HubStrategy
from transformers.utils import PushInProgress, logging

from ..blocks.attention import attention_kind
from ..blocks.forward import BlockLosses, block_losses
from ..blocks.losses import loss_denominator
from ..blocks.metrics import row_statistics, summarize
from ..blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
from ..data.collator import DFlashCollator
from ..data.dataset import PREPARED_COLUMNS, PreparedStream, prepare_rows
from ..evaluation.compare import generated_acceptance_length, plain_forward
from ..evaluation.simulate import accepted_at_every_anchor, serving_statistics
from ..hub.model_card import DraftCard
from ..hub.push import (
    check_pushing_run,
    check_repo_names,
    check_target_name,
    publish_draft,
    upload_draft,
    upload_in_background,
)
from ..model.modeling_dflash import DFlashDraftModel
from ..target.hidden_state_cache import (
    DiskStateCache,
    MemoryStateCache,
    StateCache,
    cached_states,
    fill_state_cache,
    state_fingerprint,
)
from ..target.hidden_states import (
    documents_of,
    states_of_packed_rows,
    target_hidden_states,
    target_logits_function,
    without_peft,
)
from .arguments import DFlashTrainingArguments
from .callbacks import AcceptanceWatch, StopOnSignal, TrainingInterruptedError
from .card import ModelCardWriter, as_tuple, card_of_run, rows_are_text, write_card_of_run
from .checks import (
    RowCounts,
    TrainingSummary,
    check_processes,
    check_target_states,
    summarize_training,
    target_out_of_sight,
    warn_of_dtypes,
)
from .optimizer import TrainingClock, make_muon_with_adamw, schedule_factor
from .resume import RunRecord, check_checkpoint, last_complete_checkpoint, run_values

logger = logging.get_logger(__name__)

EVAL_PLAN_STEP = 0  # every evaluation looks at the same blocks


class DFlashTrainer(Trainer):
    """
    Train a draft on rows whose answers the target wrote.

    Args:
        model ([`DFlashDraftModel`]):
            The draft; tied to `target` here. Keep its weights in fp32 and use `bf16=True` in the arguments.
        target (`PreTrainedModel` or `str`):
            The live target, or its Hub name or folder; quantised, multimodal (on rows of text), or a `peft.PeftModel`
            whose adapters change weights. Put in evaluation mode, moved to the training device unless it
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
    `eval_loss`, `eval_accept_len`, `eval_slot_accuracy_k` and `eval_serving_accept_len`, the acceptance length of a
    walk through every answer as `generate` takes it; all are the same for any batch size and number of workers. With
    `eval_generate_prompts`, `eval_generate_accept_len` is what `generate` reaches on so many prompts.
    """

    args: DFlashTrainingArguments
    push_in_progress: Any  # of the first process, where something is pushed
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
        target = without_peft(target)
        check_processes(args, model, target)
        model.tie_target(target)
        if args.push_to_hub:
            check_pushing_run(model.config, HubStrategy(args.hub_strategy))
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
        pad_token_id = processing_class.pad_token_id if processing_class is not None else None
        multiple = args.pad_to_multiple_of
        if multiple is None:
            multiple = 512 if attention_kind(args.block_attention, args.device) == "flex" else 32
        kwargs.setdefault("data_collator", DFlashCollator(pad_token_id or 0, args.padding_side, multiple))
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
        self._draft_class: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
        self.clock = TrainingClock(args.max_train_minutes)
        self.add_callback(self.clock)
        self._run_values = run_values(args, target, _length_of(self.train_dataset))
        self.add_callback(RunRecord(**self._run_values))
        self._stop_on_signal = StopOnSignal(self._any_rank if self.accelerator.num_processes > 1 else None)
        self.add_callback(self._stop_on_signal)
        self.add_callback(AcceptanceWatch(self.clock))
        self.add_callback(ModelCardWriter(self.draft_card))
        self._rows_are_text = rows_are_text(train_dataset)
        self._row_counts: RowCounts | None = None
        if getattr(target, "hf_device_map", None) is None and target.device != args.device:
            nn.Module.to(target, args.device)
        # Losses that compare with the target's logits make them from its final state.
        self._needs_final_state = args.loss_terms.needs_target_logits
        self._context_width = len(model.config.target_layer_ids or []) * model.config.hidden_size
        self._compute_target_logits = (
            target_logits_function(target, model.compute_logits) if self._needs_final_state else None
        )
        self._state_cache: StateCache = MemoryStateCache()
        self._train_statistics: torch.Tensor | None = None
        self._states_are_checked = False

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
        states = cached_states(self._state_cache, input_ids, token_valid_mask) if self._state_cache else None
        if states is not None:
            return states
        return target_hidden_states(
            self.target,
            input_ids,
            token_valid_mask,
            self.draft.config.target_layer_ids or [],
            include_final_state=self._needs_final_state,
        )

    def cache_states(
        self, dataset: datasets.Dataset, description: str = "train", batch_tokens: int | None = None
    ) -> None:
        """
        Compute the target's hidden states of every row once and keep them, on disk with `cache_target_states="disk"`.

        Args:
            dataset (`datasets.Dataset`): prepared rows.
            description (`str`, defaults to `"train"`): names the set in messages.
            batch_tokens (`int`, *optional*): as in [`fill_state_cache`].

        Raises:
            ValueError: the folder holds the states of another target or of other layers; each difference is named.
            OSError: a file of the folder is damaged, or the disk is too small.
        """
        layer_ids = self.draft.config.target_layer_ids or []
        if self.args.cache_target_states == "disk" and not isinstance(self._state_cache, DiskStateCache):
            fingerprint = state_fingerprint(self.target, layer_ids, include_final_state=self._needs_final_state)
            self._state_cache = DiskStateCache(str(self.args.state_cache_dir), fingerprint)
        fill_state_cache(
            self._state_cache,
            self.target,
            dataset["input_ids"],
            layer_ids,
            include_final_state=self._needs_final_state,
            description=description,
            batch_tokens=batch_tokens,
            accelerator=self.accelerator,
            show_progress=not self.args.disable_tqdm,
        )

    @property
    def was_interrupted(self) -> bool:
        """`bool`: the last `train()` was ended by Ctrl-C or SIGTERM."""
        return self._stop_on_signal.was_interrupted

    def _any_rank(self, answer: bool) -> bool:
        return bool(self.accelerator.gather(torch.tensor([answer], device=self.args.device)).any())

    def summary(self) -> TrainingSummary:
        """
        What is about to be trained, from what and for how long; `train()` shows it before the first step.

        Returns:
            [`TrainingSummary`]
        """
        tokenizer = self.processing_class if isinstance(self.processing_class, PreTrainedTokenizerBase) else None
        return summarize_training(self.args, self.draft, self.target, self.train_dataset, tokenizer)

    def _checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The folder, checked; `True` means the last complete one."""
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
        check_checkpoint(folder, self.draft.config, self._run_values)
        return folder

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """
        Keeps Trainer's contract.

        Ctrl-C and SIGTERM end training after the running micro-batch with a checkpoint of the last optimizer step,
        from which `train(resume_from_checkpoint=True)` continues as if nothing had happened; a further Ctrl-C ends at
        once. A handler of your own for one of these signals (or that of `enable_jit_checkpoint`) stays in charge.

        Raises:
            ValueError: the checkpoint is incomplete, or of another draft, target or optimizer.
            KeyboardInterrupt: after Ctrl-C, when the checkpoint is there: what follows in a script does not run.
            SystemExit: after SIGTERM, likewise, with exit code 143.
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
                    interrupted = self._stop_on_signal.agreed()  # a signal after the last step counts, too
                except TrainingInterruptedError:
                    interrupted = True
                    self._stop_on_signal.restore_random_states()
                if interrupted:
                    raise self._stop_on_signal.exception(self._keep_interrupted(trial, checkpoint))
            return result
        finally:
            self._restore_forward()

    def _keep_interrupted(self, trial: Any, checkpoint: str | None) -> str:
        """Save the last optimizer step unless a checkpoint has it, close the loop as Trainer does, and say so."""
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
            message += f": {checkpoint} is kept, and trainer.train(resume_from_checkpoint=True) continues it"
        if self.is_world_process_zero():
            logger.warning(f"{message}.")
        return f"{message}."

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps Trainer's contract."""
        with target_out_of_sight(self.draft):
            return super()._prepare_for_training(*args, **kwargs)

    def draft_card(self) -> DraftCard:
        """
        The facts of this run and of the draft as it is now.

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
        )

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        serving_repo: str | None = None,
    ) -> None:
        """
        Keeps Trainer's contract: `README.md` in `output_dir`. A README that somebody has edited is kept.

        Args:
            finetuned_from (`str`, *optional*): Hub name of the target.
            serving_repo (`str`, *optional*): Hub name of the same draft in the layout of serving engines.
            language, license, tags, model_name, dataset_tags, dataset, dataset_args: as in Trainer; they come before
                what the arguments and the configuration say.
            tasks: not used (a warning says so): a draft has the one of its target.
        """
        if not self.is_world_process_zero():
            return
        if tasks is not None:
            logger.warning(f"tasks={tasks!r} is not used: the task of a draft is text-generation.")
        told: dict[str, Any] = {
            "languages": as_tuple(language),
            "license": license,
            "tags": as_tuple(tags),
            "title": model_name,
            "target_id": finetuned_from,
            "dataset_ids": as_tuple(dataset_tags),
            "training_data": ", ".join([*as_tuple(dataset), *as_tuple(dataset_args)]),
            "serving_repo": serving_repo,
        }
        card = replace(self.draft_card(), **{name: value for name, value in told.items() if value})
        write_card_of_run(str(self.args.output_dir), card)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Keeps Trainer's contract; next to sharded checkpoints, too, a draft is saved whole: it is small. Its model card
        is written beside it.
        """
        if self.is_fsdp_enabled and "FULL_STATE_DICT" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self.is_world_process_zero():
            write_card_of_run(output_dir or str(self.args.output_dir), self.draft_card())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Keeps Trainer's contract; FSDP2 put a class of its own over the draft's, which the folder must not name."""
        sharded_class, self.draft.__class__ = self.draft.__class__, self._draft_class
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.draft.__class__ = sharded_class

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        serving_repo: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Keeps Trainer's contract, but the draft's own files and its card are all that goes up.

        Args:
            serving_repo (`str`, *optional*):
                Also push the layout of serving engines there, as [`publish_draft`] does.
            commit_message, blocking, token, revision, private, **kwargs:
                As in `Trainer.push_to_hub`.

        Returns:
            `CommitInfo` of the native layout, or a `Future` of it with `blocking=False`; `None` on other processes
            than the first.

        Raises:
            ValueError: the draft names a target that is not on the Hub, or `serving_repo` is not usable.
        """
        check_target_name(self.draft.config)
        check_repo_names(self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name, serving_repo)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        kwargs["tags"] = (*as_tuple(kwargs.get("tags")), *(self.draft.model_tags or ()))
        kwargs.setdefault("model_name", str(self.hub_model_id).split("/")[-1])
        self.create_model_card(serving_repo=serving_repo, **kwargs)
        self._finish_current_push()
        folder, repo_id = str(self.args.output_dir), str(self.hub_model_id)
        revision = revision or self.args.hub_revision
        to_hub: dict[str, Any] = {"token": token, "revision": revision, "commit_message": commit_message}

        def push() -> CommitInfo:
            if serving_repo is None:
                return upload_draft(folder, repo_id, **to_hub)
            make_private = self.args.hub_private_repo if private is None else private
            return publish_draft(folder, repo_id, serving_repo=serving_repo, private=make_private, **to_hub)[repo_id]

        return push() if blocking else run_as_future(push)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Keeps Trainer's contract (in the background, not while the last push runs), but for the pickled states."""
        strategy = HubStrategy(self.args.hub_strategy)
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        running: list[Any] = self.push_in_progress.jobs if self.push_in_progress is not None else []
        if not self.args.hub_always_push and not all(job.done() for job in running):
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        to_hub: dict[str, Any] = {
            "token": self.args.hub_token,
            "revision": self.args.hub_revision,
            "commit_message": f"Training in progress, step {self.state.global_step}",
        }
        jobs: Any = [*running, upload_in_background(checkpoint_folder, str(self.hub_model_id), **to_hub)]
        if strategy == HubStrategy.ALL_CHECKPOINTS:
            to_hub["path_in_repo"] = Path(checkpoint_folder).name
            jobs.append(upload_in_background(checkpoint_folder, str(self.hub_model_id), **to_hub))
        self.push_in_progress = PushInProgress(jobs)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Keeps Trainer's contract; raw rows are taken too."""
        if not isinstance(eval_dataset, str):  # a name of one of several evaluation sets
            eval_dataset = self._prepared(eval_dataset, "evaluation", self.args)
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if not self.is_in_train:
            self._restore_forward()
        return metrics

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Keeps Trainer's contract; adds what `generate` itself reaches on the first rows, if asked for."""
        if self.accelerator.is_fsdp2 and not any(isinstance(module, FSDPModule) for module in self.draft.modules()):
            raise RuntimeError(
                "FSDP2 splits the draft when training starts, so it cannot be evaluated before. Evaluate after "
                "train(), set eval_on_start=True, or evaluate without fsdp."
            )
        if self.get_tp_size() > 1:  # these ranks repeat rows; the usual cut of repetitions would take others
            self.gather_function = self.accelerator.gather
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )
        if self.args.eval_generate_prompts > 0 and output.metrics is not None:
            with plain_forward(self.draft):  # as users have it: Trainer's own returns fp32 whatever the target takes
                length = generated_acceptance_length(
                    self.target,
                    self.draft,
                    itertools.islice(dataloader.dataset, self.args.eval_generate_prompts),
                    max_new_tokens=self.args.eval_generate_max_new_tokens,
                )
            # Trainer's metrics are numbers
            output.metrics[f"{metric_key_prefix}_generate_accept_len"] = float("nan") if length is None else length
        return output

    def _restore_forward(self) -> None:
        """accelerate makes `forward` return fp32; the draft that is handed back must fit a target of any dtype."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    # ---- loss ----

    def _plan(
        self, inputs: Mapping[str, torch.Tensor], optimizer_step: int, *, replacement: bool | None = None
    ) -> DFlashBatchPlan:
        return build_dflash_batch_plan(
            inputs["token_valid_mask"],
            inputs["sample_ids"],
            supervised_mask=inputs["supervised_mask"],
            segment_ids=inputs.get("segment_ids"),
            anchors_per_sample=self.args.anchors_per_sample,
            gamma=self.draft.config.block_size - 1,
            optimizer_step=optimizer_step,
            seed=self.args.seed,
            replacement=self.args.anchor_replacement if replacement is None else replacement,
            partial_windows=True,
        )

    def _context(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Target states of the batch's rows; of packed rows, those of each document by itself."""
        if "segment_ids" not in inputs:
            return self._states(inputs["input_ids"], inputs["token_valid_mask"])
        return states_of_packed_rows(
            self._states, inputs["input_ids"], inputs["token_valid_mask"], inputs["segment_ids"]
        )

    def _forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """The model's forward as Trainer would run it: with autocast."""

        def forward(**kwargs: Any) -> Any:
            with self.accelerator.autocast():
                return model(**kwargs)

        return forward

    def _block_losses(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        plan: DFlashBatchPlan,
        states: torch.Tensor | None = None,
    ) -> BlockLosses:
        if states is None:
            states = self._context(inputs)
        if not self._states_are_checked:
            check_target_states(states, self.draft.config, self.target)
            self._states_are_checked = True
        return block_losses(
            self._forward_of(model),
            self.draft,
            plan,
            inputs["input_ids"],
            inputs["token_valid_mask"],
            states[..., : self._context_width],
            segment_ids=inputs.get("segment_ids"),
            slot_weights=self.args.slot_weights,
            loss_decay=self.args.loss_decay,
            dpace_alpha=self.args.dpace_alpha,
            terms=self.args.loss_terms,
            final_hidden_states=states[..., self._context_width :] if self._needs_final_state else None,
            compute_target_logits=self._compute_target_logits,
            head_chunk_size=self.args.head_chunk_size,
            block_attention=self.args.block_attention,
        )

    def _denominator(self, plan: DFlashBatchPlan) -> torch.Tensor:
        return loss_denominator(plan.loss_mask, self.args.slot_weights, self.args.loss_decay)

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
        losses = self._block_losses(model, inputs, self._plan(inputs, self.state.global_step))
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
        """
        Keeps Trainer's contract; adds the acceptance length of all ranks' blocks since the last log, and to an
        evaluation the minutes of optimizer steps before it.
        """
        if "loss" in logs and self._train_statistics is not None:
            logs["accept_len"] = summarize(self.accelerator.gather(self._train_statistics))["accept_len"]
            self._train_statistics = None
        if self.state.global_step and any(name.endswith("_accept_len") for name in logs):
            logs["train_minutes"] = self.clock.elapsed_s / 60
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
            states = self._context(inputs)
            plan = self._plan(inputs, EVAL_PLAN_STEP, replacement=False)
            losses = self._block_losses(model, inputs, plan, states)
            statistics = _statistics(losses, len(inputs["input_ids"]))
            if self.args.eval_serving:
                walk = self._serving_statistics(model, inputs, states)
                statistics = torch.cat([statistics, walk.to(statistics)], dim=-1)
        return None, statistics, inputs["sample_ids"]

    def _serving_statistics(
        self, model: nn.Module, inputs: Mapping[str, torch.Tensor], states: torch.Tensor
    ) -> torch.Tensor:
        def largest_of_all_ranks(count: int) -> int:
            return int(self.accelerator.gather(torch.tensor([count], device=states.device)).max())

        tensors = {name: inputs[name] for name in ("input_ids", "token_valid_mask", "supervised_mask")}
        segment_ids = inputs.get("segment_ids")
        accepted = accepted_at_every_anchor(
            self._forward_of(model),
            self.draft,
            **tensors,
            context_hidden_states=states[..., : self._context_width],
            blocks_per_pass=self.args.anchors_per_sample,
            segment_ids=segment_ids,
            head_chunk_size=self.args.head_chunk_size,
            block_attention=self.args.block_attention,
            agree_on=largest_of_all_ranks if self.accelerator.num_processes > 1 else int,
        )
        return serving_statistics(accepted, **tensors, end_token_ids=self._end_token_ids, segment_ids=segment_ids)

    def _evaluation_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        statistics = torch.as_tensor(prediction.predictions)
        if self.get_tp_size() > 1:  # the ranks that share a draft repeat each other's rows
            _, first = numpy.unique(prediction.label_ids, return_index=True)
            statistics = statistics[torch.as_tensor(first)]
        statistics, walk = statistics.tensor_split([2 + 2 * self.draft.config.block_size], dim=-1)
        denominator = None
        if self.args.slot_weights == "dpace":
            denominator = float(statistics[:, 4:].chunk(2, dim=-1)[1].sum())
        metrics = summarize(statistics, denominator)
        if self.args.eval_serving:
            committed, passes = walk.sum(0).tolist()
            metrics["serving_accept_len"] = committed / passes if passes else float("nan")
        return metrics

    # ---- schedule ----

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Keeps Trainer's contract; with `max_train_minutes` the schedule follows the clock instead of the steps."""
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


def _length_of(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _statistics(losses: BlockLosses, rows: int) -> torch.Tensor:
    return row_statistics(losses.loss.detach(), losses.weights, losses.is_correct, losses.plan.loss_mask, rows)
