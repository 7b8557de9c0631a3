"""Renders the facts of a model card as table rows, code snippets and a chart."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from ..evaluation.compare import Summary
from ..markdown import (
    NOT_RECORDED,
    format_arguments,
    format_fact,
    format_number,
    format_percent,
    inline_code,
    table_cell,
)
from .card_picture import SlotChart

if TYPE_CHECKING:
    from .model_card import DraftCard, Evaluation, Protocol

Rows = list[tuple[str, Any]]


def target_phrase(card: DraftCard) -> str:
    """Name the target in a sentence."""
    if card.target_id is not None:
        return inline_code(card.target_id)
    return f"a target in a local folder, {inline_code(card.target_folder)}" if card.target_folder else "its target"


def input_snippet(card: DraftCard) -> str:
    """Return the lines of a usage snippet that make `inputs` from a question."""
    if card.has_chat_template is False:
        return 'inputs = tokenizer("12 times 13 is", return_tensors="pt")'
    arguments = 'chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"'
    if card.chat_template_kwargs:
        arguments = f"\n    {arguments}, **{dict(card.chat_template_kwargs)!r}\n"
    chat = 'chat = [{"role": "user", "content": "What is 12 times 13?"}]'
    return f"{chat}\ninputs = tokenizer.apply_chat_template({arguments})"


def serving_commands(card: DraftCard, target: str, draft: str) -> dict[str, str]:
    """
    Return the shell commands that convert and serve a draft.

    Args:
        card ([`DraftCard`]): The facts.
        target (`str`): Hub name or folder of the target.
        draft (`str`): Hub name or folder of the draft in the native layout.

    Returns:
        `dict[str, str]`: the commands `convert`, `vllm` and `sglang`.
    """
    name = draft.rstrip("/").rsplit("/", 1)[-1]
    # vLLM recognises the method by "dflash" in the folder's name, which must also differ from that of the source.
    folder = f"{name}-serving" if "dflash" in name.lower() else f"{name}-DFlash"
    serving = card.serving_repo or folder
    speculative = {"method": "dflash", "model": serving, "num_speculative_tokens": card.config.tokens_per_block - 1}
    return {
        "convert": shlex.join(["dflash-hf", "convert", draft, folder, "--layout", "serving"]),
        "vllm": shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]),
        "sglang": shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target])
        + " \\\n    "
        + shlex.join(["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", serving]),
    }


def generation_rows(summary: Summary | None, protocol: Protocol, block_size: int) -> Rows:
    """
    Return the rows on generation with and without the draft.

    Args:
        summary ([`Summary`], *optional*): The measured numbers.
        protocol ([`Protocol`]): How they were measured.
        block_size (`int`): The number of slots in a block.

    Returns:
        `list[tuple[str, Any]]`: name and fact of each row.
    """
    rows: Rows = []
    if summary is None:
        names = ("acceptance length", "slots 1 … k all accepted", "speed without → with the draft", "speed-up")
        rows += [(name, None) for name in (*names, "responses identical token by token")]
    else:
        speeds = (summary.plain_tokens_per_s, summary.drafted_tokens_per_s)
        rows += [
            ("acceptance length", f"{format_number(_or_undefined(summary.acceptance_length))} of {block_size}"),
            ("slots 1 … k all accepted", _by_slot([_or_undefined(share) for share in summary.slot_acceptance])),
            (
                "speed without → with the draft",
                " → ".join(format_number(speed, 1) for speed in speeds) + " tokens/s",
            ),
            ("speed-up (median over the prompts)", f"{format_number(summary.speed_up)}×"),
            ("responses identical token by token", f"{summary.num_identical} of {summary.num_prompts}"),
        ]
        if summary.num_near_ties is not None and summary.near_tie_gap is not None:
            name = f"responses that differ first at a near-tie (logits at most {summary.near_tie_gap:g} apart)"
            rows.append((name, f"{summary.num_near_ties} of the other {summary.num_different}"))
    temperature = protocol.temperature
    rows += [
        ("prompts", protocol.prompts),
        ("temperature", "0 (greedy)" if temperature == 0 else temperature),
        ("maximum response length", format_fact(protocol.max_new_tokens, "{} tokens")),
        ("dtype", protocol.dtype),
        ("target's weights", protocol.target_weights),
        ("decoding", protocol.decoding),
        ("hardware", protocol.hardware),
        ("software", protocol.software),
        ("seed", "none needed (greedy)" if temperature == 0 and protocol.seed is None else protocol.seed),
    ]
    return rows


def evaluation_cells(evaluation: Evaluation | None) -> list[str]:
    """Return the table cells of an evaluation on held-out rows, or of an unknown one."""
    if evaluation is None:
        return [NOT_RECORDED] * 7
    cells = [
        evaluation.name or "held-out rows",
        evaluation.step,
        format_number(evaluation.loss, 3),
        format_number(evaluation.acceptance_length),
        format_number(evaluation.serving_acceptance_length),
        format_number(evaluation.generate_acceptance_length),
        _by_slot(evaluation.slot_accuracy),
    ]
    return [table_cell(cell) for cell in cells]


def draft_rows(card: DraftCard) -> Rows:
    """
    Return the rows on the draft's configuration, target and repositories.

    Args:
        card ([`DraftCard`]): The facts.

    Returns:
        `list[tuple[str, Any]]`: name and fact of each row.
    """
    config = card.config
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    attention = ", ".join("full" if window is None else f"window of {window}" for window in windows)
    heads = f"{config.num_attention_heads} query, {config.num_key_value_heads} key-value, {config.head_dim} wide"
    mask_token = f" ({card.mask_token})" if card.mask_token is not None else f", text {NOT_RECORDED}"
    target_license = f"{card.target_license}, that of the target's card" if card.target_license else None
    return [
        ("target", card.target_id or (f"local folder {card.target_folder}" if card.target_folder else None)),
        ("target revision", config.target_revision),
        ("chat template", card.has_chat_template),
        ("chat-template arguments", format_arguments(card.chat_template_kwargs)),
        *([] if config.kind == "DFlash" else [("kind", config.kind)]),
        ("block size", config.block_size),
        ("target layers read", f"{config.target_layer_ids} of {config.target_num_hidden_layers}, counted from 0"),
        ("mask token", f"{config.mask_token_id}{mask_token}"),
        ("draft layers", f"{config.num_hidden_layers} ({attention})"),
        ("hidden and intermediate size", f"{config.hidden_size}, {config.intermediate_size}"),
        ("heads", heads),
        ("parameters", format_fact(card.num_parameters, "{:,}")),
        ("licence", card.license or target_license),
        ("layout of this package", card.native_repo),
        ("layout of serving engines", card.serving_repo),
    ]


def training_rows(card: DraftCard) -> Rows:
    """
    Return the rows on data, length and arguments of the training.

    Args:
        card ([`DraftCard`]): The facts.

    Returns:
        `list[tuple[str, Any]]`: name and fact of each row.
    """
    steps = format_fact(card.steps)
    if card.last_step is not None and card.last_step != card.steps:
        steps += f" (the best; the run had {card.last_step})"
    arguments = card.training_arguments
    return [
        ("data", card.training_data),
        ("responses written by the target", card.answers_by_target),
        ("rows", format_fact(card.num_rows, "{:,}")),
        ("tokens in the rows", format_fact(card.num_tokens, "{:,}")),
        ("initial weights", card.initialized_from),
        ("optimizer steps", steps),
        ("epochs", format_fact(card.epochs, "{:.4g}")),
        ("input tokens, as Trainer counts them", format_fact(card.tokens_seen, "{:,}")),
        ("loss, last logged", format_number(card.train_loss, 3)),
        ("acceptance length of trained blocks, last logged", format_number(card.train_acceptance_length)),
        ("seed", card.seed),
        ("hardware", card.hardware),
        ("software", card.software),
        (
            "arguments that differ from their defaults",
            None if arguments is None else "below" if arguments else "none",
        ),
        *((f"`{name}`", str(value)) for name, value in (arguments or {}).items()),
        *(("resumed with changes", change) for change in card.resumptions),
    ]


def slot_chart(card: DraftCard) -> SlotChart | None:
    """
    Choose what the card's picture shows.

    Args:
        card ([`DraftCard`]): The facts.

    Returns:
        [`SlotChart`] of generation if it was measured, else of the first evaluation that has accuracies of slots.
        `None` if there is neither.
    """
    if card.measured is not None and card.measured.slot_acceptance:
        acceptance_length = format_number(_or_undefined(card.measured.acceptance_length))
        speed_up = format_number(card.measured.speed_up)
        title = f"Acceptance length {acceptance_length}, speed-up {speed_up}×"
        shares = [_or_undefined(share) for share in card.measured.slot_acceptance]
        return SlotChart(shares, "slots 1 … k accepted", title)
    for evaluation in card.evaluations:
        if evaluation.slot_accuracy:
            step = f", step {evaluation.step}" if evaluation.step is not None else ""
            title = f"Held-out rows{step}: acceptance length {format_number(evaluation.acceptance_length)}"
            return SlotChart(evaluation.slot_accuracy, "accuracy of slot k", title)
    return None


def _or_undefined(value: float | None) -> float:
    """Replace `None`, which a measured quantity is if no pass was counted, by NaN, which prints as "undefined"."""
    return float("nan") if value is None else value


def _by_slot(shares: Any) -> str | None:
    """List the share of each drafted slot, or return `None` if there are none."""
    return ", ".join(f"{slot}: {format_percent(share)}" for slot, share in enumerate(shares, start=1)) or None
