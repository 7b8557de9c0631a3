"""Targets with a table of positions: no text is longer than the table."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from decoding_pairs import make_draft, make_guessing_draft, make_target, ragged_prompts
from tiers import thinned
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from dflash_hf import DFlashTrainer, DFlashTrainingArguments, speculative_generate
from dflash_hf.evaluation.timed_generation import LOOPS, generate_timed
from dflash_hf.target.hidden_states import target_hidden_states
from dflash_hf.target.learned_positions import context_length, learned_positions

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
    "ctrl": {"n_embd": 32, "n_layer": 4, "n_head": 4, "dff": 64, "n_positions": LENGTH},
    "mpt": {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": LENGTH},
    **{
        name: {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "max_position_embeddings": LENGTH, "is_decoder": True,
        }
        for name in ("bert", "roberta")
    },
}  # fmt: skip
FAST = ("gpt2", "ctrl", "mpt")  # each has another kind of table
GREEDY = {"do_sample": False, "pad_token_id": 0}
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def make_family(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](vocab_size=97, **FAMILIES[name], **NONE)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", thinned(FAMILIES, *FAST))
def test_the_table_is_found_where_a_longer_text_cannot_be_read(name):
    target = make_family(name)

    def read(length: int) -> None:  # with the positions of generate, since those of RoBERTa alone begin after padding
        takes_positions = "position_ids" in inspect.signature(target.forward).parameters
        positions = {"position_ids": torch.arange(length)[None]} if takes_positions else {}
        target(torch.ones(1, length, dtype=torch.long), **positions)

    read(LENGTH)
    with pytest.raises((IndexError, RuntimeError)):
        read(LENGTH + 1)
    assert learned_positions(target) == LENGTH


def test_rotary_positions_are_no_table():
    assert learned_positions(make_target(max_position_embeddings=LENGTH)) is None
    xglm = CONFIG_MAPPING["xglm"](
        vocab_size=97, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=LENGTH
    )
    assert learned_positions(AutoModelForCausalLM.from_config(xglm)) is None  # its table grows


@pytest.mark.parametrize("name", thinned(FAMILIES, *FAST))
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
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
@pytest.mark.parametrize("name", thinned(FAMILIES, *FAST))
def test_the_last_block_of_a_text_that_ends_itself_does_not_run_over_the_learned_positions(name, num_sequences, how):
    if name in ("gpt_neo", "mpt") and (how or num_sequences > 1):
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


@pytest.mark.parametrize("name", thinned(FAMILIES, *FAST))
def test_a_text_that_runs_over_the_learned_positions_is_stopped_by_name(name):
    target = make_family(name)
    draft, prompt = make_draft(target), torch.tensor([[4, 8, 15]])
    plain = target.generate(prompt, **GREEDY, max_length=LENGTH + 1)
    assert torch.equal(speculative_generate(target, draft, prompt, **GREEDY, max_length=LENGTH + 1).sequences, plain)
    with pytest.raises((IndexError, RuntimeError)):
        target.generate(prompt, **GREEDY, max_length=LENGTH + 2)
    with pytest.raises(ValueError, match=r"has learned 24 positions, .* Pass max_length=25 or less"):
        speculative_generate(target, draft, prompt, **GREEDY, max_new_tokens=LENGTH)


@pytest.mark.parametrize("name", thinned(FAMILIES, *FAST))
def test_a_prompt_beyond_the_learned_positions_is_refused_before_the_prefill(name):
    target = make_family(name)
    draft = make_draft(target)
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"A prompt has 25 tokens, .* has learned 24 positions. Truncate the prompt"):
        speculative_generate(target, draft, torch.ones(1, LENGTH + 1, dtype=torch.long), **GREEDY, max_new_tokens=1)
    assert not passes


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mpt"])  # which is refused below
def test_responses_of_an_evaluation_end_at_the_last_learned_position(name, tmp_path):
    target = make_family(name)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "input_ids": torch.randint(1, 95, (length,), generator=generator).tolist(),
            "loss_mask": [0] * prompt + [1] * (length - prompt),
        }
        for length, prompt in ((10, 4), (LENGTH, LENGTH - 1), (90, 20))
    ]
    args = DFlashTrainingArguments(
        tmp_path, report_to="none", eval_generate_prompts=3, eval_generate_max_new_tokens=64
    )
    metrics = DFlashTrainer(make_draft(target), target, args, eval_dataset=rows).evaluate()
    assert metrics["eval_generate_acceptance_length"] >= 1


@pytest.mark.parametrize("loop", [None, *LOOPS])
def test_a_measured_text_beyond_the_learned_positions_is_refused_before_the_prefill(loop):
    target = make_family("gpt2")
    draft, prompt = make_draft(target), torch.tensor([[4, 8, 15]])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    arguments: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    call = {"draft": draft, "loop": loop} if loop else {}

    def run(max_new_tokens: int) -> int:
        return len(generate_timed(target, inputs, **call, **arguments, max_new_tokens=max_new_tokens).token_ids)

    room = LENGTH + 1 - 3 - (draft.config.block_size - 1 if loop == "transformers" else 0)
    assert run(room) == room
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=rf"after a prompt of 3 tokens, .* Pass max_new_tokens={room} or less"):
        run(room + 1)
    assert not passes


@pytest.mark.parametrize(
    ("name", "sizes", "reason"),
    [
        ("mpt", FAMILIES["mpt"], "position_ids"),
        ("bloom", {"hidden_size": 32, "n_layer": 4, "n_head": 4}, "position_ids"),
        ("openai-gpt", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}, "no attribute 'cache'"),
    ],
)
def test_a_target_that_cannot_generate_for_an_evaluation_is_refused_when_the_trainer_is_made(
    name, sizes, reason, tmp_path
):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](vocab_size=97, **sizes, **NONE)).eval()
    rows = [{"input_ids": torch.randint(1, 95, (12,)).tolist()}]
    arguments: dict[str, Any] = {"output_dir": tmp_path, "report_to": "none", "max_steps": 1}
    draft = make_draft(target).train()
    args = DFlashTrainingArguments(**arguments, eval_generate_prompts=1)
    with pytest.raises(ValueError, match=f"eval_generate_prompts asks .*{reason}.* Leave eval_generate") as raised:
        DFlashTrainer(draft, target, args, train_dataset=rows, eval_dataset=rows)
    assert "\n" not in str(raised.value)
    assert draft.training
    DFlashTrainer(draft, target, DFlashTrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows)


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """A GPT-2 with a chat template that has learned 64 positions."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt2"](vocab_size=272, **{**FAMILIES["gpt2"], "n_positions": 64}, **NONE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings about the length of rows."""
    logger = logging.getLogger("dflash_hf.target.learned_positions")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def write_rows(path: Path) -> Path:
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two " * 40}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def test_prepared_rows_end_at_the_last_learned_position(run, warnings, gpt2_folder, tmp_path):
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "prepared"
    code, stdout, err = run("prepare", "--target", gpt2_folder, "--dataset", rows, "--out", out)
    assert code == 0, err
    assert "Rows are limited to 64 tokens, the number of positions that the target has learned" in warnings.text
    assert "truncated at 64 tokens" in stdout
    assert json.loads((out / "report.json").read_text())["tokens"]["train"]["longest"] == 64


def test_inspected_rows_end_at_the_last_learned_position(run, warnings, gpt2_folder, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    code, stdout, err = run("inspect", rows, "--target", gpt2_folder, "--max-length", 100)
    assert code == 0, err
    assert "Rows are limited to 64 tokens" in warnings.text
    assert "64 tokens, truncated at max_length" in stdout


def test_responses_of_a_diagnosis_end_at_the_last_learned_position(run, gpt2_folder, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    make_draft(target, mask_token_id=271).save_pretrained(tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"

    def diagnose(*questions: str) -> str:
        prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
        pair = ["--draft", tmp_path / "draft", "--target", gpt2_folder, "--prompts", prompts]
        return run("doctor", *pair, "--num-prompts", len(questions))[1]

    shown = diagnose("1+1?", "A longer question, of 48 bytes with its markup?")
    assert "responses are truncated after 14 tokens or more, where the target's table of positions ends" in shown
    assert "the check failed" not in shown
    assert "A prompt has 83 tokens, and the target has learned 64 positions" in diagnose("1" * 80)


def test_the_context_of_a_target_is_its_table_or_what_its_configuration_says():
    assert context_length(make_family("mpt")) == LENGTH
    assert context_length(make_family("roberta")) == LENGTH
    assert context_length(make_target(max_position_embeddings=70)) == 70
