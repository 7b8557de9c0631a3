"""
Compute hidden states of a draft with the class of speculators, for the tests of other software.

The interpreter of an environment with speculators runs this file, which imports nothing of this package.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file, save_file


def main(folder: str, inputs_file: str, outputs_file: str) -> None:
    from speculators import SpeculatorModel

    draft = SpeculatorModel.from_pretrained(folder).eval()
    draft.config.transformer_layer_config._attn_implementation = "eager"
    saved, loaded = load_file(f"{folder}/model.safetensors"), draft.state_dict()
    assert saved
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())

    inputs = load_file(inputs_file)
    hidden_states = inputs["noise_embeds"]
    context = draft.hidden_norm(draft.fc(inputs["context_hidden_states"]))
    positions = torch.arange(context.shape[1] + hidden_states.shape[1])[None]
    for layer in draft.layers:
        hidden_states = layer(
            hidden_states=hidden_states,
            target_hidden=context,
            attention_mask=None,
            position_embeddings=draft.rotary_emb(hidden_states, positions),
        )
    block_embeds = draft.embed_tokens(inputs["block_ids"])
    hidden_states = draft.norm(hidden_states)
    logits = draft.lm_head(hidden_states)
    outputs = {"block_embeds": block_embeds, "logits": logits, "tokens": walk(draft, inputs, hidden_states, logits)}
    save_file({name: value.contiguous() for name, value in outputs.items()}, outputs_file)
    names = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids")
    print(json.dumps({"class": type(draft).__name__, **{name: getattr(draft.config, name) for name in names}}))


def walk(draft, inputs, hidden_states, logits):
    """Choose the tokens of the block with the heads of speculators, each after the one before."""
    before, tokens = inputs["block_ids"][:, :1], []
    first = 0 if draft.config.sample_from_anchor else 1
    for slot in range(first, logits.shape[1]):
        states, scores = hidden_states[:, slot : slot + 1], logits[:, slot : slot + 1]
        if getattr(draft, "candidate_selector", None) is not None:
            candidates, edges = draft.candidate_selector.select(scores, states, before)
            chosen = candidates.gather(-1, edges.argmax(-1, keepdim=True))[..., 0]
        elif getattr(draft, "markov_head", None) is not None:
            # The bias of a slot depends on all tokens before it, so that a recurrent head runs over all of them.
            path = torch.cat([inputs["block_ids"][:, :1], *tokens], dim=1)
            states = hidden_states[:, first : slot + 1]
            bias = draft.markov_head.block_bias(prev_token_ids=path, hidden_states=states)[:, -1:]
            chosen = (scores + bias).argmax(-1)
        else:
            chosen = scores.argmax(-1)
        if getattr(draft, "d2t", None) is not None:
            chosen = chosen + draft.d2t[chosen]
        tokens.append(chosen)
        before = chosen
    return torch.cat(tokens, dim=1)


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
