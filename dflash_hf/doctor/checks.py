"""Checks of a pair: configuration, weights, mask token, chat template, hidden states, and the two paths of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DFlashCache

from ..blocks.batch import TokenBatch
from ..blocks.forward import block_hidden_states
from ..blocks.plan import blocks_of_each_row
from ..data.chat_template import ChatTemplateError
from ..data.labels import read_row
from ..data.prompt_check import check_prompt
from ..model.configuration_dflash import DFlashConfig, num_embedding_rows
from ..model.modeling_dflash import DFlashDraftModel, embed_tokens, module_tensor
from ..target.hidden_states import target_hidden_states, text_inputs
from .finding import FAULT, OK, SKIPPED, WARNING, Finding
from .forced_decoding import TargetResponses

# Relative distance of two computations of the same hidden states. Kernels sum in different orders, which matters in
# half precision.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
INITIAL_SPREAD = 0.02  # relative deviation of the standard deviation of untrained weights from the configured one
USE_ITS_TARGET = "Use the draft with the target for which it was trained."


def check_pair(
    draft: DFlashDraftModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target_name: str | None
) -> Finding:
    """
    Compare the draft's configuration with the target and its tokenizer. Tying has already compared widths and layers.

    Args:
        draft ([`DFlashDraftModel`]): The draft, tied to the target.
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        target_name (`str`, *optional*): The name of the target as the user gave it. It is compared with the name that
            the draft records, unless it is unset.

    Returns:
        [`Finding`] named "pair".
    """
    config = draft.config
    num_embeddings = num_embedding_rows(target.get_input_embeddings()) or config.vocab_size
    largest = max(tokenizer.get_vocab().values())
    measured = (
        f"width {config.hidden_size}, {num_embeddings} embedding rows, layers {config.target_layer_ids} of "
        f"{config.target_num_hidden_layers}, block size {config.block_size}"
    )
    if largest >= num_embeddings:
        return Finding(
            "pair",
            FAULT,
            f"the tokenizer {tokenizer.name_or_path!r} has token {largest}, and the target has {num_embeddings} "
            "embedding rows",
            "Use the tokenizer that belongs to the target.",
        )
    recorded = config.target_name_or_path
    if recorded and target_name and PurePath(recorded).name.lower() != PurePath(target_name).name.lower():
        return Finding(
            "pair",
            WARNING,
            f"{measured}; the draft was trained for {recorded!r}, not {target_name!r}",
            "Another target has other hidden states, even if it is a fine-tune. " + USE_ITS_TARGET,
        )
    return Finding("pair", OK, measured)


def check_weights(draft: DFlashDraftModel) -> Finding:
    """
    Look for weights that are not finite or were never trained, and for norms that did not change in training.

    Args:
        draft ([`DFlashDraftModel`]): The draft in the dtype of its file, since a cast to bfloat16 can hide small
            changes.

    Returns:
        [`Finding`] named "weights".
    """
    broken = [name for name, value in draft.named_parameters() if not value.isfinite().all()]
    if broken:
        return Finding(
            "weights",
            FAULT,
            f"not finite: {', '.join(broken)}",
            "The training diverged. Use an earlier checkpoint, or train with a smaller learning rate in bf16 or fp32.",
        )
    norms = [value for name, value in draft.named_parameters() if name.endswith("norm.weight")]
    frozen = sum(bool((value == value.flatten()[0]).all()) for value in norms)
    linear = [module.weight.detach().float() for module in draft.modules() if isinstance(module, nn.Linear)]
    spread = sum(float(weight.std()) for weight in linear) / len(linear) / draft.config.initializer_range
    measured = (
        f"{sum(value.numel() for value in draft.parameters()):,} values in {str(draft.dtype)[6:]}, {frozen} of "
        f"{len(norms)} norms are constant, and the standard deviation of linear weights is {spread:.2f} of the "
        "initial one"
    )
    if frozen == len(norms) and abs(spread - 1) < INITIAL_SPREAD:
        return Finding(
            "weights",
            FAULT,
            measured,
            "This draft was never trained, or its trained weights were not saved. Train it, or pass the folder of the "
            "trained draft.",
        )
    if frozen == len(norms):
        return Finding(
            "weights",
            WARNING,
            measured,
            "The norms did not change: training in half precision rounds small updates of the weights to zero. "
            "Train with dtype=torch.float32 and bf16=True.",
        )
    if draft.dtype == torch.float16:
        return Finding(
            "weights",
            WARNING,
            measured,
            "Activations of drafts overflow in float16. Load the draft with --dtype bfloat16.",
        )
    return Finding("weights", OK, measured)


def check_mask_token(draft: DFlashDraftModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """
    Check that the mask token, which fills the drafted slots, has no other meaning and has an embedding of its own.

    Args:
        draft ([`DFlashDraftModel`]), target (`PreTrainedModel`): The pair.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.

    Returns:
        [`Finding`] named "mask token".
    """
    mask = draft.config.mask_token_id
    embedding: Any = draft.get_input_embeddings()
    token = tokenizer.convert_ids_to_tokens(mask)
    measured = f"{mask} ({token!r})" if token is not None else f"{mask}, an embedding row that no token uses"
    with torch.no_grad():
        others = [value for value in (tokenizer.pad_token_id, tokenizer.eos_token_id) if value not in (None, mask)]
        tensor = module_tensor(embedding)
        device = target.device if tensor is None else tensor.device
        rows = embed_tokens(embedding, torch.tensor([mask, *others], device=device)).float()
    text = target.config.get_text_config(decoder=True)
    meanings = {
        f"the {name} token": value
        for name in ("pad", "eos", "bos")
        for source in (tokenizer, text, target.generation_config)
        for value in _ids(getattr(source, f"{name}_token_id", None))
        if value == mask
    }
    own = getattr(tokenizer, "mask_token_id", None)
    problem = None
    if meanings:
        problem = f"it is also {' and '.join(meanings)}, and the slots inherit its meaning"
    elif token is not None and token in tokenizer.get_vocab() and not _is_special(tokenizer, mask):
        problem = "it is an ordinary token that occurs in text"
    elif own is not None and own != mask:
        problem = f"the tokenizer's own mask token is {own} ({tokenizer.mask_token!r})"
    elif not rows[0].any():
        problem = "its embedding is zero"
    elif any(torch.equal(rows[0], row) for row in rows[1:]):
        problem = "its embedding equals that of the pad or the eos token"
    if problem is None:
        return Finding("mask token", OK, measured)
    return Finding(
        "mask token",
        WARNING,
        f"{measured}: {problem}",
        'If the draft was trained with this token, nothing is wrong. The finding "mask token id" below tries other '
        "tokens. For a new draft an unused embedding row is better, which from_target chooses.",
    )


def _ids(value: Any) -> list[int]:
    """Return the token ids of a configuration value, which is an id, a list of ids or None."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_special(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bool:
    """Return whether a token is special."""
    token = tokenizer.added_tokens_decoder.get(token_id)
    return token_id in tokenizer.all_special_ids or (token is not None and token.special)


