"""Trees of drafted tokens: their tables, their acceptance rule, and the text of the whole loop."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from conftest import make_draft
from decoding_pairs import count_near_ties, each_family, make_family, make_guessing_draft, make_target, ragged_prompts
from stopping_pairs import Recorder, letters_pair
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GPTNeoConfig, MptConfig

from dflash_hf.decoding.acceptance import accept_by_probability, accept_greedily, accept_in_tree
from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.decoding.tree import FIRST_CHOICE_PROBABILITY, MAX_RANKS, RANK_EXPONENT, draft_tree

CPU = torch.device("cpu")
GREEDY = {"do_sample": False, "pad_token_id": 0}
PROMPT = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
NUM_SAMPLES, VOCABULARY = 20_000, 7
LEAST_P_VALUE = 1e-3  # the seed is fixed; a wrong rule gives less than 1e-9


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 5])
def test_tables_of_every_small_tree_are_those_of_its_choices(num_slots):
    for num_nodes in [*range(1, 21), 30, 61]:
        tree = draft_tree(num_slots, num_nodes, CPU)
        parents = tree.parents.tolist()
        assert parents[0] == 0
        assert all(parent < node for node, parent in enumerate(parents) if node)  # closed under parents
        choices = reference.tree_choices(parents, tree.ranks.tolist())
        assert len(set(choices)) == len(choices) == tree.num_nodes
        for name, table in reference.tree_tables(choices).items():
            assert getattr(tree, name).tolist() == table, name
        chain = [choice for choice in choices if not any(choice)]
        assert choices[: len(chain)] == [(0,) * depth for depth in range(len(chain))]
        assert tree.chain_length == len(chain)
        assert tree.num_slots == 1 + max(len(choice) for choice in choices) <= num_slots
        assert tree.num_ranks == 1 + max(rank for choice in choices for rank in (0, *choice))
        assert tree.is_chain == (len(chain) == len(choices))
        if num_nodes <= num_slots:
            assert choices == [(0,) * depth for depth in range(num_nodes)]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_a_tree_has_the_likeliest_nodes_and_no_more_than_there_are(num_slots):
    ranks = [FIRST_CHOICE_PROBABILITY * (rank + 1) ** -RANK_EXPONENT for rank in range(MAX_RANKS)]
    for num_nodes in (num_slots + 1, 9, 16, 40, 300):
        tree = draft_tree(num_slots, num_nodes, CPU)
        chances = []
        for choice in reference.tree_choices(tree.parents.tolist(), tree.ranks.tolist())[1:]:
            chance = 1.0
            for rank in choice:
                chance *= ranks[rank]
            chances.append(chance)
        assert sorted(chances, reverse=True) == pytest.approx(
            reference.best_tree_chances(num_slots, num_nodes, ranks), rel=1e-9
        )
        most = sum(MAX_RANKS**depth for depth in range(num_slots))
        assert tree.num_nodes == min(num_nodes, most)


def tokens_of(tree, rankings: torch.Tensor) -> torch.Tensor:
    """Return the drafted tokens of the nodes from the draft's ranking `[sequences, slots - 1, ranks]`."""
    return rankings[:, tree.depths[1:] - 1, tree.ranks[1:]]


def random_rankings(num_sequences: int, tree) -> torch.Tensor:
    """Rank some tokens first more often than others, because a uniform draft could hide a bias."""
    liking = torch.rand(num_sequences, tree.num_slots - 1, VOCABULARY) * torch.arange(1, VOCABULARY + 1)
    return liking.argsort(-1, descending=True)[..., : tree.num_ranks]


