"""`dflash-hf bench decode` on tiny pairs: what is counted, timed and compared, and how it ends."""

from __future__ import annotations

import io
import itertools
import json
import sys

import pytest
import torch
from chat_pairs import PROMPTS, VOCABULARY, committed_by_hand, make_pair, prompt_lengths
from conftest import make_draft, make_target
from decoding_pairs import make_family
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.benchmarks import phases
from dflash_hf.benchmarks.decoding import DecodingBenchmark
from dflash_hf.benchmarks.decoding_results import DecodingRun, summarize_runs
from dflash_hf.benchmarks.decoding_settings import BenchmarkSettings, Method
from dflash_hf.benchmarks.reference_decoder import ReferenceDecoder
from dflash_hf.cli import app
from dflash_hf.cli.bench_decode import tables
from dflash_hf.evaluation import timed_generation

PLAIN, NATIVE, REFERENCE = Method("plain"), Method("native"), Method("reference")


def run_all(target, draft, tokenizer, prompts=PROMPTS, **settings) -> tuple[DecodingBenchmark, list[DecodingRun]]:
    benchmark = DecodingBenchmark(target, draft, tokenizer, prompts, BenchmarkSettings(**settings))
    return benchmark, list(benchmark.run())


def test_all_loops_write_plains_text_and_their_passes_commit_what_a_walk_by_hand_says(tokenizer):
    target, draft, sequences = make_pair(tokenizer)
    benchmark, runs = run_all(
        target, draft, tokenizer,
        max_new_tokens=13, batch_sizes=(1, 2), temperatures=(0.0,), block_sizes=(4, 2),
    )  # fmt: skip
    assert len(runs) == benchmark.num_runs == 4 * 4 + 2 * 3
    lengths = prompt_lengths(target, tokenizer)
    for run in runs:
        wanted = [sequences[prompt][lengths[prompt] :].tolist() for prompt in run.prompts]
        assert run.token_ids == wanted
        block_size = {"plain": 1, "native": 4, "ours": run.method.block_size}[run.method.name]
        by_hand = [
            committed_by_hand(draft.wrong[prompt], lengths[prompt], len(sequences[prompt]), block_size)
            for prompt in run.prompts
        ]
        if run.method == PLAIN:
            assert run.committed == []
            assert run.num_passes == 12
        else:
            # in a batch, a row that lacks one token takes part in the drafted pass of another
            ends: list[list[list[int]]] = [[row] if run.batch_size == 1 else [row, [*row, 1]] for row in by_hand]
            assert run.committed in [[n for row in rows for n in row] for rows in itertools.product(*ends)]
            if run.batch_size == 1:
                assert run.num_passes in (len(run.committed), len(run.committed) + 1)
                assert sum(run.committed) in (12, 11)
    assert len({count for run in runs if run.method.block_size == 4 for count in run.committed}) == 4
    summaries = summarize_runs(runs)
    assert [(s.batch_size, s.label) for s in summaries] == [
        (1, "plain generate"), (1, "transformers' loop"), (1, "ours, 4"), (1, "ours, 2"),
        (2, "plain generate"), (2, "ours, 4"), (2, "ours, 2"),
    ]  # fmt: skip
    assert [s.num_compared for s in summaries] == [0, 4, 4, 4, 4, 4, 4]
    assert all(s.num_identical == s.num_compared for s in summaries)


def test_an_answer_is_counted_up_to_its_first_end_token_and_not_its_padding(tokenizer):
    target, draft, sequences = make_pair(tokenizer)
    lengths = prompt_lengths(target, tokenizer)
    end = int(sequences[0][lengths[0] + 5])
    target.generation_config.eos_token_id = [end, 5]
    answers = [sequence[length:].tolist() for sequence, length in zip(sequences, lengths, strict=True)]
    wanted = []
    for answer in answers:
        ends = [index for index, token in enumerate(answer) if token in (end, 5)]
        wanted.append(answer[: ends[0] + 1] if ends else answer)
    assert len(wanted[0]) <= 6 < 13 == max(len(answer) for answer in wanted)
    settings = {"max_new_tokens": 13, "batch_sizes": (1, 4), "temperatures": (0.0,), "block_sizes": (4,)}
    _, runs = run_all(target, draft, tokenizer, **settings)
    for run in runs:
        assert run.token_ids == [wanted[prompt] for prompt in run.prompts]
        assert run.num_tokens == sum(len(wanted[prompt]) for prompt in run.prompts)


