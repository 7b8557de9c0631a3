"""A Trainer whose folders carry the model card of a draft and whose pushes upload only the files of the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, run_as_future
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import PushInProgress, logging

from ..model.modeling_dflash import DFlashDraftModel
from .model_card import FACTS_NAME, DraftCard, write_model_card
from .push import check_repo_names, check_target_name, publish_draft, upload_draft, upload_in_background

logger = logging.get_logger(__name__)


class HubTrainer(Trainer):
    """
    A [`~transformers.Trainer`] that writes the model card of a draft and pushes the draft to the Hub.

    Subclasses set `draft` and define [`draft_card`].
    """

    draft: DFlashDraftModel
    push_in_progress: Any  # Trainer sets it in the first process, and only if something is pushed

    def draft_card(self) -> DraftCard:
        """
        Return the facts of this run and of the draft in its current state.

        Returns:
            [`DraftCard`]; [`write_model_card`] renders it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define draft_card.")

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
        Write `README.md` in `output_dir`, as Trainer does. A README that was edited by hand is kept.

        Args:
            finetuned_from (`str`, *optional*):
                Hub name of the target.
            serving_repo (`str`, *optional*):
                Hub name of the same draft in the layout of serving engines.
            language, license, tags, model_name, dataset_tags, dataset, dataset_args:
                As in `Trainer.create_model_card`; they take precedence over arguments and configuration.
            tasks:
                Not used, with a warning: the task of a draft is that of its target.
        """
        if not self.is_world_process_zero():
            return
        if tasks is not None:
            logger.warning(f"tasks={tasks!r} is not used: the task of a draft is text-generation.")
        given: dict[str, Any] = {
            "languages": as_tuple(language),
            "license": license,
            "tags": as_tuple(tags),
            "title": model_name,
            "target_id": finetuned_from,
            "dataset_ids": as_tuple(dataset_tags),
            "training_data": ", ".join([*as_tuple(dataset), *as_tuple(dataset_args)]),
            "serving_repo": serving_repo,
        }
        card = replace(self.draft_card(), **{name: value for name, value in given.items() if value})
        write_card_of_run(str(self.args.output_dir), card)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the draft as Trainer does, and write its model card beside it."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self.is_world_process_zero():
            write_card_of_run(output_dir or str(self.args.output_dir), self.draft_card())

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
        Push the draft and its model card as `Trainer.push_to_hub` does; no other file of the folder is uploaded.

        Args:
            serving_repo (`str`, *optional*):
                Also push the layout of serving engines to this repository, as [`publish_draft`] does.
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
        """Push a checkpoint in the background as Trainer does, but without its pickled states."""
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


def as_tuple(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one value, several or none as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def write_card_of_run(folder: str | Path, card: DraftCard) -> bool:
    """
    Write the card of a run into a folder.

    If the card in the folder belongs to the same weights, facts that only it knows are kept. A measurement, limits or
    a licence that was added to a saved draft therefore survives the next save or push.

    Args:
        folder (`str` or `Path`): where the draft is saved.
        card ([`DraftCard`]): of the run.

    Returns:
        `bool`: as of [`write_model_card`].
    """
    earlier = None
    if (Path(folder) / FACTS_NAME).is_file():
        try:
            earlier = DraftCard.from_folder(folder, card.config)
        except (OSError, ValueError) as error:  # for example half-written in a crash, which must not end a run
            logger.warning(f"The facts of an earlier card cannot be read and are replaced: {error}")
    if earlier is not None:
        # Equal to the last digit: the card is of the same weights, or of those of a repeated run.
        same = (
            "steps",
            "train_loss",
            "train_acceptance_length",
            "seed",
            "training_arguments",
            "num_rows",
            "num_tokens",
        )
        is_specific = card.steps is not None and (card.train_loss is not None or card.num_tokens is not None)
        if is_specific and all(getattr(card, name) == getattr(earlier, name) for name in same):
            unknown = [item.name for item in fields(card) if getattr(card, item.name) in (None, (), "")]
            card = replace(card, **{name: getattr(earlier, name) for name in unknown})
            if card.measured is earlier.measured:
                card = replace(card, protocol=earlier.protocol)
    return write_model_card(folder, card)


class ModelCardWriter(TrainerCallback):
    """
    Write a model card into every checkpoint.

    Args:
        make_card (`Callable`): returns the [`DraftCard`] of the draft in its current state.
    """

    def __init__(self, make_card: Callable[[], DraftCard]) -> None:
        self.make_card = make_card
        self._is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        # A hyper-parameter search saves each trial in a folder of its own, which has no card.
        if state.is_world_process_zero and folder.is_dir():
            write_card_of_run(folder, self.make_card())

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_training:  # transformers 5.24 pushes a checkpoint before it calls on_save
            self.on_save(args, state, control)
