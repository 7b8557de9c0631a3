"""The decoder of the package `dflash`, with the weights of a draft of this package."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config

from ..checkpoints.write_layouts import layout_config
from ..model.modeling_dflash import DFlashDraftModel


class ReferenceDecoder:
    """
    The decoder of the package `dflash`, which shares the weights of a draft without a copy.

    Args:
        draft ([`DFlashDraftModel`]): the draft whose weights it uses.

    Raises:
        ImportError: the package is not installed, or its version lacks the decoder.
    """

    def __init__(self, draft: DFlashDraftModel) -> None:
        try:
            from dflash import model as reference

            self._generate, model_class = reference.dflash_generate, reference.DFlashDraftModel
            self.version = version("dflash")
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"The reference decoder cannot be imported ({error}). It is part of the package dflash 0.1.0. Run "
                "pip install --no-deps dflash==0.1.0 (the versions that it pins are not needed)."
            ) from error
        described = layout_config(draft.config, "serving", str(draft.dtype).removeprefix("torch."))
        self.model: nn.Module = model_class(Qwen3Config(**described)).eval()
        self.model.to(draft.device)  # without a dtype, since its rotary frequencies must stay in fp32
        self.model.load_state_dict(draft.state_dict(), assign=True)

    def generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int,
        end_token_ids: list[int],
        temperature: float,
    ) -> torch.Tensor:
        """
        Decode one sequence.

        Args:
            target (`PreTrainedModel`): the target.
            input_ids (`torch.LongTensor` of shape `[1, length]`): the prompt.
            max_new_tokens (`int`): greatest length of the response in tokens.
            end_token_ids (`list[int]`): tokens that end the response.
            temperature (`float`): 0 decodes greedily.

        Returns:
            `torch.LongTensor` of shape `[1, length]`: prompt and response, the end token included.
        """
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # dflash 0.1.0 passes `past_key_values`, which transformers 5.24 calls `cache`
            generate: Any = self._generate
            return generate(
                self.model,
                target,
                input_ids,
                max_new_tokens,
                end_token_ids or None,
                temperature=temperature,
            )
