"""The two entry points of decoding with a draft: a loop for `generate`, and a function that calls `generate`."""

from __future__ import annotations

import functools
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
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..model.configuration_dflash import describe_target, text_tokenizer
from ..model.modeling_dflash import DFlashDraftModel
from ..target.hidden_states import unwrap_peft
from ..target.loading import has_weights
from ..target.rotary import length_dependent_angles
from . import PROPOSALS
from .call_checks import (
    check_cache_holds_less,
    check_call,
    check_head_arguments,
    check_length_of_text,
    tree_obstacle,
    usable_draft,
)
from .draft_length import AdaptiveDraftLength, DraftLengthScheduler, FixedDraftLength, latency_model_of
from .generation_settings import check_token_healing
from .kv_cache import check_cache_continuation
from .logits_processing import BlockLogitsProcessor
from .loop import Continuation, DecodingLoop, VerifyPass
from .statistics import DecodingStatistics
from .stopping_criteria import BlockStoppingCriteria

logger = logging.get_logger(__name__)


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """
    The output of `generate` with `return_dict_in_generate=True`, with the statistics of decoding with a draft.

    Args:
        statistics ([`DecodingStatistics`]): the acceptance and the times of the call.
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
    confidence_threshold: float | None = None,
    markov_top_k: int | None = None,
    streamer: BaseStreamer | None = None,
    on_pass: Callable[[VerifyPass], None] | None = None,
    **model_kwargs: Any,
) -> DFlashGenerateOutput | torch.Tensor:
    """
    Decode with a draft. Pass this function to `generate`, which prepares everything else.

    The call is `target.generate(**inputs, custom_generate=dflash_decoding, draft=draft)`. Greedy decoding gives the
    text of plain `generate` token by token, and sampling gives its distribution. `generate` of transformers 5.24 does
    not pass a `streamer` or a `tokenizer` on; [`speculative_generate`] does.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs:
            The arguments that `generate` hands over.
        draft ([`DFlashDraftModel`]):
            The draft of this target. It need not be tied.
        block_size (`int` or `"auto"`, *optional*):
            Number of slots to verify in each pass, the anchor included. It is at most the trained number, which is the
            default. 1 is plain decoding. `"auto"` chooses the number by recent acceptance and measured latency.
        tree_size (`int`, *optional*):
            Number of tokens to verify in each pass, the anchor included, if it exceeds the slots of a block. Second
            and later choices of the draft then join its first ones in a tree. A tree pays where a pass costs little
            more for more tokens: with one sequence, and 16 to 32 tokens.
        proposal (`str`, defaults to `"argmax"`):
            How tokens are drafted when the target samples. `"argmax"` proposes the draft's best tokens and accepts
            each with its target probability. `"sample"` samples the proposals from the draft. Both are lossless. The
            first accepts more where the tokens of a block depend strongly on each other, the second where the draft's
            probabilities are close to the target's.
        confidence_threshold (`float`, *optional*):
            Verify a block only up to the first token that the draft's confidence head gives a smaller probability, 0
            to 1. In a batch the most confident sequence decides.
        markov_top_k (`int`, *optional*):
            Let a Markov head correct this many of the best logits of a slot and drop all others. By default it
            corrects all of them, which reads a matrix of the size of the vocabulary for every slot.
        streamer (`BaseStreamer`, *optional*):
            Receives the prompt and then each token, as in plain generation. It needs a batch of one sequence.
        on_pass (`Callable`, *optional*):
            Called with a [`VerifyPass`] after every pass of the target.

    Returns:
        `torch.LongTensor` of shape `[sequences, columns]`, or [`DFlashGenerateOutput`] with
        `return_dict_in_generate=True`.

    Raises:
        ValueError: The pair does not fit, the cache of the target does not support rejected tokens, or this loop does
            not support an argument.
        TypeError: `draft` is not a [`DFlashDraftModel`].

    Source: section "speculative decoding" of DFlash (arXiv 2602.06036). Two things differ: the draft proposes its best
    tokens when sampling, too, and each sequence of a batch advances by its own number of tokens.
    """
    draft = usable_draft(draft)
    num_padding = check_call(model, input_ids, generation_config, model_kwargs)
    draft.check_target(model)
    if not has_weights(model):
        raise ValueError(
            f"The target {describe_target(model)} has weights on the meta device, which hold no values. Load it with "
            "from_pretrained."
        )
    if proposal not in PROPOSALS:
        raise ValueError(f"proposal={proposal!r} must be one of {', '.join(PROPOSALS)}. Pass one of them.")
    if str(generation_config.cache_implementation).startswith(("offloaded", "quantized")):
        logger.warning_once(
            f"cache_implementation={generation_config.cache_implementation!r} is not used, because decoding with a "
            "draft has its own cache, on the devices and in the dtype of the layers."
        )
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(
            f"A streamer takes the tokens of one sequence, and the batch has {len(input_ids)}. Leave the streamer "
            "out, or use on_pass."
        )
    check_head_arguments(draft, confidence_threshold, markov_top_k, tree_size)
    criteria = BlockStoppingCriteria(stopping_criteria)
    check_length_of_text(model, input_ids, num_padding, criteria.max_length)
    sample_proposals = bool(generation_config.do_sample) and proposal == "sample"
    obstacle = tree_obstacle(model, sample_proposals)
    scheduler = _scheduler(block_size, tree_size, model, draft, obstacle)
    check_cache_continuation(model)  # the last check, because it may run the target
    if streamer is not None:
        streamer.put(input_ids.cpu())
    pad_token_id = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    loop = DecodingLoop(
        model,
        draft,
        input_ids,
        num_padding,
        logits_processor=BlockLogitsProcessor(logits_processor),
        stopping_criteria=criteria,
        do_sample=bool(generation_config.do_sample),
        sample_proposals=sample_proposals,
        scheduler=scheduler,
        confidence_threshold=confidence_threshold,
        markov_top_k=markov_top_k,
        pad_token_id=pad_token_id,
        keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
        keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
        on_pass=on_pass if streamer is None else functools.partial(_put_tokens, streamer, on_pass),
    )
    given = model_kwargs.pop("cache", None)
    continuation = _continuation(model, given, input_ids.shape[1])
    num_read = 0 if continuation is None else loop.resume(given, continuation)
    # A cache of a target without attention is never initialised, and has no length to compare.
    if not num_read and getattr(given, "is_initialized", False):
        check_cache_holds_less(given, input_ids)
        logger.warning_once(
            f"The cache that was passed ({type(given).__name__}) does not hold the text of this call for this pair, "
            "so the whole text is read and the cache stays unchanged."
        )
    cache = loop.target_runner.cache
    loop.run(_prefill_inputs(model, input_ids, num_read, generation_config, model_kwargs | {"cache": cache}))
    if streamer is not None:
        streamer.end()
    finished = [loop.sequences.finished[index] for index in range(len(input_ids))]
    sequences: Any = torch.nn.utils.rnn.pad_sequence(finished, batch_first=True, padding_value=pad_token_id)
    if not generation_config.return_dict_in_generate:
        return sequences
    recorder = loop.recorder
    return DFlashGenerateOutput(
        sequences=sequences,
        scores=None if recorder.scores is None else _by_step(recorder.scores),
        logits=None if recorder.logits is None else _by_step(recorder.logits),
        cache=cache if len(finished) == 1 else None,
        statistics=recorder.statistics,
    )


def speculative_generate(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    inputs: torch.LongTensor | None = None,
    *,
    block_size: int | str | None = None,
    tree_size: int | None = None,
    proposal: str = "argmax",
    confidence_threshold: float | None = None,
    markov_top_k: int | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    on_pass: Callable[[VerifyPass], None] | None = None,
    **generate_kwargs: Any,
) -> DFlashGenerateOutput:
    """
    Generate with a draft, and return the text with its statistics.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]):
            The pair.
        inputs (`torch.LongTensor` of shape `[sequences, columns]`, *optional*):
            The prompts, as for `generate`. They can also be passed as `input_ids=`.
        block_size, tree_size, proposal, confidence_threshold, markov_top_k, streamer, on_pass:
            See [`dflash_decoding`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of the target, which `stop_strings` needs.
        stop_strings (`str` or `list[str]`, *optional*):
            Strings that end a sequence, at any place in a block; those of the generation config by default.
        **generate_kwargs:
            Further arguments of `target.generate`.

    Returns:
        [`DFlashGenerateOutput`]: `sequences` of shape `[sequences, columns]`, `statistics`, and for one sequence a
        `cache` from which a later call with the whole text can continue (`cache=`).

    Raises:
        ValueError: See [`dflash_decoding`]. Also, `stop_strings` came without a `tokenizer`, or
            `token_healing` is set.
    """
    source = ""
    given = (generate_kwargs.get("generation_config"), unwrap_peft(target).generation_config)
    configs = [config for config in given if config is not None]
    check_token_healing(generate_kwargs.get("token_healing"), *(config.token_healing for config in configs))
    for config in configs:
        if stop_strings is None and config.stop_strings is not None:
            stop_strings, source = config.stop_strings, " of the generation config"
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings={stop_strings!r}{source} came without a tokenizer, and the texts of tokens are needed "
                "to find them. Pass tokenizer=, the tokenizer of the target."
            )
        # `generate` of transformers 5.24 gives the tokenizer to no criterion when it has custom_generate.
        criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
        generate_kwargs["stopping_criteria"] = StoppingCriteriaList(
            [StopStringCriteria(text_tokenizer(tokenizer), stop_strings), *criteria]
        )
        generate_kwargs["stop_strings"] = None
    decode = functools.partial(
        dflash_decoding,
        draft=draft,
        block_size=block_size,
        tree_size=tree_size,
        proposal=proposal,
        confidence_threshold=confidence_threshold,
        markov_top_k=markov_top_k,
        streamer=streamer,
        on_pass=on_pass,
    )
    generate: Any = target.generate  # the method of a mixin, which type checkers do not see
    return generate(inputs, custom_generate=decode, **{**generate_kwargs, "return_dict_in_generate": True})


def _put_tokens(streamer: BaseStreamer, on_pass: Callable[[VerifyPass], None] | None, verify_pass: VerifyPass) -> None:
    """Hand the tokens of a pass to a streamer, one by one, because it may flush at some of them."""
    for token in verify_pass.token_ids[0]:
        streamer.put(torch.tensor([token]))
    if on_pass is not None:
        on_pass(verify_pass)


def _continuation(model: PreTrainedModel, cache: Any, length: int) -> Continuation | None:
    """Return from where a text of some length can continue from a cache of an earlier call, or `None`."""
    continuation: Continuation | None = getattr(cache, "continuation", None)
    angles = length_dependent_angles(model.config)
    if continuation is None or angles is None:
        return continuation
    # The keys of the other side of this length have other angles.
    return continuation if (continuation.read_length > angles[1]) == (length > angles[1]) else None


def _prefill_inputs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    num_read: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the inputs of the target for the prompt after its first `num_read` columns, one for each chunk."""
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


def _scheduler(
    block_size: int | str | None,
    tree_size: int | None,
    model: PreTrainedModel,
    draft: DFlashDraftModel,
    obstacle: str | None,
) -> DraftLengthScheduler:
    """Return the scheduler that `block_size` and `tree_size` ask for."""
    trained = draft.config.tokens_per_block
    if tree_size is not None:
        if obstacle:
            raise ValueError(f"tree_size={tree_size} cannot be used, because {obstacle}. Leave it out.")
        if block_size is not None or type(tree_size) is not int or tree_size <= trained:
            raise ValueError(
                f"tree_size={tree_size!r} must be an integer above {trained}, the number of slots of a block, and "
                f"come without block_size (here {block_size!r}). Pass a larger tree_size, or leave one of the two out."
            )
        return FixedDraftLength(tree_size)
    if block_size is None:
        return FixedDraftLength(trained)
    if block_size == "auto":
        return AdaptiveDraftLength(latency_model_of(model, draft, trained), use_trees=obstacle is None)
    if type(block_size) is not int or not 1 <= block_size <= trained:
        raise ValueError(
            f"block_size={block_size!r} must be 'auto' or a number from 1 to {trained}, the number of slots that the "
            "draft was trained with. Pass one of these."
        )
    return FixedDraftLength(block_size)


def _by_step(kept: list[list[torch.Tensor]]) -> Any:
    """Return a tensor `[sequences, vocabulary]` for each step, with zeros for sequences that have ended."""
    sequences = [torch.stack(tokens) for tokens in kept]
    return torch.nn.utils.rnn.pad_sequence(sequences).unbind(0)
