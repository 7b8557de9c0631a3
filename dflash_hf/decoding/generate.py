"""Decoding with a draft where transformers' own loop has limits: batches, sampling, hybrid targets, statistics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..model.configuration_dflash import describe_target
from ..model.modeling_dflash import DFlashDraftModel
from . import PROPOSALS
from .draft_length import AdaptiveBlockLength, BlockLength, times_of_pair
from .kv_cache import RowCache, check_cache_continuation
from .logits_processing import BlockScores, StoppingRules
from .loop import DecodingLoop, VerifyPass
from .statistics import DecodingStatistics

logger = logging.get_logger(__name__)

MASKED_ATTENTION = ("sdpa", "eager")


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`, and what decoding with a draft adds to it.

    Args:
        statistics ([`DecodingStatistics`]): acceptance and times of this call.
    """

    statistics: DecodingStatistics | None = None


@torch.no_grad()
def dflash_decoding(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: DFlashDraftModel | None = None,
    block_size: int | str | None = None,
    tree_size: int | None = None,
    proposal: str = "argmax",
    streamer: BaseStreamer | None = None,
    on_pass: Callable[[VerifyPass], None] | None = None,
    **model_kwargs: Any,
) -> DFlashGenerateOutput | torch.Tensor:
    """
    Decode with a draft: pass this function to `generate`, which prepares everything else.

    `target.generate(**inputs, custom_generate=dflash_decoding, draft=draft)`. The text is the one of plain `generate`:
    token by token when decoding greedily, in distribution when sampling. `generate` of transformers does not pass a
    `streamer` or a `tokenizer` on; [`speculative_generate`] does.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs:
            As `generate` hands them over.
        draft ([`DFlashDraftModel`]):
            The draft of this target. It need not be tied.
        block_size (`int` or `"auto"`, *optional*):
            Slots to verify in each pass, the anchor included; at most the trained number, which is the default. 1 is
            plain decoding. `"auto"` chooses by what was accepted lately and what passes cost.
        tree_size (`int`, *optional*):
            Tokens to verify in each pass, the anchor included, when there are to be more than slots: second and later
            choices of the draft join the first ones in a tree. It pays where a pass costs little more for more tokens:
            one row, 16 to 32.
        proposal (`str`, defaults to `"argmax"`):
            When sampling, `"argmax"` proposes the draft's best tokens and accepts each with the target's probability;
            `"sample"` draws the proposals from the draft. Both are lossless. Which accepts more depends on the pair:
            the first where the slots of a block lean on each other, the second where the draft's odds are the
            target's.
        streamer (`BaseStreamer`, *optional*):
            Gets the prompt, then each token, as in plain generation. One row only.
        on_pass (`Callable`, *optional*):
            Called with a [`VerifyPass`] after every pass of the target.

    Returns:
        `torch.LongTensor` of shape `[rows, columns]`, or [`DFlashGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: the pair does not fit, the target has layers whose cache cannot be taken back, or an argument asks
            for what this loop does not do.
        TypeError: `draft` is no draft.

    Source: section "speculative decoding" of DFlash (arXiv 2602.06036); the draft proposes its best tokens when
    sampling too, and rows of a batch advance at their own pace.
    """
    if not isinstance(draft, DFlashDraftModel):
        raise TypeError(
            f"draft={type(draft).__name__} must be a DFlashDraftModel: "
            "target.generate(**inputs, custom_generate=dflash_decoding, draft=draft)."
        )
    num_padding = _check_call(model, input_ids, generation_config, model_kwargs)
    draft.check_target(model)
    check_cache_continuation(model)
    if proposal not in PROPOSALS:
        raise ValueError(f"proposal={proposal!r} must be one of {', '.join(PROPOSALS)}.")
    if str(generation_config.cache_implementation).startswith(("offloaded", "quantized")):
        logger.warning_once(
            f"cache_implementation={generation_config.cache_implementation!r} is not used: decoding with a draft "
            "keeps a cache of its own, on the devices and in the dtype of the layers."
        )
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"A streamer shows one row, and there are {len(input_ids)}. Leave it out, or use on_pass.")
    streamed = on_pass
    if streamer is not None:
        streamer.put(input_ids.cpu())

        def streamed(verify_pass: VerifyPass) -> None:
            for token in verify_pass.token_ids[0]:  # one by one: a streamer may flush at some of them
                streamer.put(torch.tensor([token]))
            if on_pass is not None:
                on_pass(verify_pass)

    scores = BlockScores(logits_processor, len(input_ids))
    sample_proposals = bool(generation_config.do_sample) and proposal == "sample"
    loop = DecodingLoop(
        model,
        draft,
        input_ids,
        num_padding,
        scores=scores,
        rules=StoppingRules(stopping_criteria),
        do_sample=bool(generation_config.do_sample),
        sample_proposals=sample_proposals,
        block_length=_block_length(
            block_size, tree_size, model, draft, _no_tree_because(model, scores, sample_proposals)
        ),
        keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
        keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
        on_pass=streamed,
    )
    given = model_kwargs.pop("cache", None)
    num_read = loop.resume(given, given.continuation) if getattr(given, "continuation", None) is not None else 0
    if not num_read and getattr(given, "is_initialized", False):  # not so without any attention, nor is there a length
        _check_cache_holds_less(given, input_ids)
        logger.warning_once(
            f"The cache that was passed ({type(given).__name__}) does not hold this text for this pair: the whole "
            "text is read, and the cache is left as it is."
        )
    loop.run(
        _prefill_inputs(model, input_ids, num_read, generation_config, model_kwargs | {"cache": loop.target_cache})
    )
    if streamer is not None:
        streamer.end()
    pad_token_id = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    rows = [loop.finished[row] for row in range(len(input_ids))]
    sequences: Any = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    if not generation_config.return_dict_in_generate:
        return sequences
    return DFlashGenerateOutput(
        sequences=sequences,
        scores=_by_step(loop.kept["scores"]) if loop.keep_scores else None,
        logits=_by_step(loop.kept["logits"]) if loop.keep_logits else None,
        cache=loop.target_cache if len(rows) == 1 else None,
        statistics=loop.statistics,
    )


