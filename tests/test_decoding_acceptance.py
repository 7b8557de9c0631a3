"""Chi-square tests that accepted text has the target's distribution, for the functions and for the whole loop."""

from __future__ import annotations

import json

import pytest
import reference
import torch
from decoding_pairs import make_guessing_draft, make_target
from tiers import thinned
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process

from dflash_hf.blocks.metrics import AcceptanceRecord
from dflash_hf.decoding.acceptance import Acceptance, accept_by_probability, accept_greedily
from dflash_hf.decoding.drafter import Proposal
from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.decoding.logits_processing import BlockLogitsProcessor
from dflash_hf.decoding.ordered_decision import OrderedDecision
from dflash_hf.decoding.sequences import SequenceState
from dflash_hf.decoding.statistics import DecodingStatistics
from dflash_hf.decoding.stopping_criteria import BlockStoppingCriteria
from dflash_hf.decoding.tree import draft_tree
from dflash_hf.target.hidden_states import target_hidden_states

NUM_SAMPLES, VOCABULARY = 20_000, 7
LEAST_P_VALUE = 1e-3  # the seed is fixed; a wrong rule gives less than 1e-9
PROCESSORS = {
    "plain": [],
    "temperature": [logits_process.TemperatureLogitsWarper(0.6)],
    "top_k": [logits_process.TopKLogitsWarper(3)],
    "top_p": [logits_process.TemperatureLogitsWarper(1.4), logits_process.TopPLogitsWarper(0.8)],
    "repetition": [logits_process.RepetitionPenaltyLogitsProcessor(1.8), logits_process.TopKLogitsWarper(5)],
    "by_prefix": [logits_process.NoRepeatNGramLogitsProcessor(2), logits_process.TemperatureLogitsWarper(0.8)],
}


def joint_counts(first: torch.Tensor, second: torch.Tensor) -> list[int]:
    return torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2).tolist()


