"""The runs of `dflash-hf eval` on tiny pairs, and the folder that they are kept in."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from chat_pairs import PROMPTS, VOCABULARY, committed_by_hand, make_pair, prompt_lengths
from conftest import make_draft, make_target, make_tokenizer

from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.data.prompts import Conversation
from dflash_hf.evaluation.journal import SuiteJournal
from dflash_hf.evaluation.output import model_digest
from dflash_hf.evaluation.prompt_sets import PromptSet
from dflash_hf.evaluation.response_pairs import Setting
from dflash_hf.evaluation.settings import SuiteSettings
from dflash_hf.evaluation.suite import SuiteEvaluation

THINKING_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{% endif %}"
)


def make_set(*conversations: list[str], name: str = "own") -> PromptSet:
    turns = tuple(
        Conversation([[{"role": "user", "content": turn}] for turn in conversation]) for conversation in conversations
    )
    return PromptSet(name, name, f"file {name}.jsonl", "{}", len(turns), turns)


def make_evaluation(*sets: PromptSet, target=None, draft=None, tokenizer=None, **settings) -> SuiteEvaluation:
    target = make_target(**VOCABULARY) if target is None else target
    draft = make_draft(target, mask_token_id=271) if draft is None else draft
    settings = {"max_new_tokens": 8, "temperatures": (0.0,), **settings}
    return SuiteEvaluation(target, draft, tokenizer or make_tokenizer(), sets, SuiteSettings(**settings))


def answers(pair) -> tuple:
    return pair.key, pair.plain_token_ids, pair.drafted_token_ids, pair.committed, pair.starts


def test_both_answers_are_plains_text_and_passes_commit_what_a_walk_by_hand_says(tokenizer):
    target, draft, sequences = make_pair(tokenizer)
    own = make_set(*([prompt] for prompt in PROMPTS))
    evaluation = make_evaluation(own, target=target, draft=draft, tokenizer=tokenizer, max_new_tokens=13)
    pairs = list(evaluation.run(evaluation.batches))
    assert len(pairs) == evaluation.num_pairs == len(PROMPTS)
    lengths = prompt_lengths(target, tokenizer)
    for number, (pair, sequence) in enumerate(zip(pairs, sequences, strict=True)):
        assert pair.key == ("own", Setting(0.0), number, 0)
        assert pair.plain_token_ids == pair.drafted_token_ids == [sequence[lengths[number] :].tolist()]
        assert pair.num_prompt_tokens == [lengths[number]]
        by_hand = committed_by_hand(draft.wrong[number], lengths[number], len(sequence), 4)
        assert pair.committed == [by_hand]
        assert pair.starts == [list(itertools.accumulate(by_hand, initial=1))[:-1]]
        assert len(pair.verified[0]) == len(by_hand)
        assert all(slots <= 3 for slots in pair.verified[0])
        assert pair.is_truncated == [True]
    assert [pair.first for pair in pairs] == ["plain", "drafted", "plain", "drafted"]
    assert len({count for pair in pairs for count in pair.committed[0]}) == 4


def test_rows_of_a_batch_start_where_they_do_alone(tokenizer):
    target, draft, _ = make_pair(tokenizer)
    own = make_set(*([prompt] for prompt in PROMPTS))
    values = {"target": target, "draft": draft, "tokenizer": tokenizer, "max_new_tokens": 13}
    evaluation = make_evaluation(own, batch_sizes=(1, 4), **values)
    *alone, together = evaluation.run(evaluation.batches)
    assert together.prompts == [0, 1, 2, 3]
    assert together.plain_token_ids == [pair.plain_token_ids[0] for pair in alone]
    for row, pair in enumerate(alone):  # a row that lacks one token takes part in the drafted pass of another
        assert together.starts[row] in (pair.starts[0], [*pair.starts[0], 12])


def test_a_number_of_slots_that_is_chosen_on_the_way_keeps_the_text_and_the_places_of_its_passes(tokenizer):
    target, draft, _ = make_pair(tokenizer)
    own = make_set(*([prompt] for prompt in PROMPTS))
    values = {"target": target, "draft": draft, "tokenizer": tokenizer, "max_new_tokens": 13}
    evaluation = make_evaluation(own, block_size="auto", **values)
    for pair in evaluation.run(evaluation.batches):
        assert pair.drafted_token_ids == pair.plain_token_ids
        ((committed, starts),) = zip(pair.committed, pair.starts, strict=True)
        after = [start + count for start, count in zip(starts, committed, strict=True)]
        assert starts
        # between two passes with a draft there may be tokens of passes without one
        assert all(end <= start for end, start in zip(after, [*starts[1:], 13], strict=True))


def test_an_end_token_ends_an_answer_that_is_not_cut(tokenizer):
    target, draft, sequences = make_pair(tokenizer)
    length = prompt_lengths(target, tokenizer)[0]
    target.generation_config.eos_token_id = int(sequences[0][length + 4])
    target.generation_config.temperature = 0.1  # the target's own settings count for nothing …
    evaluation = make_evaluation(make_set([PROMPTS[0]]), target=target, draft=draft, tokenizer=tokenizer)
    (pair,) = evaluation.run(evaluation.batches)
    assert pair.drafted_token_ids[0][-1] == target.generation_config.eos_token_id
    assert pair.is_truncated == [False]
    assert target.generation_config.temperature == 0.1  # … and are there again


def test_a_second_turn_goes_on_from_the_plain_answer_to_the_first(tokenizer):
    evaluation = make_evaluation(make_set(["Hi?", "And?"]), temperatures=(1.0,))
    first, second = evaluation.run(evaluation.batches)
    assert first.plain_token_ids != first.drafted_token_ids
    messages = [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": tokenizer.decode(first.plain_token_ids[0], skip_special_tokens=True)},
        {"role": "user", "content": "And?"},
    ]
    wanted = chat_inputs(tokenizer, messages, torch.device("cpu"))["input_ids"][0]
    assert torch.equal(evaluation._prompts(evaluation.batches[0], 1, {first.key: first})[0], wanted)
    assert (second.turn, second.num_prompt_tokens) == (1, [len(wanted)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_answered_depends_on_neither_order_nor_processes_nor_resuming(temperature):
    sets = [make_set(["a?", "b?"], ["c?", "d?"], ["e?", "f?"], name="two"), make_set(["g?"], ["h?"], name="one")]
    evaluation = make_evaluation(*sets, temperatures=(temperature,))
    whole = [answers(pair) for pair in evaluation.run(evaluation.batches)]
    assert len(whole) == evaluation.num_pairs == 8
    kept = {}
    for pair in evaluation.run(evaluation.batches):
        kept[pair.key] = pair
        if len(kept) == 3:  # in the middle of the second conversation
            break
    shares = [evaluation.share(kept, index, 2) for index in range(2)]
    assert sorted(len(share) for share in shares) == [2, 2]
    rest = [pair for share in reversed(shares) for pair in evaluation.run(share, kept)]
    assert len(rest) == 5
    assert sorted(map(answers, [*kept.values(), *rest])) == sorted(whole)
    assert evaluation.share({**kept, **{pair.key: pair for pair in rest}}) == []


def test_thinking_is_measured_on_and_off_where_the_template_has_it(tokenizer):
    def modes(template: str | None, thinking: str) -> tuple:
        tokenizer.chat_template = template
        return make_evaluation(make_set(["Hi?"]), tokenizer=tokenizer, thinking=thinking).thinking

    plain = tokenizer.chat_template
    assert [modes(THINKING_TEMPLATE, thinking) for thinking in ("both", "on", "off")] == [
        (False, True), (True,), (False,),
    ]  # fmt: skip
    assert [modes(template, "both") for template in (plain, None)] == [(None,), (None,)]
    with pytest.raises(ValueError, match=r"thinking='on', but the chat template .* renders the same text"):
        modes(plain, "on")
    tokenizer.chat_template = THINKING_TEMPLATE
    evaluation = make_evaluation(make_set(["Hi?"]), tokenizer=tokenizer)
    pairs = list(evaluation.run(evaluation.batches))
    assert [(pair.thinking, pair.num_prompt_tokens) for pair in pairs] == [(False, [7]), (True, [6])]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 1}, r"max_new_tokens=1 must be at least 2"),
        ({"temperatures": (-1.0,)}, r"temperature=-1\.0 must be 0"),
        ({"thinking": "maybe"}, r"thinking='maybe' is not known. Pass one of both, on, off"),
        ({"batch_sizes": (0,)}, r"batch_size=0 must be at least 1"),
        ({"block_size": 5}, r"block_size=5 must be 2 to 4"),
        ({"batch_sizes": (2,)}, r"3 prompts of 'own' do not fill whole batches of 2.*--limit 2"),
        ({"batch_sizes": (3,)}, r"have 1 to 2 turns.*batch size of 1"),
        ({"max_new_tokens": 40}, r"Prompt 3 of 'own' has \d+ tokens and may get 2 responses of 40 tokens, but the "
                                 r"target reads at most 70.*--max-new-tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_runs(values, message):
    own = make_set(["a?"], ["b?"], ["c?", "d?"])
    target = make_target(**VOCABULARY, max_position_embeddings=70)
    with pytest.raises(ValueError, match=message):
        make_evaluation(own, target=target, **values)


@pytest.mark.parametrize(("max_new_tokens", "is_refused"), [(8, False), (40, True)])
def test_responses_that_may_change_the_rotary_angles_are_refused_before_anything_runs(max_new_tokens, is_refused):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = make_target(**VOCABULARY, max_position_embeddings=32, rope_parameters=rope)
    draft = make_draft(target, mask_token_id=271, max_position_embeddings=128)
    target.config.max_position_embeddings = 128
    target.config.rope_parameters["original_max_position_embeddings"] = 32
    message = r"target changes its rotary angles \('dynamic'\) after 32. Pass a smaller --max-new-tokens"
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        make_evaluation(make_set(["a?"]), target=target, draft=draft, max_new_tokens=max_new_tokens)


def test_another_targets_draft_is_refused():
    draft = make_draft(make_target(hidden_size=64), mask_token_id=96)
    with pytest.raises(ValueError, match="does not fit the target"):
        make_evaluation(make_set(["a?"]), draft=draft)


def fill(folder: Path, number: int, **values) -> list:
    """Keep the first pairs of an evaluation in a folder."""
    evaluation = make_evaluation(make_set(["a?"], ["b?"], ["c?"], ["d?"]))
    with SuiteJournal(folder, {"seed": 0}, **values) as journal:
        batches = evaluation.share(journal.pairs)
        journal.begin({"num_processes": 1})
        pairs = list(itertools.islice(evaluation.run(batches, journal.pairs), number))
        for pair in pairs:
            journal.add(pair)
    return pairs


def test_a_later_run_finds_every_pair_and_forgets_half_a_line(tmp_path):
    first = fill(tmp_path, 2)
    path = tmp_path / "answers-00000.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + content.splitlines()[1][:50])
    with SuiteJournal(tmp_path, {"seed": 0}) as journal:
        assert list(journal.pairs.values()) == first
    second = fill(tmp_path, 2, process_index=1)
    third = fill(tmp_path, 2)
    assert [pair.batch for pair in first + second] == [0, 1, 2, 3]
    assert third == []
    lines = path.read_text().splitlines()
    assert len(lines) > 1
    assert all(json.loads(line) for line in lines)
    with SuiteJournal(tmp_path, {"seed": 0}) as journal:
        assert list(journal.pairs.values()) == first + second
        assert journal.runs == [{"num_processes": 1}]


def test_other_settings_for_the_same_folder_are_refused_by_name(tmp_path):
    with SuiteJournal(tmp_path, {"seed": 0, "prompts": {"gsm8k": "2 of 5", "mbpp": "1"}}):
        pass
    with (
        pytest.raises(
            ValueError,
            match=r"other settings: seed was 0 and is now 1; prompts\.gsm8k was '2 of 5' and is now '3 of 5'\.",
        ),
        SuiteJournal(tmp_path, {"seed": 1, "prompts": {"gsm8k": "3 of 5", "mbpp": "1"}}),
    ):
        pass


def test_a_damaged_line_foreign_files_and_a_second_run_are_refused(tmp_path):
    fill(tmp_path / "damaged", 1)
    path = tmp_path / "damaged" / "answers-00000.jsonl"
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(ValueError, match=r"answers-00000\.jsonl, line 1 is damaged.*Delete that line"):
        fill(tmp_path / "damaged", 1)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"has files \(thesis\.txt\).*Name a new or empty folder"):
        fill(tmp_path / "foreign", 1)
    with (
        SuiteJournal(tmp_path / "busy", {"seed": 0}),
        pytest.raises(RuntimeError, match="Another run is writing"),
        SuiteJournal(tmp_path / "busy", {"seed": 0}),
    ):
        pass


def test_the_digest_of_a_model_tells_trained_weights_apart():
    draft = make_draft(make_target())
    before = model_digest(draft)
    assert before == model_digest(make_draft(make_target()))
    next(draft.parameters()).data[0, 0] += 1
    assert model_digest(draft) != before


def test_trees_are_verified_when_asked_for(tokenizer):
    target, draft, sequences = make_pair(tokenizer)
    own = make_set(*([prompt] for prompt in PROMPTS))
    evaluation = make_evaluation(own, target=target, draft=draft, tokenizer=tokenizer, max_new_tokens=13, tree_size=7)
    passes: list[int] = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    pairs = list(evaluation.run(evaluation.batches[:1]))
    handle.remove()
    length = prompt_lengths(target, tokenizer)[0]
    assert pairs[0].plain_token_ids == pairs[0].drafted_token_ids == [sequences[0][length:].tolist()]
    assert 7 in passes


@pytest.mark.parametrize("settings", [{"tree_size": 4}, {"tree_size": 7, "block_size": "auto"}])
def test_a_tree_has_more_than_a_block_and_takes_its_place(settings):
    with pytest.raises(ValueError, match=r"more than the 4 slots .* excludes block_size"):
        make_evaluation(make_set(["1+1?"]), **settings)


@pytest.mark.parametrize(("batch_sizes", "kept"), [((1,), [0, 2, 3]), ((2,), [0, 2]), ((1, 2), [0, 2])])
def test_prompts_that_cannot_be_read_leave_whole_batches_of_the_others(tokenizer, batch_sizes, kept):
    """One such prompt of four made the evaluation end, with the advice to change the limit."""
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|new{index}|>" for index in range(20)]})
    questions = [["one"], ["<|new19|>"], ["three"], ["four"]]
    evaluation = make_evaluation(make_set(*questions), tokenizer=tokenizer, batch_sizes=batch_sizes)
    assert [each.turns[0][0]["content"] for each in evaluation.sets["own"].conversations] == [
        questions[index][0] for index in kept
    ]
    assert len(evaluation.left_out) == 4 - len(kept)
    assert "Prompt 2 of 'own'" in evaluation.left_out[0]
    if len(kept) == 2:
        assert evaluation.left_out[1].endswith("is left out: its batch of 2 has too few other prompts.")
    assert all(batch.prompts for batch in evaluation.batches)
