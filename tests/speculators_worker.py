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
    logits = draft.lm_head(draft.norm(hidden_states))
    save_file({"block_embeds": block_embeds.contiguous(), "logits": logits.contiguous()}, outputs_file)
    names = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids")
    print(json.dumps({"class": type(draft).__name__, **{name: getattr(draft.config, name) for name in names}}))


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
