"""Tiny targets of several families, and a draft that is right as often as a test wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TINY, make_draft, make_target
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

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
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
MAMBA_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
# These state-space families continue exactly from a state with several tokens.
STATE_SPACE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4}),
    "bamba": ("bamba", {"attn_layer_indices": [1], **MAMBA}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 64, "head_dim": 8, **MAMBA}),
    "granite_hybrid": (
        "granitemoehybrid",
        {"layer_types": MAMBA_LAYERS, "num_local_experts": 0, "shared_intermediate_size": 64, **MAMBA},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"], "head_dim": 8,
            "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4,
        },
    ),
}  # fmt: skip
# These families do not. Jamba and Mamba start from an empty state, RecurrentGemma keeps its state in modules, RWKV and
# MiniMax keep it elsewhere, and the loop does not know the chunked attention of Llama 4.
NOT_CONTINUING: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": (
        "jamba",
        {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "num_experts_per_tok": 1},
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 7}),
    "minimax": ("minimax", {"layer_types": HYBRID_LAYERS, "num_local_experts": 2, "block_size": 4}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
    "llama4": ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 2}),
}  # fmt: skip


FAST_FAMILIES = {"llama", "mistral", "qwen3_5", "qwen3_next"}  # dense, sliding window, linear attention, experts


def each_family(*names: str) -> list[Any]:
    """Parameters of a test over families, of which plain `pytest` runs four."""
    return [name if name in FAST_FAMILIES else pytest.param(name, marks=pytest.mark.families) for name in names]


def make_family(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a random target of a family, with large weights so that its greedy text varies."""
    model_type, values = {**FAMILIES, **STATE_SPACE, **NOT_CONTINUING}[name]
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**TINY, **values, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def make_multimodal() -> PreTrainedModel:
    """Make a random multimodal Qwen3.5, with three positions for each token and a nested text model."""
    torch.manual_seed(0)
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    config = CONFIG_MAPPING["qwen3_5"](
        text_config={**TINY, **FAMILIES["qwen3_5"][1], "rope_parameters": {**rotary, "mrope_interleaved": True}},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32},
        **{"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92},
    )
    return AutoModelForImageTextToText.from_config(config).eval()


class GuessingDraft(DFlashDraftModel):
    """
    A draft that runs its own network and then proposes the tokens it was taught, wrong at some places.

    Its hidden states are replaced by ones from which the target's head makes these tokens. A sequence is recognised by
    the position and the embedding of its anchor.
    """

    def teach(
        self,
        target: PreTrainedModel,
        sequences: torch.Tensor,
        wrong_share: float,
        seed: int = 0,
        second_share: float = 0.0,
    ) -> GuessingDraft:
        """Teach texts with a share of wrong places; at `second_share` of these the second choice is right."""
        generator = torch.Generator().manual_seed(seed)
        self.answers = [
            sequence[sequence.cumsum(0) > 0] for sequence in sequences
        ]  # without the padding of the prompt
        self.wrong = [torch.rand(len(sequence), generator=generator) < wrong_share for sequence in self.answers]
        self.embeddings = target.get_input_embeddings()(torch.arange(target.get_input_embeddings().num_embeddings))
        head = target.get_output_embeddings().weight.detach().float()
        self.hidden_for = nn.functional.normalize(head, dim=-1) * 50
        generator.manual_seed(seed + 1)
        self.second = [torch.rand(len(sequence), generator=generator) < second_share for sequence in self.answers]
        right = sorted({token for sequence in self.answers for token in sequence.tolist()}) if second_share else []
        self.hidden_for_second = {token: self._with_second_choice(token, head) for token in right}
        self.own_hidden: list[tuple[int, int, torch.Tensor]] = []  # (answer, position of the anchor, block)
        return self

    def _with_second_choice(self, token: int, head: torch.Tensor) -> torch.Tensor:
        """Return a hidden state for which this token is the second choice of the head."""
        for share in (0.9, 0.7, 0.5):
            mixed = self.hidden_for + share * self.hidden_for[token]
            best = (mixed @ head.t()).topk(3)
            is_so = (best.indices[:, 0] == torch.arange(len(head))) & (best.indices[:, 1] == token)
            is_so &= (best.values[:, :2] - best.values[:, 1:] > 0.5).all(1)
            if is_so.any():
                return mixed[is_so.nonzero()[0, 0]]
        raise ValueError(f"no mixture has token {token} second")

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)
        size = self.config.block_size
        hidden = output.last_hidden_state.clone()
        for sequence, positions in enumerate(position_ids[:, -size:].tolist()):
            anchor = (self.embeddings - noise_embeds[sequence, 0]).abs().sum(-1).argmin()
            for index, answer in enumerate(self.answers):
                if positions[0] < len(answer) and answer[positions[0]] == anchor:
                    self.own_hidden.append((index, positions[0], output.last_hidden_state[sequence].clone()))
                    for slot, position in enumerate(positions):
                        if position < len(answer):
                            token, is_wrong = answer[position], self.wrong[index][position]
                            if is_wrong and self.second[index][position]:
                                hidden[sequence, slot] = self.hidden_for_second[int(token)].to(hidden)
                            else:
                                token = (token + is_wrong) % len(self.hidden_for)
                                hidden[sequence, slot] = self.hidden_for[token].to(hidden)
                    break
        output.last_hidden_state = hidden
        return output


def make_guessing_draft(target: PreTrainedModel, **overrides: Any) -> GuessingDraft:
    draft = make_draft(target, **overrides)
    guessing = GuessingDraft(draft.config).eval()
    guessing.load_state_dict(draft.state_dict())
    return guessing


def ragged_prompts(num_sequences: int, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make random prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (num_sequences, length), generator=generator)
    padding = torch.randint(0, length - 1, (num_sequences, 1), generator=generator)
    mask = (torch.arange(length) >= padding).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def count_near_ties(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], plain: torch.Tensor, drafted: torch.Tensor
) -> int:
    """Count sequences whose texts part at logits closer than 1e-4, and fail at any other difference."""
    assert plain.shape[0] == drafted.shape[0]
    count, num_columns = 0, inputs["input_ids"].shape[1]
    for mask, ours, theirs in zip(inputs["attention_mask"], drafted.tolist(), plain.tolist(), strict=True):
        if ours == theirs:
            continue
        first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        assert first is not None, f"texts of {len(theirs)} and {len(ours)} tokens"
        assert first >= num_columns, "the prompt was changed"
        text = torch.tensor([theirs[int((mask == 0).sum()) : first]])
        with torch.no_grad():
            best = target(text, use_cache=False).logits[0, -1].topk(2)
        gap = (best.values[0] - best.values[1]).item()
        assert gap < 1e-4, f"column {first}: {ours[first]} instead of {theirs[first]}, and the gap is {gap:.4f}"
        count += 1
    return count


__all__ = ["count_near_ties", "make_family", "make_guessing_draft", "make_multimodal", "make_target", "ragged_prompts"]
