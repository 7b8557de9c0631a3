"""Targets with a table of positions: no text is longer than the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_pairs import make_draft, make_target
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dflash_hf import DFlashTrainer, DFlashTrainingArguments, speculative_generate
from dflash_hf.target.hidden_states import target_hidden_states
from dflash_hf.target.learned_positions import learned_positions

LENGTH = 24
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]],
        "max_position_embeddings": LENGTH,
    },
    "opt": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "word_embed_proj_dim": 32,
        "max_position_embeddings": LENGTH,
    },
    "biogpt": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    },
    "gptj": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "rotary_dim": 8},
    "codegen": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "rotary_dim": 8, "n_ctx": LENGTH},
}  # fmt: skip
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def make_family(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](vocab_size=97, **FAMILIES[name], **NONE)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_is_found_where_a_longer_text_cannot_be_read(name):
    target = make_family(name)
    target(torch.ones(1, LENGTH, dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError)):
        target(torch.ones(1, LENGTH + 1, dtype=torch.long))
    assert learned_positions(target) == LENGTH


def test_rotary_positions_are_no_table():
    assert learned_positions(make_target(max_position_embeddings=LENGTH)) is None
    xglm = CONFIG_MAPPING["xglm"](
        vocab_size=97, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=LENGTH
    )
    assert learned_positions(AutoModelForCausalLM.from_config(xglm)) is None  # its table grows


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_longer_than_the_learned_positions_is_truncated_when_the_trainer_is_made(name, tmp_path):
    target = make_family(name)
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 95, (length,), generator=generator).tolist()} for length in (10, 24, 90)]
    args = DFlashTrainingArguments(tmp_path, max_steps=1, report_to="none", per_device_train_batch_size=3)
    trainer = DFlashTrainer(make_draft(target), target, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    assert max(map(len, trainer.train_dataset["input_ids"])) == LENGTH


def test_hidden_states_of_a_longer_text_are_refused_in_one_line():
    target = make_family("gpt2")
    ids = torch.ones(2, 60, dtype=torch.long)
    valid = torch.arange(60) < torch.tensor([[10], [25]])
    with pytest.raises(ValueError, match="A text has 25 tokens, and GPT2LMHeadModel has learned 24 positions"):
        target_hidden_states(target, ids, valid, [0, 2])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_beyond_the_learned_positions_is_refused_before_the_prefill(name):
    target = make_family(name)
    draft, prompt = make_draft(target), torch.tensor([[4, 8, 15]])
    settings = {"do_sample": False, "pad_token_id": 0}
    plain = target.generate(prompt, **settings, max_length=LENGTH + 1)
    assert torch.equal(speculative_generate(target, draft, prompt, **settings, max_length=LENGTH + 1).sequences, plain)
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"has learned 24 positions, .* Pass max_length=25 or less"):
        speculative_generate(target, draft, prompt, **settings, max_new_tokens=LENGTH)
    assert not passes