def check_template(
    tokenizer: PreTrainedTokenizerBase, config: DFlashConfig, prompt: str, response: str, is_truncated: bool = False
) -> Finding:
    """
    Compare the prompt of generation with the start of a training row.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        config ([`DFlashConfig`]): The configuration of the draft, which records the template arguments of training.
        prompt (`str`): A user message.
        response (`str`): The response of the target.
        is_truncated (`bool`, defaults to `False`): Whether generation stopped at the maximum length.

    Returns:
        [`Finding`] named "chat template".
    """
    if tokenizer.chat_template is None:
        return Finding(
            "chat template",
            WARNING,
            "the tokenizer has no chat template",
            "Prompts are continued as plain text, which is right for a base model. For a chat model, use the "
            "tokenizer with its chat template.",
        )
    kwargs: Mapping[str, Any] = config.chat_template_kwargs or {}
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    row = {"messages": messages, "finish_reason": "length" if is_truncated else "stop"}
    try:
        tokenized = read_row(row, tokenizer, chat_template_kwargs=kwargs)
    except ChatTemplateError as error:
        return Finding(
            "chat template",
            FAULT,
            str(error),
            "Training rows of messages cannot be made with this template. Correct the template, pass other "
            "chat_template_kwargs, or train on rows of input_ids, which dflash-hf regenerate writes.",
        )
    mismatch = check_prompt(row, tokenized, tokenizer, kwargs)
    if mismatch is not None:
        return Finding(
            "chat template",
            WARNING,
            f"the row differs from the prompt at token {mismatch.position}: {mismatch.reason}",
            "Train and serve with the same chat_template_kwargs. The draft's config.json records those of training.",
        )
    unknown = [name for name in kwargs if name not in str(tokenizer.chat_template)]
    if unknown:
        return Finding(
            "chat template",
            WARNING,
            f"the draft was trained with chat_template_kwargs {dict(kwargs)}, and this template does not use "
            f"{', '.join(unknown)}",
            "The template differs from that of training. Use the tokenizer of the training.",
        )
    start = [*tokenized.supervised_mask, True].index(True)
    return Finding("chat template", OK, f"a row begins with exactly the {start} tokens of the prompt")


