"""Targets whose generation config asks for something: a command writes plain's text, or refuses before it begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_pairs import PROMPTS, make_pair, prompt_lengths
from conftest import error_line, make_draft, make_tokenizer
from test_evaluation_suite import make_evaluation, make_set
from test_regeneration_local import END, PAD, completions_of, make_chat_target, make_requests
from tiers import thinned
from transformers import AutoModelForCausalLM, PreTrainedModel, WatermarkingConfig

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, speculative_generate
from dflash_hf.benchmarks.decoding import DecodingBenchmark
from dflash_hf.benchmarks.decoding_settings import BenchmarkSettings
from dflash_hf.cli.chat_session import ChatSession
from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.doctor.forced_decoding import generate_responses
from dflash_hf.evaluation.compare import compare_on_prompts, generated_acceptance_length
from dflash_hf.evaluation.timed_generation import generate_timed
from dflash_hf.regeneration.local import LocalBackend
from dflash_hf.regeneration.requests import SamplingParameters, TurnRequest

PROMPT, LENGTH = "Why?", 16
# The target writes 142, 242, 270, 25, 110, 32, 146, 168, 142, … ("n" is 110).
ENTRIES: dict[str, Any] = {
    "stop_strings": ["n"],
    "max_length": 8,
    "max_new_tokens": 3,
    "min_new_tokens": 12,
    "forced_eos_token_id": END,
    "bad_words_ids": [[25], [146, 168]],
    "suppress_tokens": [270],
    "begin_suppress_tokens": [142],
    "sequence_bias": [[[25], -9.0]],
    "watermarking_config": WatermarkingConfig(seeding_scheme="lefthash"),
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "exponential_decay_length_penalty": (3, 3.0),
    "guidance_scale": 1.5,
    "renormalize_logits": True,
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 2,
    "num_assistant_tokens": 7,
    "use_cache": False,
    "cache_implementation": "static",
    "return_dict_in_generate": True,
    "output_hidden_states": True,
}
REFUSED: dict[str, Any] = {
    "token_healing": True,
    "dola_layers": "low",
    "constraints": [1],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
}
Write = Callable[[PreTrainedModel, DFlashDraftModel], list[int]]


def make_asking_target(name: str, value: Any) -> PreTrainedModel:
    target = make_chat_target()
    setattr(target.generation_config, name, value)
    if name == "penalty_alpha":
        target.generation_config.top_k = 4
    return target


def prompt_of(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    return chat_inputs(make_tokenizer(), PROMPT, target.device, None)


def plain_text(target: PreTrainedModel) -> list[int]:
    inputs, settings = prompt_of(target), {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": PAD}
    output = target.generate(**inputs, **settings, tokenizer=make_tokenizer(), return_dict_in_generate=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def by_function(target: PreTrainedModel, draft: DFlashDraftModel) -> list[int]:
    inputs, settings = prompt_of(target), {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": PAD}
    output = speculative_generate(
        target, draft, **inputs, **settings, tokenizer=make_tokenizer(), output_hidden_states=False
    )
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist()


def by_chat(is_plain: bool) -> Write:
    def write(target: PreTrainedModel, draft: DFlashDraftModel) -> list[int]:
        session = ChatSession(
            target, draft, make_tokenizer(), max_new_tokens=LENGTH, do_sample=False, is_plain=is_plain
        )
        return session.answer(PROMPT, lambda *_: None).token_ids

    return write


def by_regeneration(continuous_batching: bool | None) -> Write:
    def write(target: PreTrainedModel, draft: DFlashDraftModel) -> list[int]:
        how = {"batch_size": 3, "continuous_batching": continuous_batching}
        backend = LocalBackend(target, make_tokenizer(), SamplingParameters(LENGTH), **how)
        first = TurnRequest("first", [{"role": "user", "content": PROMPT}])
        completion = completions_of(backend, [first, *make_requests(3)])["first"]
        return completion.token_ids

    return write


def by_comparison(target: PreTrainedModel, draft: DFlashDraftModel) -> list[int]:
    (pair,) = compare_on_prompts(target, draft, make_tokenizer(), [PROMPT], max_new_tokens=LENGTH)
    assert pair.is_identical
    return pair.drafted.token_ids


def by_doctor(target: PreTrainedModel, draft: DFlashDraftModel) -> list[int]:
    return generate_responses(target, make_tokenizer(), [PROMPT], max_new_tokens=LENGTH).completions[0]


WRITERS: dict[str, Write] = {
    "function": by_function,
    "chat": by_chat(False),
    "plain chat": by_chat(True),
    "regeneration": by_regeneration(None),
    "regeneration in static batches": by_regeneration(False),
    "comparison": by_comparison,
    "doctor": by_doctor,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", thinned(WRITERS, "function", "regeneration"))
def test_an_entry_of_the_generation_config_gives_plains_text(kind, entry):
    target = make_asking_target(entry, ENTRIES[entry])
    plain = plain_text(target)
    assert WRITERS[kind](target, make_draft(target, mask_token_id=271)) == plain


@pytest.mark.parametrize("entry", REFUSED)
@pytest.mark.parametrize("kind", WRITERS)
def test_an_entry_that_no_draft_supports_is_refused_before_a_pass(kind, entry):
    target = make_asking_target(entry, REFUSED[entry])
    draft = make_draft(target, mask_token_id=271)
    target.register_forward_pre_hook(lambda *_: pytest.fail("The target was called."))
    match = r"token_healing=True" if entry == "token_healing" else r"asks? for (dola|contrastive|constrained)"
    with pytest.raises(ValueError, match=match) as error:
        WRITERS[kind](target, draft)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "function"])
def test_a_command_that_decodes_one_response_leaves_beams_and_copies_out(kind, name):
    free = plain_text(make_chat_target())
    target = make_asking_target(name, 3)
    target.generation_config.do_sample = True  # alone, several sequences of greedy decoding are no valid config
    draft = make_draft(target, mask_token_id=271)
    assert WRITERS[kind](target, draft) == free


@pytest.mark.parametrize("entry", thinned(ENTRIES, "stop_strings", "repetition_penalty", "use_cache"))
def test_the_generated_acceptance_length_is_measured_with_every_entry(entry):
    target = make_asking_target(entry, ENTRIES[entry])
    draft, tokenizer, inputs = make_draft(target, mask_token_id=271), make_tokenizer(), prompt_of(target)
    prompt = inputs["input_ids"][0].tolist()
    row = {"input_ids": [*prompt, 3], "supervised_mask": [False] * len(prompt) + [True]}
    length = generated_acceptance_length(target, draft, [row], max_new_tokens=LENGTH, tokenizer=tokenizer)
    own = generate_timed(target, inputs, draft, tokenizer=tokenizer, max_new_tokens=LENGTH, do_sample=False)
    assert own.token_ids == plain_text(target)
    assert length == own.acceptance_length


@pytest.mark.parametrize("entry", [*REFUSED, "stop_strings"])
def test_a_trainer_whose_evaluation_could_not_generate_is_refused_when_it_is_made(entry, tmp_path):
    target = make_asking_target(entry, {**ENTRIES, **REFUSED}[entry])
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 1, 1]}]
    args = DFlashTrainingArguments(tmp_path, eval_generate_prompts=1, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match=r"token_healing=True|asks for|stop_strings=\['n'\], and eval_generate"):
        DFlashTrainer(make_draft(target, mask_token_id=271), target, args, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize("entry", ["stop_strings", "guidance_scale", "prompt_lookup_num_tokens", "use_cache"])
def test_an_evaluation_of_a_trainer_generates_with_an_entry_of_the_generation_config(entry, tmp_path):
    target = make_asking_target(entry, ENTRIES[entry])
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 1, 1]}]
    args = DFlashTrainingArguments(
        tmp_path, eval_generate_prompts=1, eval_generate_max_new_tokens=9, report_to="none", use_cpu=True
    )
    draft = make_draft(target, mask_token_id=271)
    how = {"train_dataset": rows, "eval_dataset": rows, "processing_class": make_tokenizer()}
    metrics = DFlashTrainer(draft, target, args, **how).evaluate()
    inputs = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    settings = {"max_new_tokens": 9, "do_sample": False, "tokenizer": make_tokenizer()}
    assert (
        metrics["eval_generate_acceptance_length"]
        == generate_timed(target, inputs, draft, **settings).acceptance_length
    )


@pytest.fixture
def commands(saved_target, tmp_path) -> Callable[..., dict[str, list[Any]]]:
    """Command lines for a saved pair whose target has an entry in its generation_config.json."""

    def make(entry: str, value: Any) -> dict[str, list[Any]]:
        folder, draft, prompts = saved_target(), tmp_path / "draft", tmp_path / "prompts.jsonl"
        make_draft(AutoModelForCausalLM.from_pretrained(folder), mask_token_id=271).save_pretrained(draft)
        entries = json.loads((Path(folder) / "generation_config.json").read_text())
        (Path(folder) / "generation_config.json").write_text(json.dumps({**entries, entry: value}))
        prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
        pair = ["--draft", draft, "--target", folder, "--max-new-tokens", LENGTH]
        return {
            "generate": ["generate", PROMPT, *pair],
            "generate --compare": ["generate", PROMPT, *pair, "--compare"],
            "regenerate": ["regenerate", "--target", folder, "--prompts", prompts, "--out", tmp_path / "rows"],
            "doctor": ["doctor", *pair],
            "demo": ["demo", "--target", folder, "--output-dir", tmp_path / "demo"],
            "eval": ["eval", *pair, "--prompts", prompts, "--temperatures", "0", "--out", tmp_path / "results"],
        }

    return make


@pytest.mark.parametrize("command", ["generate", "generate --compare", "regenerate", "doctor"])
def test_a_command_works_with_the_stop_strings_of_its_target(commands, run, command):
    code, out, err = run(*commands("stop_strings", ["n", "e"])[command])
    assert "tokenizer" not in err
    assert "cannot generate" not in out
    assert code == 0 or command == "doctor", err  # which finds other faults in a random draft


@pytest.mark.parametrize("command", ["generate", "generate --compare", "regenerate", "demo"])
def test_a_command_refuses_token_healing_in_one_line_before_its_work(commands, run, command, tmp_path):
    code, _, err = run(*commands("token_healing", True)[command])
    assert code == 1
    assert "token_healing=True" in error_line(err)
    assert not list(tmp_path.glob("**/checkpoint*"))


def test_the_command_eval_names_the_entries_that_it_does_not_use(commands, run, tmp_path, blank_pictures):
    code, out, err = run(*commands("no_repeat_ngram_size", 2)["eval"])
    assert code == 0, err
    line = "Not used of the target's generation config: no_repeat_ngram_size=2."
    assert line in out
    assert line in (tmp_path / "results" / "results.md").read_text()


def stopping_pair(num_before: int) -> Any:
    """A pair of whose drafts some tokens are accepted, and the responses up to a stop string inside a block."""
    tokenizer = make_tokenizer()
    target, draft, sequences = make_pair(tokenizer)
    lengths = prompt_lengths(target, tokenizer)
    responses = [sequence[length:].tolist() for sequence, length in zip(sequences, lengths, strict=True)]
    stop = next(
        text
        for response in responses
        for text in [tokenizer.decode([token]) for token in response[num_before:]]
        if text.isascii() and text.isprintable() and text
    )
    target.generation_config.stop_strings = [stop]
    wanted = []
    for response in responses:
        is_end = [stop in str(tokenizer.decode([token])) for token in response]
        wanted.append(response[: is_end.index(True) + 1] if any(is_end) else response)
    assert min(map(len, wanted)) < max(map(len, responses))
    return target, draft, tokenizer, wanted, responses


@pytest.mark.parametrize("num_before", [2, 5])
def test_an_evaluation_ends_responses_at_the_stop_strings_of_the_target(num_before):
    target, draft, tokenizer, wanted, responses = stopping_pair(num_before)
    target.generation_config.repetition_penalty = 1.3
    own = make_set(*([prompt] for prompt in PROMPTS))
    how = {"target": target, "draft": draft, "tokenizer": tokenizer, "max_new_tokens": 13, "batch_sizes": (1, 4)}
    evaluation = make_evaluation(own, **how)
    for pair in evaluation.run(evaluation.batches):
        expected = [wanted[index] for index in pair.prompts]
        assert pair.plain_token_ids == pair.drafted_token_ids == expected
        assert pair.is_truncated == [wanted[index] == responses[index] for index in pair.prompts]
    (note,) = evaluation.notes
    assert note.startswith("Not used of the target's generation config: repetition_penalty=1.3.")


def test_a_benchmark_ends_responses_at_the_stop_strings_of_the_target():
    target, draft, tokenizer, wanted, _ = stopping_pair(5)
    settings = BenchmarkSettings(max_new_tokens=13, batch_sizes=(1, 4), temperatures=(0.0,), block_sizes=(4,))
    benchmark = DecodingBenchmark(target, draft, tokenizer, PROMPTS, settings)
    runs = list(benchmark.run())
    assert len(runs) == benchmark.num_runs
    assert {run.method.name for run in runs} == {"plain", "ours"}
    assert all(run.token_ids == [wanted[prompt] for prompt in run.prompts] for run in runs)
    assert list(benchmark.left_out) == ["native"]
    assert "stop strings" in benchmark.left_out["native"]


@pytest.mark.parametrize("continuous_batching", [None, False])
def test_stop_strings_end_a_completion_but_are_not_read_in_padding(continuous_batching):
    """Batches are padded with token 0, whose text is the first letter of a stop string."""
    target, tokenizer = make_chat_target(), make_tokenizer()
    backend = LocalBackend(target, tokenizer, SamplingParameters(LENGTH), batch_size=4)
    free = completions_of(backend, make_requests(12))
    letters = [
        text
        for completion in free.values()
        for text in [tokenizer.decode(completion.token_ids[5:6])]
        if text.isascii() and text
    ]
    target.generation_config.stop_strings = [letters[0], tokenizer.decode([0]) + letters[1]]
    backend = LocalBackend(
        target, tokenizer, SamplingParameters(LENGTH), batch_size=4, continuous_batching=continuous_batching
    )
    reasons = set()
    for completion in completions_of(backend, make_requests(12)).values():
        ids = torch.tensor([completion.prompt_ids])
        alone = target.generate(ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=PAD, tokenizer=tokenizer)
        written = alone[0, ids.shape[1] :].tolist()
        assert completion.token_ids == written
        is_whole = len(written) == LENGTH and letters[0] not in completion.message["content"]
        assert completion.finish_reason == ("length" if is_whole else "stop")
        assert completion.message["content"].endswith(letters[0]) or is_whole or written[-1] == END
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
