"""Checks of the values of training arguments, and of arguments that would have no effect."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from transformers.utils import logging

from ..blocks.losses import MIN_LOSS_DECAY

logger = logging.get_logger(__name__)

CHOICES: dict[str, tuple[str | None, ...]] = {
    "slot_weights": ("decay", "dpace", "uniform"),
    "cache_target_states": (None, "memory", "disk"),
    "padding_side": ("left", "right"),
    "block_attention": ("auto", "flex", "structured", "dense"),
    "trained_part": ("all", "heads"),
}
# The arguments that the loss of a published method consists of.
RECIPES: dict[str, dict[str, Any]] = {
    "dspark": {"ce_weight": 0.1, "l1_weight": 0.9, "slot_weights": "decay", "loss_decay": 4.0},
}
HEADS = ("candidate_selector", "markov_head", "confidence_head")
MINIMUM_OF_INTEGERS = {
    "anchors_per_sample": 1,
    "max_length": 2,
    "head_chunk_size": 1,
    "kl_top_k": 1,
    "pad_to_multiple_of": 1,
    "eval_generate_prompts": 0,
    "eval_generate_max_new_tokens": 1,
}
# Outside of these ranges a weight or a logit would not be finite in fp32.
RANGES_OF_NUMBERS = {
    "loss_decay": (MIN_LOSS_DECAY, 1e6),
    "kl_temperature": (0.01, 100.0),
    "dpace_alpha": (0.0, 1.0),
    "ce_weight": (0.0, 1e6),
    "l1_weight": (0.0, 1e6),
    "selector_weight": (0.0, 1e6),
    "confidence_weight": (0.0, 1e6),
    "kl_weight": (0.0, 1.0),
}
# Arguments of Trainer (transformers 5.24) that are read in methods which DFlashTrainer replaces, or that fail there.
WITHOUT_EFFECT = {
    "label_smoothing_factor": "labels are not smoothed, while soft_labels, l1_weight and kl_weight compare with the "
    "target's distribution",
    "neftune_noise_alpha": "the embedding belongs to the target and gets no noise",
    "use_liger_kernel": "these kernels are for other models",
    "liger_kernel_config": "these kernels are for other models",
    "use_cache": "training has no cache",
    "logging_nan_inf_filter": "training ends at a loss that is not finite, and float16 logs it",
    "include_num_input_tokens_seen": "tokens are counted before training, in the summary",
    "prediction_loss_only": "an evaluation always gathers sums and counts of each row, and never logits",
    "eval_do_concat_batches": "the metrics are computed from the sums and counts of all rows",
    "batch_eval_metrics": "the metrics are computed from the sums and counts of all rows",
    "include_for_metrics": "the metrics are computed from the sums and counts of all rows",
    "label_names": "labels are the tokens of the rows",
}


def apply_recipe(args: Any) -> None:
    """
    Set the arguments of a recipe.

    Args:
        args ([`DFlashTrainingArguments`]): the arguments.

    Raises:
        ValueError: the recipe is unknown, or one of its arguments was given another value.
    """
    if args.recipe is None:
        return
    if args.recipe not in RECIPES:
        raise ValueError(f"recipe={args.recipe!r} must be one of {', '.join(RECIPES)}, or unset.")
    for name, value in RECIPES[args.recipe].items():
        given = getattr(args, name)
        if given not in (value, args.__dataclass_fields__[name].default):
            raise ValueError(
                f"{name}={given!r} contradicts recipe={args.recipe!r}, which sets it to {value!r}. Leave out one of "
                "the two."
            )
        setattr(args, name, value)


def freeze_untrained_parts(draft: Any, args: Any) -> None:
    """
    Freeze the weights of a draft that the arguments leave out of training.

    Args:
        draft ([`DFlashDraftModel`]): the draft.
        args ([`DFlashTrainingArguments`]): the arguments.

    Raises:
        ValueError: only the heads are to be trained, and the draft has none.
    """
    weights = {"candidate_selector": args.selector_weight, "confidence_head": args.confidence_weight}
    frozen_heads = [name for name, weight in weights.items() if weight == 0]
    trained = [name for name in HEADS if name not in frozen_heads and getattr(draft, name) is not None]
    if args.trained_part == "heads" and not trained:
        raise ValueError(
            "trained_part='heads' trains a selector, a Markov head or a confidence head, and the draft has none with "
            "a weight above 0. Pass selector_rank= or markov_rank= for the draft, or train all of it."
        )
    for name, parameter in draft.named_parameters():
        part = name.partition(".")[0]
        if part in frozen_heads or (args.trained_part == "heads" and part not in trained):
            parameter.requires_grad_(False)


def check_values(args: Any) -> None:
    """
    Refuse values that break the rule of their argument.

    Args:
        args ([`DFlashTrainingArguments`]): the arguments.

    Raises:
        TypeError: a number has another type.
        ValueError: a value is unknown or out of range.
    """
    for name, choices in CHOICES.items():
        if getattr(args, name) not in choices:
            raise ValueError(f"{name}={getattr(args, name)!r} must be one of {choices}. Choose one of them.")
    for name, minimum in MINIMUM_OF_INTEGERS.items():
        value = getattr(args, name)
        if value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__} and must be an integer. Pass an int.")
        if value < minimum:
            raise ValueError(f"{name}={value} must be at least {minimum}. Pass a larger number.")
    for name, (smallest, largest) in RANGES_OF_NUMBERS.items():
        value = _number(args, name)
        if value is not None and not smallest <= value <= largest:
            raise ValueError(
                f"{name}={value} must be at least {smallest:g} and at most {largest:g}. Pass a number in this range."
            )
    minutes = _number(args, "max_train_minutes")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"max_train_minutes={minutes} must be positive and finite, or unset. Pass such a number.")
    if args.ce_weight == args.l1_weight == args.kl_weight == 0:
        raise ValueError(
            "ce_weight, l1_weight and kl_weight are all 0, so that nothing would be learned. Raise one of them."
        )
    if args.state_cache_dir is not None and args.cache_target_states != "disk":
        raise ValueError(
            f"state_cache_dir={args.state_cache_dir!r} is only used with cache_target_states='disk', and "
            f"cache_target_states is {args.cache_target_states!r}. Set it to 'disk', or leave state_cache_dir unset."
        )
    if args.max_train_minutes is not None:
        _check_clock(args)


def _number(args: Any, name: str) -> Any:
    """Return a number that may be unset, and refuse another type."""
    value = getattr(args, name)
    if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__} and must be a number. Pass a float.")
    return value


def _check_clock(args: Any) -> None:
    """Refuse schedules that cannot follow the clock of `max_train_minutes`."""
    if args.lr_scheduler_type not in ("linear", "cosine", "constant"):
        raise ValueError(
            f"lr_scheduler_type={args.lr_scheduler_type!r} cannot follow the clock of max_train_minutes. Choose "
            "'linear', 'cosine' or 'constant'."
        )
    if args.warmup_steps >= 1:
        raise ValueError(
            f"warmup_steps={args.warmup_steps} cannot follow the clock of max_train_minutes. Set a share of the run, "
            "below 1."
        )


def check_effects(args: Any) -> None:
    """
    Refuse arguments of Trainer that never have an effect, and warn of those that another argument switches off.

    Args:
        args ([`DFlashTrainingArguments`]): the arguments, with `use_muon` decided.

    Raises:
        ValueError: an argument of Trainer is set and would have no effect; each is named with the reason.
    """
    defaults = {item.name: item.default for item in fields(args)}

    def is_set(name: str) -> bool:
        value = getattr(args, name)
        if name == "include_num_input_tokens_seen":  # False is another spelling of the default
            return value not in (False, defaults[name])
        return bool(value) if name == "include_for_metrics" else value != defaults[name]  # a list, empty by default

    found = [f"{name}={getattr(args, name)!r} ({reason})" for name, reason in WITHOUT_EFFECT.items() if is_set(name)]
    if found:
        raise ValueError(f"These arguments have no effect in DFlashTrainer: {'; '.join(found)}. Leave them unset.")

    for switch, needed, names in (
        ("slot_weights", args.slot_weights == "decay", ("loss_decay",)),
        ("slot_weights", args.slot_weights == "dpace", ("dpace_alpha",)),
        ("kl_weight", args.kl_weight > 0, ("kl_top_k", "kl_temperature")),
        ("use_muon", not args.use_muon, ("optim_args", "optim_target_modules")),
        ("max_train_minutes", args.max_train_minutes is None, ("lr_scheduler_kwargs",)),
        ("eval_generate_prompts", args.eval_generate_prompts > 0, ("eval_generate_max_new_tokens",)),
    ):
        for name in names:
            if is_set(name) and not needed:
                logger.warning(
                    f"{name}={getattr(args, name)!r} has no effect with {switch}={getattr(args, switch)!r}. Leave it "
                    f"unset, or change {switch}."
                )


def check_trainer_arguments(kwargs: dict[str, Any]) -> None:
    """
    Refuse functions that Trainer would take and that this trainer does not call.

    Args:
        kwargs (`dict`): the further arguments of [`DFlashTrainer`].

    Raises:
        ValueError: such an argument is given.
    """
    reasons = {
        "compute_loss_func": "the loss is computed slot by slot. Override compute_loss in a subclass",
        "preprocess_logits_for_metrics": "an evaluation gathers sums and counts of each row, and never logits",
        "model_init": "the draft is tied to its target when it is passed. Pass model",
    }
    for name, reason in reasons.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} has no effect in DFlashTrainer: {reason}. Leave it unset.")