@torch.no_grad()
def check_target_states(target: PreTrainedModel, draft: DFlashDraftModel, responses: TargetResponses) -> Finding:
    """
    Compare the hidden states that the draft reads with `output_hidden_states` of a plain forward pass of the target.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): The pair.
        responses ([`TargetResponses`]): The text, of which the first sequence is used.

    Returns:
        [`Finding`] named "target states".
    """
    ids = responses.input_ids[:1, responses.token_valid_mask[0]]
    layer_ids = draft.config.target_layer_ids or []
    given = target_hidden_states(target, ids, torch.ones_like(ids, dtype=torch.bool), layer_ids)
    plain = target(**{**text_inputs(target, ids, []), "output_hidden_states": True}).hidden_states
    tolerance = TOLERANCES.get(target.dtype, TOLERANCES[torch.bfloat16])
    distances = {}
    for layer_id, states in zip(layer_ids, given.chunk(len(layer_ids), dim=-1), strict=True):
        if not states.isfinite().all():
            return Finding(
                "target states",
                FAULT,
                f"the hidden states of layer {layer_id} are not finite in {str(target.dtype)[6:]}",
                "Load the target in bfloat16 or float32.",
            )
        distances[layer_id] = _distance(states, plain[layer_id + 1])
        if not distances[layer_id] <= tolerance:
            nearest = min(range(len(plain)), key=lambda index: _distance(states, plain[index]))
            return Finding(
                "target states",
                FAULT,
                f"what the draft reads as layer {layer_id} differs by {distances[layer_id]:.2g} from "
                f"hidden_states[{layer_id + 1}]; the nearest is hidden_states[{nearest}]",
                "Provide the outputs of the layers in target_layer_ids, which count from 0: hidden_states[id + 1]. "
                "The last hidden state is taken after the final norm and must not be used.",
            )
    return Finding(
        "target states",
        OK,
        f"{len(layer_ids)} layers equal hidden_states on {ids.shape[1]} tokens (largest difference "
        f"{max(distances.values()):.1g}, allowed {tolerance:g})",
    )


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the second tensor."""
    left, right = left.float(), right.float()
    return ((left - right).norm() / right.norm().clamp(min=1e-12)).item()


@torch.no_grad()
def check_activations(draft: DFlashDraftModel, responses: TargetResponses) -> Finding:
    """
    Run one block and find the first module whose output is not finite.

    Args:
        draft ([`DFlashDraftModel`]): The draft, tied, in the dtype of decoding.
        responses ([`TargetResponses`]): The text, of which the first sequence is used.

    Returns:
        [`Finding`] named "activations".
    """
    num_tokens = int(responses.token_valid_mask[0].sum())
    context = responses.context(draft.config.target_layer_ids or [])[:1, : num_tokens - 1]
    largest: dict[str, float] = {"target states": context.float().abs().max().item()}
    with _recorded(draft, largest):
        draft(
            noise_embeds=draft.embed_blocks(responses.input_ids[:1, num_tokens - 1 :][:, :1]),
            context_hidden_states=context,
        )
    dtype = str(draft.dtype)[6:]
    for name, value in largest.items():
        if not value < float("inf"):
            return Finding(
                "activations",
                FAULT,
                f"not finite in {dtype} from {name} on",
                "Values exceed the range of the dtype, so that nothing is accepted. Run the pair with --dtype "
                "bfloat16 (dtype=torch.bfloat16) or float32.",
            )
    shown = ", ".join(f"{name} {largest[name]:.3g}" for name in ("target states", "fc", "norm"))
    return Finding("activations", OK, f"finite in {dtype}; largest values: {shown}")


@contextmanager
def _recorded(draft: DFlashDraftModel, largest: dict[str, float]) -> Iterator[None]:
    """Record the largest output of each module, in the order in which the modules run."""

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                values = output.float().abs()
                largest[name] = float("inf") if values.isnan().any() else values.max().item()

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in draft.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def check_paths(draft: DFlashDraftModel, responses: TargetResponses) -> Finding:
    """
    Compare the blocks of training with those of generation, which reads the context through the cache.

    Generation reads the context at once and in two parts. The last anchors of the text are among those compared: a
    block that runs past the end of the text has all its slots in training, too, since generation does not know where
    the text will end.

    Args:
        draft ([`DFlashDraftModel`]): The draft, tied.
        responses ([`TargetResponses`]): The text, of which the sequence with the longest response is used.

    Returns:
        [`Finding`] named "training and generation".
    """
    name, config = "training and generation", draft.config
    row = int(responses.supervised_mask.sum(-1).argmax())
    length, start = int(responses.token_valid_mask[row].sum()), int(responses.supervised_mask[row].int().argmax())
    if length < 3:
        return Finding(name, SKIPPED, f"the longest text has {length} tokens", "Use other prompts.")
    ids = responses.input_ids[row : row + 1, :length]
    context = responses.context(config.target_layer_ids or [])[row : row + 1, :length]
    batch = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool), hidden_states=context)
    first, last = max(start - 1, 1), length - 2  # the last anchor has one token after it
    last_whole = max(length - config.tokens_per_block, first)
    anchors = sorted({first, (first + last_whole) // 2, last_whole, (last_whole + last) // 2, last})
    # Without a supervised mask there is a block at every position, in ascending order.
    plan = batch.plan_every_anchor(config.tokens_per_block, sample_from_anchor=config.sample_from_anchor)
    trained = block_hidden_states(draft, draft, blocks_of_each_row(plan, 1, anchors), batch)
    tolerance, worst = TOLERANCES.get(draft.dtype, TOLERANCES[torch.bfloat16]), 0.0
    for block, anchor in zip(trained, anchors, strict=True):
        noise = draft.embed_blocks(ids[:, anchor : anchor + 1])
        for ends in ([anchor], [anchor // 2, anchor]):
            worst = max(worst, _distance(_generated_block(draft, noise, context, ends), block))
    measured = f"the hidden states of blocks at {anchors} differ by up to {worst:.1g}, allowed {tolerance:g}"
    if worst <= tolerance:
        return Finding(name, OK, measured)
    return Finding(
        name,
        FAULT,
        measured,
        "A block has other hidden states through the cache than in training. Try attn_implementation='sdpa' and the "
        "modeling code of this package in place of the checkpoint's. If the difference stays, report it as a bug.",
    )


def _generated_block(
    draft: DFlashDraftModel, noise: torch.Tensor, context: torch.Tensor, ends: list[int]
) -> torch.Tensor:
    """Return the hidden states of a block whose context went through the cache in parts that end at `ends`."""
    size = draft.config.block_size
    cache, start = DFlashCache(config=draft.config), 0
    cache.activate_past_recording()
    for index, end in enumerate(ends):
        if index:
            cache.crop(-size)
        cache.set_previous_accepted_tokens(end - start)
        output = draft(
            noise_embeds=noise,
            context_hidden_states=context[:, start:end],
            position_ids=torch.arange(start, end + size, device=noise.device)[None],
            attention_mask=torch.ones(1, end + size, dtype=torch.long, device=noise.device),
            cache=cache,
        ).last_hidden_state
        start = end
    return output[0]
