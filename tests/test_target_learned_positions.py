"""Targets with a table of positions: no text is longer than the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_pairs import make_draft, make_guessing_draft, make_target, ragged_prompts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

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
GREEDY = {"do_sample": False, "pad_token_id": 0}
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


class StopAt(StoppingCriteria):
    """Ends all sequences at a number of columns, as an end token would."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.num_columns)


@pytest.mark.parametrize("how", [{}, {"tree_size": 9}], ids=["chain", "tree"])
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_block_of_a_text_that_ends_itself_does_not_run_over_the_learned_positions(name, num_sequences, how):
    if name == "gpt_neo" and (how or num_sequences > 1):
        pytest.skip("refused, because the target makes masks of its own")
    target = make_family(name)
    inputs = ragged_prompts(num_sequences, seed=1)
    padding = int((1 - inputs["attention_mask"]).sum(1).min())
    plain = target.generate(**inputs, **GREEDY, max_length=LENGTH + 1 + padding)
    draft = make_guessing_draft(target).teach(target, plain, 0.0)
    for length in range(LENGTH - 3, LENGTH + 2):
        stop = StoppingCriteriaList([StopAt(length + padding)])
        drafted = speculative_generate(
            target, draft, **inputs, **GREEDY, max_new_tokens=10**12, stopping_criteria=stop, **how
        )
        assert torch.equal(drafted.sequences, plain[:, : length + padding])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_that_runs_over_the_learned_positions_is_stopped_by_name(name):
    target = make_family(name)
    draft, prompt = make_draft(target), torch.tensor([[4, 8, 15]])
    plain = target.generate(prompt, **GREEDY, max_length=LENGTH + 1)
    assert torch.equal(speculative_generate(target, draft, prompt, **GREEDY, max_length=LENGTH + 1).sequences, plain)
    with pytest.raises((IndexError, RuntimeError)):
        target.generate(prompt, **GREEDY, max_length=LENGTH + 2)
    with pytest.raises(ValueError, match=r"has learned 24 positions, .* Pass max_length=25 or less"):
        speculative_generate(target, draft, prompt, **GREEDY, max_new_tokens=LENGTH)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_beyond_the_learned_positions_is_refused_before_the_prefill(name):
    target = make_family(name)
    draft = make_draft(target)
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"A prompt has 25 tokens, .* has learned 24 positions. Truncate the prompt"):
        speculative_generate(target, draft, torch.ones(1, LENGTH + 1, dtype=torch.long), **GREEDY, max_new_tokens=1)
    assert not passes