class Bigram:
    """A target whose logits after a token are a row of a table, and a draft with a table of its own."""

    def __init__(self, processors: list, num_samples: int = NUM_SAMPLES, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.draft_scores = 1.5 * torch.randn(
            2, VOCABULARY, generator=generator
        )  # slots 1 and 2, whatever was sampled
        self.processors, self.num_samples = LogitsProcessorList(processors), num_samples
        self.prompt = torch.tensor([3, 5, 2])

    def distribution(self, text: list[int]) -> torch.Tensor:
        """Process the scores of the token after a text with one call of each processor, as plain generation does."""
        scores = self.table[text[-1]][None].clone()
        return self.processors(torch.tensor([text]), scores).softmax(-1)[0]

    def pairs(self) -> list[float]:
        """Return the exact probability of every pair of next tokens."""
        prompt = self.prompt.tolist()
        first = self.distribution(prompt)
        probabilities = []
        for token in range(VOCABULARY):
            second = self.distribution([*prompt, token]) if first[token] > 0 else torch.zeros(VOCABULARY)
            probabilities += (first[token] * second).tolist()
        return probabilities

    def sample_pairs(
        self, proposal: str, accept=accept_by_probability, in_order: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Sample the first two committed tokens; a second pass follows where the first committed only one."""
        scores_of = BlockLogitsProcessor(self.processors)
        tokens = self.prompt.repeat(self.num_samples, 1)

        def run(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            draft_scores = self.draft_scores.expand(len(tokens), -1, -1)
            if proposal == "argmax":
                drafted, q = draft_scores.argmax(-1), None
            else:
                q = scores_of.apply_prefix_free(draft_scores)
                drafted = torch.multinomial(q.softmax(-1).flatten(0, 1), 1).view(len(tokens), 2)
            text = torch.cat([tokens, drafted], dim=1)
            length = tokens.shape[1]
            if in_order:
                return choose_in_order(text, length, drafted, q, scores_of, self.table[text[:, length - 1 :]])
            scores = scores_of(text, [length] * len(text), self.table[text[:, length - 1 :]])
            acceptance = accept(drafted, scores, q)
            committed = torch.cat([drafted, drafted[:, :1]], dim=1)
            committed.scatter_(1, acceptance.num_accepted[:, None], acceptance.next_tokens[:, None])
            return committed, acceptance

        committed, acceptance = run(tokens)
        first, second = committed[:, 0], committed[:, 1].clone()
        is_short = acceptance.num_accepted == 0
        if is_short.any():
            again, _ = run(torch.cat([tokens, committed[:, :1]], dim=1)[is_short])
            second[is_short] = again[:, 0]
        return first, second, acceptance.num_accepted.float().mean().item()


def choose_in_order(text, length, drafted, draft_scores, processor, logits):
    """Choose one token after the other, as where a processor reads the text, and return as `run` does."""
    sequences = SequenceState(text[:, :length], [0] * len(text), max_length=50, num_spare_columns=4)
    criteria = BlockStoppingCriteria(StoppingCriteriaList([MaxLengthCriteria(50)]))
    decide = OrderedDecision(sequences, processor, criteria, do_sample=True, pad_token_id=0, keep_scores=False)
    decision = decide(Proposal(drafted, draft_tree(3, 3, text.device), draft_scores), logits)
    num_accepted = torch.tensor(decision.num_accepted)
    assert [len(tokens) for tokens in decision.token_ids] == (num_accepted + 1).tolist()
    committed = torch.tensor([[*tokens, 0, 0][:3] for tokens in decision.token_ids])
    return committed, Acceptance(num_accepted, committed[:, 0], num_accepted + 1.0)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("proposal", ["argmax", "sample"])
@pytest.mark.parametrize("processors", thinned(PROCESSORS, "top_p", "by_prefix"))
def test_first_and_second_token_have_the_targets_distribution(processors, proposal, in_order):
    """Verifying against another distribution than the one the proposal was sampled from would bias the text."""
    torch.manual_seed(0)
    if processors == "by_prefix" and not in_order:
        pytest.skip("this processor reads the text")
    bigram = Bigram(PROCESSORS[processors], 2_000 if in_order else NUM_SAMPLES)
    if processors == "by_prefix":
        bigram.prompt = torch.tensor([3, 5, 2, 3, 2])
    first, second, _ = bigram.sample_pairs(proposal, in_order=in_order)
    pairs = bigram.pairs()
    first_probabilities = [sum(pairs[token * VOCABULARY : (token + 1) * VOCABULARY]) for token in range(VOCABULARY)]
    counts = torch.bincount(first, minlength=VOCABULARY).tolist()
    assert reference.chi_square_p_value(counts, first_probabilities) > LEAST_P_VALUE
    assert reference.chi_square_p_value(joint_counts(first, second), pairs) > LEAST_P_VALUE


def without_residual(drafted, scores, draft_scores=None):
    """Apply a wrong rule, which samples from the target after a rejection and does not exclude the proposal."""
    acceptance = accept_by_probability(drafted, scores, draft_scores)
    sequences = torch.arange(len(drafted))
    acceptance.next_tokens = torch.multinomial(scores.softmax(-1)[sequences, acceptance.num_accepted], 1)[:, 0]
    return acceptance


def other_q(drafted, scores, draft_scores):
    """Apply a wrong rule, which verifies against another distribution than the proposals were sampled from."""
    return accept_by_probability(drafted, scores, 0.8 * draft_scores)


@pytest.mark.parametrize(
    ("proposal", "wrong_rule"), [("argmax", without_residual), ("sample", without_residual), ("sample", other_q)]
)
def test_a_biased_rule_is_found(proposal, wrong_rule):
    torch.manual_seed(0)
    bigram = Bigram([])
    first, second, _ = bigram.sample_pairs(proposal, wrong_rule)
    assert reference.chi_square_p_value(joint_counts(first, second), bigram.pairs()) < 1e-9


def test_the_p_value_is_that_of_the_tables():
    even = [0.25, 0.25, 0.25, 0.25]
    assert reference.chi_square_p_value([25, 25, 25, 25], even) == pytest.approx(1.0)
    # statistic 7.815 is the 5 % point of three degrees of freedom
    statistic = reference.chi_square_p_value([25 + 9, 25 - 9, 25 + 4, 25 - 4], even)
    assert statistic == pytest.approx(0.0509, abs=1e-3)  # (81 + 81 + 16 + 16) / 25 = 7.76
    assert reference.chi_square_p_value([10, 1], [1.0, 0.0]) == 0.0  # an impossible outcome was sampled


def test_argmax_proposals_are_accepted_more_often_than_ones_sampled_slot_by_slot():
    """
    The text goes on in one of two ways, and a draft that knows their shares cannot sample one of them whole.

    The best tokens of all slots fit together; drawn one by one, seven tokens of one way are as rare as seven heads.
    """
    torch.manual_seed(0)
    num_slots, share = 8, torch.tensor([0.6, 0.4])
    marginal = share.expand(num_slots - 1, 2)
    accepted = {}
    for proposal in ("argmax", "sample"):
        q = marginal.log().expand(NUM_SAMPLES, -1, -1)
        if proposal == "argmax":
            drafted, q = q.argmax(-1), None
        else:
            drafted = torch.multinomial(q.exp().flatten(0, 1), 1).view(NUM_SAMPLES, num_slots - 1)
        # the first token is free, and each later one repeats the one before it
        scores = torch.full((NUM_SAMPLES, num_slots, 2), -torch.inf)
        scores[:, 0] = share.log()
        scores[:, 1:].scatter_(2, drafted[..., None], 0.0)
        accepted[proposal] = accept_by_probability(drafted, scores, q).num_accepted.float().mean().item()
    assert accepted["argmax"] == pytest.approx(7 * 0.6, abs=0.06)
    assert accepted["sample"] == pytest.approx(sum(0.6**k + 0.4**k for k in range(1, 8)), abs=0.03)
    assert accepted["argmax"] > 1.8 * accepted["sample"]


@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_expected_number_of_tokens_is_the_sum_over_leading_slots(proposal):
    torch.manual_seed(0)
    scores, draft_scores = 2 * torch.randn(5, 4, VOCABULARY), 2 * torch.randn(5, 3, VOCABULARY)
    drafted = torch.randint(0, VOCABULARY, (5, 3))
    q = draft_scores if proposal == "sample" else None
    acceptance = accept_by_probability(drafted, scores, q)
    for sequence in range(5):
        expected, product = 1.0, 1.0
        for slot in range(3):
            p = reference.softmax(scores[sequence, slot])[drafted[sequence, slot]].item()
            chance = 1.0 if q is None else reference.softmax(q[sequence, slot])[drafted[sequence, slot]].item()
            product *= min(1.0, p / chance)
            expected += product
        assert acceptance.expected[sequence].item() == pytest.approx(expected, rel=1e-5)


def test_greedy_acceptance_is_the_leading_run_of_equal_tokens():
    torch.manual_seed(0)
    scores = torch.randn(40, 4, 3)
    drafted = torch.randint(0, 3, (40, 3))
    acceptance = accept_greedily(drafted, scores)
    for sequence in range(40):
        count = 0
        while count < 3 and drafted[sequence, count] == scores[sequence, count].argmax():
            count += 1
        assert acceptance.num_accepted[sequence] == count
        assert acceptance.next_tokens[sequence] == scores[sequence, count].argmax()
    assert acceptance.num_accepted.unique().tolist() == [0, 1, 2, 3]
    alone = accept_greedily(drafted[:, :0], scores[:, :1])
    assert torch.equal(alone.next_tokens, scores[:, 0].argmax(-1))


def test_impossible_proposals_are_never_accepted_and_sure_ones_always():
    torch.manual_seed(0)
    scores = torch.full((500, 2, 3), -torch.inf)
    scores[:, :, 1] = 0.0
    for draft_scores in (None, torch.zeros(500, 1, 3)):
        assert (
            accept_by_probability(torch.ones(500, 1, dtype=torch.long), scores, draft_scores).num_accepted.eq(1).all()
        )
        impossible = accept_by_probability(torch.zeros(500, 1, dtype=torch.long), scores, draft_scores)
        assert impossible.num_accepted.eq(0).all()
        assert impossible.next_tokens.eq(1).all()


def plain_pairs(target, prompt: torch.Tensor, top_k: int, temperature: float) -> dict[tuple[int, int], float]:
    """Return the exact probabilities of the two tokens after a prompt, by running the target on each first token."""

    def best(text: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = target(torch.tensor([text]), use_cache=False).logits[0, -1] / temperature
        values, tokens = logits.topk(top_k)
        return dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))

    text = prompt[0].tolist()
    return {(first, second): p * q for first, p in best(text).items() for second, q in best([*text, first]).items()}


READS_TEXT = {"no_repeat_ngram_size": 50}  # it changes nothing here, but the tokens are chosen one after the other


@pytest.mark.parametrize(
    "how",
    [
        {"proposal": "argmax"},
        {"proposal": "sample"},
        {"tree_size": 12},
        {"proposal": "argmax", **READS_TEXT},
        {"proposal": "sample", **READS_TEXT},
        {"tree_size": 12, **READS_TEXT},
    ],
)
def test_sampled_sequences_of_the_whole_loop_have_the_distribution_of_plain_sampling(how):
    """The sequences come from `num_return_sequences`; the prefill gives the first token, a drafted pass the second."""
    torch.manual_seed(0)
    target = make_target(initializer_range=0.15)
    draft = make_guessing_draft(target)
    inputs = {"input_ids": torch.tensor([[0, 0, 4, 8]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    settings = {"do_sample": True, "top_k": 4, "temperature": 1.5, "pad_token_id": 0}
    text = target.generate(**inputs, do_sample=False, pad_token_id=0, max_new_tokens=6)
    draft.teach(target, text, 0.0)
    num_sequences = 600
    drafted = speculative_generate(
        target, draft, **inputs, **settings, max_new_tokens=4, num_return_sequences=num_sequences, **how
    )
    assert drafted.sequences.shape == (num_sequences, 8)
    assert 1.05 < drafted.statistics.expected_acceptance_length < 4
    for column in (4, 5):  # the pair after the prompt, and the pair after the first of it
        exact: dict[tuple[int, int], float] = {}
        counts: dict[tuple[int, int], int] = {}
        if column == 4:
            exact = plain_pairs(target, torch.tensor([[4, 8]]), 4, 1.5)
            picked = drafted.sequences
        else:
            best = drafted.sequences[:, 4].mode().values
            exact = plain_pairs(target, torch.tensor([[4, 8, int(best)]]), 4, 1.5)
            picked = drafted.sequences[drafted.sequences[:, 4] == best]
        for pair in picked[:, column : column + 2].tolist():
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
        assert set(counts) <= set(exact)
        observed = [counts.get(pair, 0) for pair in exact]
        assert reference.chi_square_p_value(observed, list(exact.values())) > LEAST_P_VALUE


def test_expected_acceptance_of_a_call_is_what_the_targets_probabilities_say():
    torch.manual_seed(0)
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = {"input_ids": torch.tensor([[4, 8]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    text = target.generate(**inputs, do_sample=False, pad_token_id=0, max_new_tokens=6)
    draft.teach(target, text, 0.0)
    decoded = speculative_generate(
        target, draft, **inputs, do_sample=True, top_k=4, temperature=1.2, pad_token_id=0, max_new_tokens=3,
        num_return_sequences=400,
    )  # fmt: skip
    # Each sequence has one pass with one drafted token. After a rejection the last token needs no draft.
    statistics = decoded.statistics
    assert (statistics.num_verify_passes, statistics.num_plain_passes) == (1, 1)
    assert statistics.verified == [[1]] * 400
    with torch.no_grad():
        logits = target(decoded.sequences[:, :3], use_cache=False).logits[:, -1] / 1.2
        logits = logits.masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf)
    proposals = proposed_tokens(target, draft, decoded.sequences[:, :3])
    by_hand = 1 + logits.softmax(-1).gather(1, proposals[:, None]).mean().item()
    assert statistics.expected_acceptance_length == pytest.approx(by_hand, rel=1e-4)
    assert statistics.num_tokens == 1200
    assert 1.1 < statistics.acceptance_length == pytest.approx(by_hand, abs=0.08)


def proposed_tokens(target, draft, texts: torch.Tensor) -> torch.Tensor:
    """Return what the guessing draft proposes for slot 1 after each text."""
    context = target_hidden_states(target, texts[:, :-1], texts[:, :-1] >= 0, draft.config.target_layer_ids)
    noise = torch.full((len(texts), 4), 96)
    noise[:, 0] = texts[:, -1]
    position_ids = torch.arange(2 + 4).expand(len(texts), -1)
    hidden = draft(target.get_input_embeddings()(noise), context, position_ids=position_ids).last_hidden_state
    return target.get_output_embeddings()(hidden[:, 1]).argmax(-1)


def test_statistics_come_from_the_acceptance_record_and_have_no_length_without_a_pass():
    statistics = DecodingStatistics(4, [[3, 1], [4]], [[3, 3], [3]], [[1, 4], [1]], expected_sum=7.5, overhead_s=2.0)
    assert statistics.acceptance == AcceptanceRecord.of([3, 1, 4], block_size=4)
    assert statistics.histogram == [1, 0, 1, 1]
    assert statistics.acceptance_length == statistics.accept_len == 8 / 3
    assert statistics.slot_acceptance == [2 / 3, 2 / 3, 1 / 3]
    assert statistics.expected_acceptance_length == statistics.expected_accept_len == 2.5
    assert (statistics.seconds, statistics.rest_s) == (2.0, 2.0)
    empty = DecodingStatistics(4, [[]], [[]], [[]], num_tokens=1, prefill_s=1.0)
    assert empty.acceptance_length is empty.accept_len is empty.expected_acceptance_length is None
    assert (empty.histogram, empty.slot_acceptance) == ([0, 0, 0, 0], [None, None, None])
    assert json.loads(json.dumps(empty.as_dict()))["acceptance_length"] is None