def speculative_generate(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    inputs: torch.LongTensor | None = None,
    *,
    block_size: int | str | None = None,
    tree_size: int | None = None,
    proposal: str = "argmax",
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    on_pass: Callable[[VerifyPass], None] | None = None,
    **generate_kwargs: Any,
) -> DFlashGenerateOutput:
    """
    Generate with a draft and return text and statistics.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        inputs (`torch.LongTensor` of shape `[rows, columns]`, *optional*): as for `generate`; or give `input_ids=`.
        block_size, tree_size, proposal, streamer, on_pass: see [`dflash_decoding`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's; needed with `stop_strings`.
        stop_strings (`str` or `list[str]`, *optional*): texts that end an answer, wherever in a block they come.
        **generate_kwargs: for `target.generate`.

    Returns:
        [`DFlashGenerateOutput`]: `sequences` of shape `[rows, columns]`, `statistics`, and for one row a `cache` that
        a later call with the whole text can go on from (`cache=`).

    Raises:
        ValueError: as [`dflash_decoding`]; or `stop_strings` without `tokenizer`.
    """
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} need the target's tokenizer. Pass tokenizer=.")
        criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
        generate_kwargs["stopping_criteria"] = StoppingCriteriaList(
            [*criteria, StopStringCriteria(tokenizer, stop_strings)]
        )
    decode = functools.partial(
        dflash_decoding,
        draft=draft,
        block_size=block_size,
        tree_size=tree_size,
        proposal=proposal,
        streamer=streamer,
        on_pass=on_pass,
    )
    generate: Any = target.generate  # a mixin's method, which type checkers do not see
    return generate(inputs, custom_generate=decode, **{**generate_kwargs, "return_dict_in_generate": True})