@pytest.mark.parametrize(("num_slots", "num_nodes"), [(1, 1), (2, 2), (2, 4), (3, 8), (4, 4), (4, 14)])
def test_greedy_acceptance_is_a_walk_from_node_to_child(num_slots, num_nodes):
    torch.manual_seed(0)
    tree, num_sequences = draft_tree(num_slots, num_nodes, CPU), 300
    drafted, scores = (
        tokens_of(tree, random_rankings(num_sequences, tree)),
        torch.randn(num_sequences, tree.num_nodes, VOCABULARY),
    )
    acceptance, node = accept_in_tree(drafted, scores, tree, do_sample=False)
    chosen = scores.argmax(-1)
    for sequence in range(num_sequences):
        path = reference.tree_walk(tree.parents.tolist(), drafted[sequence].tolist(), chosen[sequence].tolist())
        assert acceptance.num_accepted[sequence] == len(path)
        assert node[sequence] == [0, *path][-1]
        assert tree.paths[node[sequence], 1 : len(path) + 1].tolist() == path
        assert acceptance.next_tokens[sequence] == chosen[sequence, node[sequence]]
        assert acceptance.expected[sequence] == len(path) + 1
    assert len(acceptance.num_accepted.unique()) >= min(num_slots, 3)


class Bigram:
    """A target whose scores after a token are a row of a table, and a draft that ranks at random."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        if kind == "top_k":
            self.table[self.table < self.table.topk(3).values[:, -1:]] = -torch.inf
        elif kind == "sure":
            for token, next_token in ((2, 4), (4, 4), (6, 1)):
                self.table[token] = -torch.inf
                self.table[token, next_token] = 3.0
        self.anchor = 2 if kind == "plain" else 5

    def pairs(self) -> list[float]:
        first = reference.softmax(self.table[self.anchor])
        return [(p * q).item() for token, p in enumerate(first) for q in reference.softmax(self.table[token])]

    def run(self, tree, anchors: torch.Tensor, accept) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """Return the first two tokens of a pass (-1 if it did not commit a second), and the mean counts."""
        drafted = tokens_of(tree, random_rankings(len(anchors), tree))
        scores = self.table[torch.cat([anchors[:, None], drafted], dim=1)]
        acceptance, node = accept(drafted, scores, tree, do_sample=True)
        path = tree.paths[node][:, 1:3]
        committed = anchors.new_zeros(len(anchors), 3)
        committed[:, : path.shape[1]] = drafted.gather(1, (path - 1).clamp(min=0))
        committed.scatter_(1, acceptance.num_accepted.clamp(max=2)[:, None], acceptance.next_tokens[:, None])
        second = torch.where(acceptance.num_accepted == 0, -1, committed[:, 1])
        committed_mean = (acceptance.num_accepted + 1.0).mean().item()
        return committed[:, 0], second, committed_mean, acceptance.expected.mean().item()

    def sample_pairs(self, tree, accept=accept_in_tree) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, *_ = self.run(tree, torch.full((NUM_SAMPLES,), self.anchor), accept)
        is_short = second < 0
        if is_short.any():
            second[is_short] = self.run(tree, first[is_short], accept)[0]
        return first, second


def joint_counts(first: torch.Tensor, second: torch.Tensor) -> list[int]:
    return torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2).tolist()


@pytest.mark.parametrize("kind", ["plain", "top_k", "sure"])
@pytest.mark.parametrize(("num_slots", "num_nodes"), [(1, 1), (2, 2), (2, 8), (3, 6), (3, 10), (4, 14)])
def test_the_first_two_tokens_have_the_targets_distribution(num_slots, num_nodes, kind):
    """The trees have siblings and repeated tokens, and some tokens are impossible or certain."""
    torch.manual_seed(0)
    bigram, tree = Bigram(kind), draft_tree(num_slots, num_nodes, CPU)
    first, second = bigram.sample_pairs(tree)
    pairs = bigram.pairs()
    first_probabilities = [sum(pairs[token * VOCABULARY : (token + 1) * VOCABULARY]) for token in range(VOCABULARY)]
    counts = torch.bincount(first, minlength=VOCABULARY).tolist()
    assert reference.chi_square_p_value(counts, first_probabilities) > LEAST_P_VALUE
    assert reference.chi_square_p_value(joint_counts(first, second), pairs) > LEAST_P_VALUE


def without_residual(drafted, scores, tree, *, do_sample):
    """Apply a wrong rule, which samples from the target without excluding rejected children."""
    acceptance, node = accept_in_tree(drafted, scores, tree, do_sample=do_sample)
    acceptance.next_tokens = torch.multinomial(scores.softmax(-1)[torch.arange(len(node)), node], 1)[:, 0]
    return acceptance, node


def each_child_on_its_own(drafted, scores, tree, *, do_sample):
    """Apply a wrong rule, which accepts siblings independently, each with its whole probability."""
    probabilities = scores.softmax(-1)[:, tree.parents[1:]].gather(2, drafted[..., None])[..., 0]
    taken = torch.rand_like(probabilities) < probabilities
    forced = scores.clone()
    for child in range(tree.num_nodes - 1, 0, -1):
        parent = int(tree.parents[child])
        one_hot = torch.full_like(scores[:, 0], -torch.inf).scatter_(1, drafted[:, child - 1 : child], 0.0)
        forced[:, parent] = torch.where(taken[:, child - 1, None], one_hot, forced[:, parent])
    return accept_in_tree(drafted, forced, tree, do_sample=do_sample)


@pytest.mark.parametrize("wrong_rule", [without_residual, each_child_on_its_own])
def test_a_biased_rule_is_found(wrong_rule):
    torch.manual_seed(0)
    bigram, tree = Bigram("plain"), draft_tree(3, 10, CPU)
    first, second = bigram.sample_pairs(tree, wrong_rule)
    assert reference.chi_square_p_value(joint_counts(first, second), bigram.pairs()) < 1e-9


@pytest.mark.parametrize("kind", ["plain", "top_k", "sure"])
def test_expected_number_of_tokens_is_the_sum_over_nodes_of_their_chance(kind):
    torch.manual_seed(0)
    bigram, tree = Bigram(kind), draft_tree(4, 14, CPU)
    drafted = tokens_of(tree, random_rankings(20, tree))
    scores = bigram.table[torch.cat([torch.randint(0, VOCABULARY, (20, 1)), drafted], dim=1)]
    acceptance, _ = accept_in_tree(drafted, scores, tree, do_sample=True)
    by_hand = [
        reference.tree_expected(tree.parents.tolist(), sequence.tolist(), sequence_scores)
        for sequence, sequence_scores in zip(drafted, scores, strict=True)
    ]
    assert acceptance.expected.tolist() == pytest.approx(by_hand, rel=1e-5)
    _, _, committed, expected = bigram.run(tree, torch.full((NUM_SAMPLES,), bigram.anchor), accept_in_tree)
    assert committed == pytest.approx(expected, abs=0.03)  # four standard errors


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_chain_is_accepted_as_often_as_by_the_rule_for_chains(do_sample):
    torch.manual_seed(0)
    tree = draft_tree(4, 4, CPU)
    drafted = torch.randint(0, VOCABULARY, (1, 3))
    scores = 1.5 * torch.randn(1, 4, VOCABULARY)
    scores[0, torch.arange(3), drafted[0]] += 2
    scores[0, 1, scores[0, 1].argmin()] = -torch.inf
    drafted, scores = drafted.expand(NUM_SAMPLES, -1), scores.expand(NUM_SAMPLES, -1, -1)
    acceptance, node = accept_in_tree(drafted, scores, tree, do_sample=do_sample)
    assert torch.equal(node, acceptance.num_accepted)
    if not do_sample:
        chain = accept_greedily(drafted, scores)
        assert torch.equal(acceptance.num_accepted, chain.num_accepted)
        assert torch.equal(acceptance.next_tokens, chain.next_tokens)
        return
    chain = accept_by_probability(drafted, scores)
    torch.testing.assert_close(acceptance.expected, chain.expected)
    stays = [reference.softmax(scores[0, slot])[drafted[0, slot]].item() for slot in range(3)]
    reach = [1.0, stays[0], stays[0] * stays[1], stays[0] * stays[1] * stays[2], 0.0]
    probabilities = [now - after for now, after in itertools.pairwise(reach)]
    for counts in (acceptance.num_accepted, chain.num_accepted):
        observed = torch.bincount(counts, minlength=4).tolist()
        assert reference.chi_square_p_value(observed, probabilities) > LEAST_P_VALUE


def taught(target, texts: torch.Tensor, wrong_share: float = 0.6, second_share: float = 0.9, **overrides):
    """Make a draft whose second choice is mostly right where its first one is wrong."""
    return make_guessing_draft(target, **overrides).teach(target, texts, wrong_share, second_share=second_share)


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("name", each_family("llama", "qwen3", "gemma2", "gemma3", "mistral"))
def test_greedy_text_equals_plain_generation_and_second_choices_are_accepted(name, num_sequences):
    """Sequences end at several places."""
    target = make_family(name)
    assert target.config._attn_implementation == ("eager" if name == "gemma2" else "sdpa")
    inputs = ragged_prompts(num_sequences, seed=num_sequences)
    texts = target.generate(**inputs, **GREEDY, max_new_tokens=22)
    ends = (
        [int(sequence[9 + 6 + 5 * index]) for index, sequence in enumerate(texts[:2])] if num_sequences > 1 else None
    )
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=22, eos_token_id=ends)
    draft = taught(target, texts)
    acceptance_lengths = []
    for tree_size in (None, 6, 17):
        drafted = speculative_generate(
            target, draft, **inputs, **GREEDY, max_new_tokens=22, eos_token_id=ends, tree_size=tree_size
        )
        assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
        acceptance_lengths.append(drafted.statistics.acceptance_length)
    assert acceptance_lengths[2] > 1.15 * acceptance_lengths[1] > 1.2 * acceptance_lengths[0]


@pytest.mark.parametrize("name", each_family("gemma2", "mistral"))
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_nodes_see_by_their_positions_in_the_text_where_a_window_is_shorter_than_a_block(name, num_sequences):
    target = make_family(name, sliding_window=2)
    inputs = ragged_prompts(num_sequences, seed=3)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=20)
    draft = taught(target, plain)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=20, tree_size=17)
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
    assert drafted.statistics.acceptance_length > 1.7


@pytest.mark.parametrize("name", each_family("llama", "gemma3", "mistral"))
def test_a_chat_goes_on_from_a_cache_that_trees_have_written(name, monkeypatch):
    monkeypatch.setattr("dflash_hf.decoding.kv_cache.GROWTH_COLUMNS", 8)
    target = make_family(name)
    first = target.generate(**PROMPT, **GREEDY, max_new_tokens=20)
    draft = taught(target, first, 1.1, 1.1)
    output = speculative_generate(target, draft, **PROMPT, **GREEDY, max_new_tokens=20, tree_size=24)
    assert torch.equal(output.sequences, first)
    assert output.statistics.acceptance_length > 2  # every drafted token that stayed was off the chain
    longer = torch.cat([first, torch.tensor([[16, 23, 42]])], dim=1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    fresh = target.generate(**inputs, **GREEDY, max_new_tokens=20)
    draft.teach(target, fresh, 0.6, second_share=0.9)
    lengths = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    again = speculative_generate(
        target, draft, **inputs, **GREEDY, max_new_tokens=20, tree_size=24, cache=output.cache
    )
    assert torch.equal(again.sequences, fresh)
    assert lengths[0] == 4  # the last token of the answer, and the new ones
    assert again.statistics.acceptance_length > 1.7


def test_an_end_token_anywhere_on_a_path_off_the_chain_ends_the_text_there():
    """No token follows it, neither for the streamer nor in the statistics of the passes."""
    target = make_family("llama")
    texts = target.generate(**PROMPT, **GREEDY, max_new_tokens=24)
    draft = taught(target, texts, 1.1, 1.1)  # first choices are always wrong
    answer, last_counts = texts[0, 3:].tolist(), set()
    for position in range(1, 9):
        if answer[position] in answer[:position]:
            continue
        ends = [96, answer[position]]
        plain = target.generate(**PROMPT, **GREEDY, max_new_tokens=24, eos_token_id=ends)
        recorders, passes = [Recorder(), Recorder()], []
        target.generate(**PROMPT, **GREEDY, max_new_tokens=24, eos_token_id=ends, streamer=recorders[0])
        drafted = speculative_generate(
            target, draft, **PROMPT, **GREEDY, max_new_tokens=24, eos_token_id=ends, streamer=recorders[1],
            on_pass=passes.append, tree_size=24,
        )  # fmt: skip
        assert torch.equal(drafted.sequences, plain)
        assert recorders[1].puts == recorders[0].puts
        assert [token for verify_pass in passes for token in verify_pass.token_ids[0]] == plain[0, 3:].tolist()
        assert drafted.statistics.num_tokens == plain.shape[1] - 3
        for verify_pass in passes[1:-1]:
            assert verify_pass.num_drafted == [len(verify_pass.token_ids[0]) - 1]
        last_counts.add(len(passes[-1].token_ids[0]))
    assert last_counts >= {1, 2, 3}


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_every_max_new_tokens_gives_as_many_tokens_as_plain(num_sequences):
    """From 1 to 2B + 1 tokens."""
    inputs = ragged_prompts(num_sequences, seed=1)
    target = make_family("llama")
    texts = target.generate(**inputs, **GREEDY, max_new_tokens=9)
    for wrong_share in (1.1, 0.5):
        draft = taught(target, texts, wrong_share, 1.1)
        for count in range(1, 10):
            drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=count, tree_size=24)
            assert torch.equal(drafted.sequences, texts[:, : 9 + count])
            assert drafted.statistics.num_tokens == num_sequences * count
        assert drafted.statistics.acceptance_length > 1.8


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_stop_strings_end_a_text_on_a_path_off_the_chain(tokenizer, num_sequences):
    target, draft, inputs, settings, texts = letters_pair(tokenizer, 0.0, num_sequences)
    draft.teach(target, texts, 1.1, second_share=1.1)
    start, lengths = inputs["input_ids"].shape[1], set()
    for first in range(2, 8):
        stop_strings = [tokenizer.decode(sequence[start + first + i :][:2]) for i, sequence in enumerate(texts)]
        plain = target.generate(**inputs, **settings, stop_strings=stop_strings, tokenizer=tokenizer)
        drafted = speculative_generate(
            target, draft, **inputs, **settings, stop_strings=stop_strings, tokenizer=tokenizer, tree_size=24
        )
        assert torch.equal(drafted.sequences, plain)
        lengths.add(plain.shape[1])
    assert len(lengths) > 2


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_scores_and_logits_are_those_of_plain_generation(num_sequences):
    inputs = ragged_prompts(num_sequences, seed=2)
    target = make_family("llama")
    settings = {
        **GREEDY, "max_new_tokens": 14, "suppress_tokens": [1, 2, 3], "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    }  # fmt: skip
    plain = target.generate(**inputs, **settings)
    draft = taught(target, plain.sequences)
    drafted = speculative_generate(target, draft, **inputs, **settings, tree_size=17)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert drafted.statistics.acceptance_length > 1.7
    for name in ("scores", "logits"):
        assert len(drafted[name]) == 14
        for ours, theirs in zip(drafted[name], plain[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # logits of 10, summed in another order
    assert all(step[:, [1, 2, 3]].eq(-torch.inf).all() for step in drafted.scores)


def test_trees_that_adaptive_length_tries_do_not_change_the_text():
    target = make_family("qwen3")
    plain = target.generate(**PROMPT, **GREEDY, max_new_tokens=40)
    draft, lengths = taught(target, plain), set()
    target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.add(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    drafted = speculative_generate(target, draft, **PROMPT, **GREEDY, max_new_tokens=40, block_size="auto")
    assert torch.equal(drafted.sequences, plain)
    assert lengths >= {1, 4, 8, 16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tree_size": 9, "block_size": 3},
            r"tree_size=9 must be an integer above 4.*without block_size \(here 3\). Pass a larger",
        ),
        ({"tree_size": 9, "block_size": "auto"}, r"come without block_size \(here 'auto'\)"),
        ({"tree_size": 4}, "tree_size=4 must be an integer above 4, the number of slots of a block"),
        ({"tree_size": 0}, "tree_size=0 must be an integer above 4"),
        ({"tree_size": True}, "tree_size=True must be an integer above 4"),
        ({"tree_size": "many"}, "tree_size='many' must be an integer above 4"),
        ({"tree_size": 8.0}, "tree_size=8.0 must be an integer above 4"),
        ({"tree_size": 9, "do_sample": True, "proposal": "sample"}, "because the proposals are sampled. Leave it out"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_before_the_prefill(arguments, message):
    target = make_target()
    draft, passes = make_draft(target), []
    target.register_forward_pre_hook(lambda module, args: passes.append(1))
    with pytest.raises(ValueError, match=message):
        speculative_generate(target, draft, **PROMPT, **{**GREEDY, "max_new_tokens": 6, **arguments})
    assert passes == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_5", "layers of type linear_attention"),
        ("lfm2", "layers of type conv"),
        ("flash", "attention of the target is 'flash_attention_2', which takes no mask"),
        ("bloom", "the positions of its tokens itself"),
        ("falcon with alibi", "the positions of its tokens itself"),
        ("mpt", "the positions of its tokens itself"),
        ("gpt_neo", "the positions of its tokens itself"),
    ],
)
def test_targets_whose_tokens_cannot_share_a_position_are_refused_trees_and_decode_without(name, message):
    values = {"vocab_size": 97, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None}
    if name == "bloom":
        target = AutoModelForCausalLM.from_config(BloomConfig(**values, n_layer=4, n_head=4)).eval()
    elif name == "falcon with alibi":
        config = FalconConfig(**values, num_hidden_layers=4, num_attention_heads=4, alibi=True)
        target = AutoModelForCausalLM.from_config(config).eval()
    elif name == "mpt":
        config = MptConfig(vocab_size=97, d_model=32, n_layers=4, n_heads=4, max_seq_len=64)
        target = AutoModelForCausalLM.from_config(config).eval()
    elif name == "gpt_neo":
        config = GPTNeoConfig(**values, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]])
        target = AutoModelForCausalLM.from_config(config).eval()
    else:
        target = make_family("llama" if name == "flash" else name)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    draft = make_draft(target, **shape)
    if name == "flash":
        target.config._attn_implementation = "flash_attention_2"
    settings, passes = {**GREEDY, "max_new_tokens": 6, "eos_token_id": None}, []
    if name != "flash":
        plain = target.generate(**PROMPT, **settings)
        assert torch.equal(speculative_generate(target, draft, **PROMPT, **settings).sequences, plain)
    target.register_forward_pre_hook(lambda module, args: passes.append(1))
    with pytest.raises(ValueError, match=f"tree_size=9 cannot be used, because .*{message}.*Leave it out"):
        speculative_generate(target, draft, **PROMPT, **settings, tree_size=9)
    assert passes == []


def test_greedy_decoding_takes_a_tree_whatever_the_proposal():
    target = make_target()
    plain = target.generate(**PROMPT, **GREEDY, max_new_tokens=9)
    draft = taught(target, plain)
    drafted = speculative_generate(target, draft, **PROMPT, **GREEDY, max_new_tokens=9, tree_size=9, proposal="sample")
    assert torch.equal(drafted.sequences, plain)