def test_times_are_booked_where_they_were_spent(tokenizer, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(phases.Stopwatch, "_now", lambda watch: clock[0])
    target, draft, _ = make_pair(tokenizer)

    def costs(module, seconds):
        own = module.forward

        def forward(*args, **kwargs):
            clock[0] += seconds
            return own(*args, **kwargs)

        monkeypatch.setattr(module, "forward", forward)

    costs(target.model, 1.0)
    costs(target.lm_head, 10.0)
    costs(draft, 100.0)
    own_choice = timed_generation.speculative_generate

    def slow(*args, **kwargs):
        clock[0] += 1000.0
        return own_choice(*args, **kwargs)

    monkeypatch.setattr(timed_generation, "speculative_generate", slow)
    settings = {"max_new_tokens": 9, "batch_sizes": (1, 2), "temperatures": (0.0, 1.0), "block_sizes": (4,)}
    _, runs = run_all(target, draft, tokenizer, **settings)
    assert {run.method.name for run in runs} == {"plain", "native", "ours"}
    for run in runs:
        assert run.phase_s["prefill"] == 11
        assert run.phase_s["verify"] == 11 * run.num_passes
        assert run.phase_s["overhead"] == (1000 if run.method.name == "ours" else 0)
        if run.batch_size == 1:
            assert run.phase_s["draft"] == 110 * len(run.committed)
        assert run.seconds == sum(run.phase_s.values())
    assert any(run.committed for run in runs)


def test_methods_take_turns_batch_by_batch_after_one_warm_up_each(tokenizer):
    target = make_target(**VOCABULARY)
    draft = make_draft(target, mask_token_id=271)
    settings = BenchmarkSettings(
        max_new_tokens=3, batch_sizes=(1, 2), temperatures=(0.5,), block_sizes=(2,), proposals=("argmax", "sample"),
        repeats=2,
    )  # fmt: skip
    words: list[str] = []
    benchmark = DecodingBenchmark(target, draft, tokenizer, PROMPTS[:2], settings)
    runs = list(benchmark.run(words.append))
    names = ["plain generate", "transformers' loop", "ours, 2", "ours, 2, sampled"]
    first = "T = 0.5, batch 1: "
    assert words[:4] == [f"{first}{name}, warm-up" for name in names]
    for turn in range(4):
        assert words[4 + 4 * turn : 8 + 4 * turn] == [first + name for name in names[turn:] + names[:turn]]
    assert [run.prompts for run in runs[:16:4]] == [[0], [1], [0], [1]]
    assert [run.repeat for run in runs[:16:4]] == [0, 0, 1, 1]
    assert sum("warm-up" in word for word in words) == 4 + 3
    assert {run.expected_sum is None for run in runs if run.method.name == "ours"} == {False}


def test_the_targets_own_settings_are_set_aside_and_put_back(tokenizer):
    target, draft, sequences = make_pair(tokenizer)
    lengths = prompt_lengths(target, tokenizer)
    own = target.generation_config
    own.update(repetition_penalty=50.0, do_sample=True, top_k=2)
    settings = {"max_new_tokens": 13, "batch_sizes": (1,), "temperatures": (0.0,), "block_sizes": (4,)}
    _, runs = run_all(target, draft, tokenizer, **settings)
    assert target.generation_config is own
    for run in runs:
        assert run.token_ids == [sequences[run.prompts[0]][lengths[run.prompts[0]] :].tolist()]
    started = DecodingBenchmark(target, draft, tokenizer, PROMPTS, BenchmarkSettings(**settings)).run()
    next(started)
    assert target.generation_config is not own
    started.close()
    assert target.generation_config is own


def test_sampling_uses_the_whole_distribution_and_the_seed(tokenizer):
    target = make_target(**VOCABULARY, initializer_range=0.02)  # nearly uniform: a cut at 50 tokens would show
    draft = make_draft(target, mask_token_id=271)
    settings = {"max_new_tokens": 40, "batch_sizes": (4,), "temperatures": (1.0,), "block_sizes": (4,)}
    _, runs = run_all(target, draft, tokenizer, **settings)
    for run in runs:
        assert len({token for row in run.token_ids for token in row}) > 90
    _, again = run_all(target, draft, tokenizer, **settings)
    _, other = run_all(target, draft, tokenizer, **settings, seed=1)
    assert [run.token_ids for run in again] == [run.token_ids for run in runs]
    assert all(run.token_ids != old.token_ids for run, old in zip(other, runs, strict=True))


def test_a_loop_that_cannot_take_the_target_is_left_out_with_its_reason(tokenizer):
    target = make_family("qwen3_next", **VOCABULARY)
    draft = make_draft(target, mask_token_id=271)
    settings = {"max_new_tokens": 5, "batch_sizes": (1,), "temperatures": (0.0,), "block_sizes": (4,)}
    benchmark, runs = run_all(target, draft, tokenizer, **settings)
    assert "stateful models" in benchmark.left_out["native"]
    assert [run.method.name for run in runs] == ["plain", "ours", "ours", "plain"] * 2
    assert len(runs) == benchmark.num_runs


def test_the_gap_is_between_the_best_logit_and_the_lower_one_of_the_two_tokens_after_the_common_text(tokenizer):
    target, draft, _ = make_pair(tokenizer)
    benchmark = DecodingBenchmark(target, draft, tokenizer, PROMPTS, BenchmarkSettings(batch_sizes=(1,)))
    text = torch.tensor(tokenizer("<|user|>What?<|end|><|assistant|>")["input_ids"] + [7, 8])
    logits, tokens = target(text[None]).logits[0, -1].sort(descending=True)
    best, second, third = tokens[:3].tolist()
    for one, other, worst in ((best, second, 1), (third, best, 2), (second, third, 2)):
        gap = benchmark.logit_gap(1, [7, 8, one, 5], [7, 8, other])
        assert gap == pytest.approx((logits[0] - logits[worst]).item(), abs=1e-5)


def run_of(method, seconds, token_ids, *, prompts, committed=(), expected=None, temperature=0.0, repeat=0):
    phase_s = {"prefill": seconds / 2, "draft": seconds / 8, "verify": seconds / 4, "overhead": seconds / 8}
    return DecodingRun(
        temperature, len(prompts), method, repeat, list(prompts), token_ids, phase_s, 3, list(committed), expected
    )


def test_runs_add_up_to_the_numbers_of_a_worked_example():
    ours = Method("ours", 4)
    runs = [
        run_of(PLAIN, 2.0, [[1, 2, 3, 4]], prompts=[0]),
        run_of(ours, 1.0, [[1, 2, 3, 4]], prompts=[0], committed=[3, 1], expected=3.5),
        run_of(ours, 4.0, [[5, 9]], prompts=[1], committed=[2], expected=1.5),
        run_of(PLAIN, 2.0, [[5, 6]], prompts=[1]),
        run_of(PLAIN, 1.0, [[7, 7]], prompts=[2]),
        run_of(ours, 1.0, [[7, 7, 8]], prompts=[2], committed=[2], expected=2.0),
        run_of(ours, 1.0, [[7, 7, 8]], prompts=[3]),  # interrupted before plain had its turn
        run_of(PLAIN, 3.0, [[1, 2, 3, 4], [5, 6]], prompts=[0, 1]),
        run_of(PLAIN, 3.0, [[1, 2, 3, 0], [5, 6]], prompts=[0, 1], temperature=1.0),
    ]
    plain, drafted, batched, sampled = summarize_runs(runs)
    assert (plain.num_tokens, plain.seconds, plain.tokens_per_s, plain.speed_up) == (8, 5.0, 1.6, 1.0)
    assert (plain.num_compared, plain.acceptance_length, plain.acceptance_length_error) == (0, None, None)
    assert (drafted.num_batches, drafted.num_responses, drafted.num_tokens, drafted.seconds) == (4, 4, 12, 7.0)
    assert drafted.speed_up == 1.5  # median of 4 / 2, 0.5 / 1 and 3 / 2
    assert drafted.speed_up_total == pytest.approx((9 / 6) / (8 / 5))
    assert drafted.acceptance_length == 2.0
    assert drafted.acceptance_length_error == pytest.approx((2 / 3) ** 0.5 / 2)
    assert drafted.expected_acceptance_length == 7 / 4
    assert (drafted.committed_histogram, drafted.num_drafted_passes, drafted.num_passes) == ([1, 2, 1], 4, 12)
    assert (drafted.num_compared, drafted.num_identical) == (3, 1)
    differences = [{"prompt": 1, "token": 1, "logit_gap": None}, {"prompt": 2, "token": 2, "logit_gap": None}]
    assert drafted.first_differences == differences
    looked_up = summarize_runs(runs, lambda prompt, one, other: prompt + (sum(one) + len(other)) / 100)[
        1
    ].first_differences
    assert [difference["logit_gap"] for difference in looked_up] == [1.16, 2.24]
    assert drafted.phase_s == {"prefill": 3.5, "draft": 0.875, "verify": 1.75, "overhead": 0.875}
    assert drafted.phase_share == {"draft": 0.25, "verify": 0.5, "overhead": 0.25}
    assert [batch["speed_up"] for batch in drafted.batches] == [2.0, 0.5, 1.5, None]
    assert (batched.batch_size, batched.num_compared, batched.num_identical) == (2, 2, 2)
    assert (sampled.num_compared, sampled.num_identical) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens=1 must be at least 2"),
        ({"repeats": 0}, "repeats=0"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
        ({"batch_sizes": (3,)}, "4 prompts do not fill whole batches of 3"),
        ({"batch_sizes": (0,)}, "do not fill whole batches of 0"),
        ({"temperatures": (-1.0,)}, "temperature=-1.0"),
        ({"temperatures": (float("nan"),)}, "temperature=nan"),
        ({"block_sizes": (5,)}, "block_size=5 must be 1 to 4"),
        ({"block_sizes": ("all",)}, "block_size='all'"),
        ({"proposals": ("best",)}, "proposal='best' is not known"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        BenchmarkSettings(**{"batch_sizes": (1,), **settings}).check(4, 4)


def test_without_the_package_the_reference_says_how_to_install_it(target, draft, monkeypatch):
    monkeypatch.setitem(sys.modules, "dflash", None)
    with pytest.raises(ImportError, match=r"pip install --no-deps dflash==0\.1\.0"):
        ReferenceDecoder(draft)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False},
        {"is_causal": True, "num_target_layers": 3},
        {"rope_theta": 5e5, "rms_norm_eps": 1e-3, "attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    ],
)  # fmt: skip
def test_the_reference_draft_is_the_same_network(target, overrides):
    pytest.importorskip("dflash.model")
    draft = make_draft(target, **overrides)
    reference = ReferenceDecoder(draft).model
    torch.manual_seed(0)
    context, noise = torch.randn(1, 9, 32 * draft.config.num_target_layers), torch.randn(1, 4, 32)
    positions = torch.arange(500, 513)[None]
    with torch.no_grad():
        ours = draft(noise, context, position_ids=positions).last_hidden_state
        theirs = reference(position_ids=positions, noise_embedding=noise, target_hidden=context)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert {p.data_ptr() for p in reference.parameters()} == {p.data_ptr() for p in draft.parameters()}


def test_in_bf16_the_reference_draft_keeps_its_weights_and_its_angles(target):
    pytest.importorskip("dflash.model")
    draft = make_draft(target).to(torch.bfloat16)
    reference = ReferenceDecoder(draft).model
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    assert reference.rotary_emb.inv_freq.dtype == torch.float32


def test_the_reference_decoder_is_measured_like_the_others(tokenizer):
    pytest.importorskip("dflash.model")
    target, draft, sequences = make_pair(tokenizer)
    ordinary = DFlashDraftModel(draft.config).eval()
    ordinary.load_state_dict(draft.state_dict())
    lengths = prompt_lengths(target, tokenizer)
    settings = {"max_new_tokens": 13, "temperatures": (0.0, 1.0), "block_sizes": (4,), "against_reference": True}
    _, runs = run_all(target, ordinary, tokenizer, PROMPTS[:2], batch_sizes=(1, 2), **settings)
    mine = {run.batch_key: run for run in runs if run.method.name == "ours"}
    measured = [run for run in runs if run.method == REFERENCE]
    assert [(run.temperature, run.batch_size) for run in measured] == [(0.0, 1)] * 2 + [(1.0, 1)] * 2
    for run in measured:
        assert all(seconds > 0 for seconds in run.phase_s.values())
        if run.temperature == 0:
            assert run.token_ids == [sequences[run.prompts[0]][lengths[run.prompts[0]] :].tolist()]
            wanted = mine[run.batch_key].committed
            assert run.committed in (wanted, [*wanted, 1])  # it drafts for a single last token too
        assert 1 + sum(run.committed) + run.num_passes - len(run.committed) == run.num_tokens == 13


# ---- the command ----


@pytest.fixture
def saved_pair(saved_target, tmp_path):
    folder = saved_target()
    draft = make_draft(AutoModelForCausalLM.from_pretrained(folder), mask_token_id=270)
    draft.save_pretrained(tmp_path / "draft")
    return str(tmp_path / "draft")


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["bench", "decode", *map(str, arguments)])


def test_the_command_prints_tables_and_writes_the_numbers(saved_pair, tmp_path):
    numbers = tmp_path / "numbers.json"
    result = invoke(
        "--draft", saved_pair, "--num-prompts", 2, "--max-new-tokens", 4, "--block-sizes", "trained,4,auto",
        "--batch-sizes", "1,2", "--proposal", "argmax,sample", "--json", numbers, "--dtype", "float32",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in (
        "sampling at T = 1: tokens/s",
        "identical to plain generation",
        "transformers' loop",
        "ours, auto, sampled",
    ):
        assert words in result.output, words
    record = json.loads(numbers.read_text())
    assert record["is_complete"]
    assert record["left_out"] == {}
    assert record["trained_block_size"] == 4
    assert record["settings"]["block_sizes"] == [4, "auto"]
    assert [path.name for path in tmp_path.glob("numbers*")] == ["numbers.json"]
    measured = [(r["temperature"], r["batch_size"], r["label"]) for r in record["results"]]
    greedy = [(0, size, label) for size in (1, 2) for label in ("plain generate", "ours, 4", "ours, auto")]
    assert [m for m in measured if m[0] == 0 and m[2] != "transformers' loop"] == greedy
    assert len(measured) == (2 * 3 + 1) + (2 * 5 + 1)
    for result in record["results"]:
        assert result["num_responses"] == 2
        assert sum(batch["num_tokens"] for batch in result["batches"]) == result["num_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tables_of_large_numbers_fit_into_100_columns(temperature):
    proposal = "sample" if temperature else None
    methods = [PLAIN, NATIVE, REFERENCE, Method("ours", 16, proposal), Method("ours", "auto", proposal)]
    runs = [
        run_of(method, 0.4 * size, [[1] * 1024] * size, prompts=list(range(start, start + size)),
               committed=[16, 1, 10] if method != PLAIN else [], expected=44.4, temperature=temperature)
        for size in (1, 2, 4, 8) for method in methods for start in range(0, 128, size)
    ]  # fmt: skip
    console = Console(width=100, file=io.StringIO())
    console.print(*tables(summarize_runs(runs)), sep="\n")
    text = console.file.getvalue()
    assert "…" not in text
    rows = [line for line in text.splitlines() if "ours, 16" in line]
    assert len(rows) == 2 + 4
    assert rows[0].count("2560.0  1.00×") == 4
    assert rows[1].count("(14.80)" if temperature else "128/128") == 4
    assert "9.00±.31" in rows[1]
    assert "dflash package" in text
    assert "25%" in rows[2]


def test_ctrl_c_keeps_what_was_measured(saved_pair, tmp_path, monkeypatch):
    own, calls = timed_generation.speculative_generate, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # a warm-up and two batches went before
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    monkeypatch.setattr(timed_generation, "speculative_generate", interrupted)
    numbers = tmp_path / "numbers.json"
    result = invoke(
        "--draft", saved_pair, "--num-prompts", 4, "--batch-sizes", 1, "--max-new-tokens", 4, "--json", numbers,
        "--block-sizes", "trained",
    )  # fmt: skip
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    assert "greedy: tokens/s" in result.output
    record = json.loads(numbers.read_text())
    assert not record["is_complete"]
    assert {r["label"]: r["num_batches"] for r in record["results"]}["ours, 4"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "others"], "--against 'others' must be 'dflash'"),
        (["--batch-sizes", "1,two"], "--batch-sizes '1,two': 'two'"),
        (["--block-sizes", "9"], "block_size=9 must be 1 to 4"),
        (["--block-sizes", "all"], "--block-sizes 'all'"),
        (["--num-prompts", "65"], "--num-prompts 65 must be 1 to 64"),
        (["--num-prompts", "12"], "multiple of every batch size"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--proposal", "best"], "proposal='best' is not known"),
    ],
)
def test_bad_arguments_are_named_before_the_target_is_loaded(saved_pair, arguments, words):
    result = invoke("--draft", saved_pair, "--target", "nowhere", *arguments)
    assert result.exit_code != 0
    assert words in str(result.exception)
