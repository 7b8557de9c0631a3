"""Tiny targets of several families, and a draft that is right as often as a test wants."""

from __future__ import annotations

from typing import Any

import torch
from conftest import TINY, make_draft, make_target
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dflash_hf import DFlashDraftModel

LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": 7}),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8, "layer_types": HYBRID_LAYERS, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **LINEAR,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {"head_dim": 8, "layer_types": HYBRID_LAYERS, **LINEAR}),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip


def make_family(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random target of a family, with large weights so that its greedy text is varied."""
    model_type, values = FAMILIES[name]
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**TINY, **values, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


class GuessingDraft(DFlashDraftModel):
    """
    A draft that runs its own network and then proposes what it was told, wrong at some places.

    Its hidden states are replaced by ones from which the target's head makes the wanted tokens. A row is recognised by
    its anchor's position and embedding.
    """

    def teach(
        self, target: PreTrainedModel, sequences: torch.Tensor, wrong_share: float, seed: int = 0
    ) -> GuessingDraft:
        generator = torch.Generator().manual_seed(seed)
        self.answers = [row[row.cumsum(0) > 0] for row in sequences]  # without the padding of the prompt
        self.wrong = [torch.rand(len(row), generator=generator) < wrong_share for row in self.answers]
        self.embeddings = target.get_input_embeddings()(torch.arange(target.config.vocab_size))
        head = target.get_output_embeddings().weight.detach().float()
        self.hidden_for = nn.functional.normalize(head, dim=-1) * 50
        self.own_hidden: list[tuple[int, int, torch.Tensor]] = []  # (answer, position of the anchor, block)
        return self

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)
        size = self.config.block_size
        hidden = output.last_hidden_state.clone()
        for row, positions in enumerate(position_ids[:, -size:].tolist()):
            anchor = (self.embeddings - noise_embeds[row, 0]).abs().sum(-1).argmin()
            for index, answer in enumerate(self.answers):
                if positions[0] < len(answer) and answer[positions[0]] == anchor:
                    self.own_hidden.append((index, positions[0], output.last_hidden_state[row].clone()))
                    for slot, position in enumerate(positions):
                        if position < len(answer):
                            token = answer[position] + self.wrong[index][position]
                            hidden[row, slot] = self.hidden_for[token % len(self.hidden_for)].to(hidden)
                    break
        output.last_hidden_state = hidden
        return output


def make_guessing_draft(target: PreTrainedModel, **overrides: Any) -> GuessingDraft:
    draft = make_draft(target, **overrides)
    guessing = GuessingDraft(draft.config).eval()
    guessing.load_state_dict(draft.state_dict())
    return guessing


def ragged_prompts(num_rows: int, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (num_rows, length), generator=generator)
    padding = torch.randint(0, length - 1, (num_rows, 1), generator=generator)
    mask = (torch.arange(length) >= padding).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


__all__ = ["make_family", "make_guessing_draft", "make_target", "ragged_prompts"]
