"""Whether a target with recurrent layers can go on from its cache as block-parallel decoding needs it."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..model.configuration_dflash import describe_target
from .kv_cache import RowCache

PROBE_PARTS = (5, 1, 2, 4)  # tokens of each pass; shorter and longer than the usual convolution, and a single token
# The logits of a state that was lost differ by about their own size, those of other kernels by rounding.
ALLOWED_SHARE = {torch.float32: 0.01}
ALLOWED_SHARE_OF_SHORT_DTYPES = 0.1
_goes_on_exactly: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def check_cache_continuation(target: PreTrainedModel) -> None:
    """
    Refuse a target whose recurrent layers cannot read several tokens from a saved state.

    A verify pass reads several tokens at once after those in the cache, and goes back when some are rejected. Some
    models start from nothing whenever they get more than one token, or keep their state where no cache reaches it;
    their text would be wrong without any error. So a few tokens are read at once and in parts, with a rejected part in
    between, and the logits are compared. Once for each target, and only if it has recurrent layers.

    Args:
        target (`PreTrainedModel`): in evaluation mode.

    Raises:
        ValueError: the logits differ, or the layers have a cache of their own kind; their types are named.
    """
    cache = RowCache(target.config)
    if not (cache.is_recurrent or getattr(target, "_is_stateful", False)):
        return
    if target not in _goes_on_exactly:
        _goes_on_exactly[target] = _logits_in_parts_agree(target, cache)
    if not _goes_on_exactly[target]:
        kinds = (
            f"layers of type {', '.join(cache.recurrent_layer_types)}" if cache.is_recurrent else "recurrent layers"
        )
        raise ValueError(
            f"The target {describe_target(target)} has {kinds} that do not go on from a cache with several tokens at "
            "once, which verifying drafted tokens needs: read in parts, a text gave other logits than read at once. "
            "Use plain generate for this target."
        )


def _logits_in_parts_agree(target: PreTrainedModel, cache: RowCache) -> bool:
    length = sum(PROBE_PARTS)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(1, 1 + length, device=target.device)[None] % vocabulary
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters

    def logits_of(cache: RowCache, tokens: torch.Tensor, start: int) -> torch.Tensor:
        end = start + tokens.shape[1]
        cache.place(start, end)
        inputs: dict[str, Any] = {"input_ids": tokens, "cache": cache, "use_cache": True}
        if takes_positions:
            inputs["position_ids"] = torch.arange(start, end, device=tokens.device)[None]
        return target(**inputs).logits.float()

    try:
        expected = logits_of(RowCache(target.config), tokens, 0)
        parts, start = [], 0
        for count in PROBE_PARTS:
            part = tokens[:, start : start + count]
            if start:
                cache.save_states()
                logits_of(cache, (part + vocabulary // 2) % vocabulary, start)  # rejected
                cache.restore_states()
            parts.append(logits_of(cache, part, start))
            cache.accept_states()
            start += count
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # the model has a cache of its own kind
        return False
    allowed = ALLOWED_SHARE.get(target.dtype, ALLOWED_SHARE_OF_SHORT_DTYPES)
    difference = (torch.cat(parts, dim=1) - expected).norm(dim=-1)
    return bool((difference <= allowed * expected.norm(dim=-1)).all())