def _check_call(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> list[int]:
    """Refuse what this loop does not do; returns the padding columns at the left of each row."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"The settings ask for {mode.value.replace('_', ' ')} (num_beams={generation_config.num_beams}), and a "
            "draft speeds up greedy decoding and sampling. Set num_beams=1; for several answers a prompt use "
            "do_sample=True and num_return_sequences."
        )
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise ValueError(f"{name}=True is not collected when decoding with a draft. Leave it out.")
    if model.config.is_encoder_decoder:
        raise ValueError(f"The target {describe_target(model)} has an encoder; a draft needs a decoder-only model.")
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "The prompt is empty, or inputs_embeds were given, whose tokens nobody knows. Pass input_ids alone."
        )

    attention_mask = model_kwargs.get("attention_mask")
    text_length = getattr(generation_config, "_mask_length", None)
    if attention_mask is not None:
        text_length = attention_mask.shape[1]
    if text_length is not None and text_length != input_ids.shape[1]:
        raise ValueError(
            f"attention_mask covers {text_length} tokens and input_ids has {input_ids.shape[1]}: it looks like a call "
            "that goes on from a cache with the new tokens alone. The draft needs the whole text: pass all of it."
        )
    text_config = model.config.get_text_config(decoder=True)
    if len(input_ids) > 1 and (text_config.model_type == "bloom" or getattr(text_config, "alibi", False)):
        raise ValueError(
            f"The target {describe_target(model)} makes its position bias (ALiBi) from a mask in which all rows have "
            "as many tokens, and rows of a batch advance each at its own pace. Decode one row at a time."
        )
    if len(input_ids) > 1 and text_config.model_type == "gpt_neo":
        raise ValueError(
            f"The target {describe_target(model)} makes its windows from a mask in which all rows have as many "
            "tokens, and rows of a batch advance each at its own pace. Decode one row at a time."
        )
    implementation = text_config._attn_implementation
    if len(input_ids) > 1 and implementation not in MASKED_ATTENTION:
        raise ValueError(
            f"The target's attention is {implementation!r}, which takes no mask for rows of different lengths. Load "
            "it with attn_implementation='sdpa', or decode one row at a time."
        )
    if attention_mask is None:
        return [0] * len(input_ids)
    is_real = attention_mask.bool()
    if not (is_real[:, 1:] >= is_real[:, :-1]).all() or not is_real[:, -1].all():
        raise ValueError(
            "attention_mask has zeros after real tokens. Pad prompts on the left (tokenizer.padding_side='left')."
        )
    return (~is_real).sum(1).tolist()


def _check_cache_holds_less(cache: Cache, input_ids: torch.Tensor) -> None:
    """Refuse new tokens alone, after a text that is only in the cache of a plain call."""
    if not isinstance(cache, RowCache) and cache.get_seq_length() >= input_ids.shape[1]:
        raise ValueError(
            f"The cache ({type(cache).__name__}) holds {cache.get_seq_length()} tokens and input_ids has "
            f"{input_ids.shape[1]}: it looks like a call that goes on from a cache with the new tokens alone. The "
            "draft needs the whole text: pass all of it."
        )


def _prefill_inputs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    num_read: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> list[dict[str, Any]]:
    """Inputs of the target for the prompt after its first `num_read` columns, split as `prefill_chunk_size` says."""
    num_columns = input_ids.shape[1]
    chunk_size = generation_config.prefill_chunk_size or num_columns
    prepare: Any = model.prepare_inputs_for_generation
    chunks = []
    for start in range(num_read, num_columns, chunk_size):
        end = min(start + chunk_size, num_columns)
        chunk = {
            name: value[..., :end] if name in ("attention_mask", "position_ids") and value is not None else value
            for name, value in model_kwargs.items()
        }
        is_first = start == num_read
        chunks.append(
            prepare(input_ids[:, :end], next_sequence_length=end - start, is_first_iteration=is_first, **chunk)
        )
    return chunks


def _no_tree_because(model: PreTrainedModel, scores: BlockScores, sample_proposals: bool) -> str | None:
    """Why several tokens cannot stand at one position of the text, if so."""
    text_config = model.config.get_text_config(decoder=True)
    implementation = text_config._attn_implementation
    recurrent_types = RowCache(model.config).recurrent_layer_types
    if recurrent_types:
        return f"the target has layers of type {', '.join(recurrent_types)}"
    if implementation not in MASKED_ATTENTION:
        return f"the target's attention is {implementation!r}, which takes no mask of our own"
    has_own_positions = getattr(text_config, "alibi", False) or text_config.model_type == "gpt_neo"
    if has_own_positions or "position_ids" not in inspect.signature(model.forward).parameters:
        return "the target makes the positions of its tokens itself, one after the other"
    if not scores.is_prefix_free:
        return "a logits processor depends on the text before each token"
    return "the proposals are drawn" if sample_proposals else None


def _block_length(
    block_size: int | str | None,
    tree_size: int | None,
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    no_tree_because: str | None,
) -> BlockLength:
    trained = draft.config.block_size
    if tree_size is not None:
        if no_tree_because:
            raise ValueError(f"tree_size={tree_size} cannot be used: {no_tree_because}. Leave it out.")
        if block_size is not None or not isinstance(tree_size, int) or tree_size <= trained:
            raise ValueError(
                f"tree_size={tree_size!r} must be more than the {trained} slots of a block, and goes without "
                f"block_size (here {block_size!r})."
            )
        return BlockLength(tree_size)
    if block_size is None:
        return BlockLength(trained)
    if block_size == "auto":
        return AdaptiveBlockLength(times_of_pair(model, draft, trained), use_trees=no_tree_because is None)
    if not isinstance(block_size, int) or not 1 <= block_size <= trained:
        raise ValueError(
            f"block_size={block_size!r} must be 'auto' or 1 to {trained}, the slots the draft was trained for."
        )
    return BlockLength(block_size)


def _by_step(kept: list[list[torch.Tensor]]) -> Any:
    """Scores of each row's tokens, as a tensor `[rows, vocabulary]` for each step; zero where a row had ended."""
    rows = [torch.stack(tokens) for tokens in kept]
    return torch.nn.utils.rnn.pad_sequence(rows).unbind(0)
