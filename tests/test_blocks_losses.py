from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_hf.blocks import head_losses as losses_module
from dflash_hf.blocks.head_losses import chunked_head_losses
from dflash_hf.blocks.losses import LossTerms, decay_weights, default_loss_decay, dpace_weights, slot_loss
from dflash_hf.blocks.metrics import AcceptanceRecord, accepted_slots, record_of_counts, row_statistics, summarize


@pytest.fixture(params=[(1, 1), (3, 10), (5, 97), (512, 2048)])
def tile(request, monkeypatch):
    monkeypatch.setitem(losses_module.HEAD_TILES, "cpu", request.param)
    monkeypatch.setattr(losses_module, "SLOTS_STEP", 4)


@pytest.mark.parametrize("num_slots", [0, 1, 7])
def test_frozen_head_loss_equals_the_loop_in_value_and_gradient(tile, num_slots):
    torch.manual_seed(0)
    head = nn.Linear(32, 97, bias=False)
    hidden = torch.randn(num_slots, 32, requires_grad=True)
    labels = torch.randint(0, 97, (num_slots,))
    weights = torch.rand(num_slots)
    result = chunked_head_losses(head, hidden, labels)
    (result.loss * weights).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.shape == hidden.shape
    if num_slots:
        reference_hidden = hidden.detach().clone().requires_grad_()
        expected = torch.stack(reference.cross_entropy(reference_hidden, head.weight.detach(), labels.tolist()))
        (expected * weights).sum().backward()
        torch.testing.assert_close(result.loss, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.cross_entropy, expected, atol=1e-5, rtol=1e-5)
        assert not result.cross_entropy.requires_grad
        torch.testing.assert_close(hidden.grad, reference_hidden.grad, atol=1e-5, rtol=1e-5)
        assert not result.is_correct.any()
        best = (hidden @ head.weight.T).argmax(-1)
        assert chunked_head_losses(head, hidden, best).is_correct.all()
        assert (
            chunked_head_losses(head, hidden, torch.where(labels > 48, best, labels)).is_correct.tolist()
            == (labels > 48).tolist()
        )


def test_large_logits_neither_overflow_nor_lose_the_gradient(tile):
    head = nn.Linear(8, 97, bias=False)
    hidden = (300 * torch.randn(6, 8)).requires_grad_()
    labels = torch.randint(0, 97, (6,))
    chunked_head_losses(head, hidden, labels).loss.sum().backward()
    reference_hidden = hidden.detach().clone().requires_grad_()
    functional.cross_entropy(head(reference_hidden), labels, reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, reference_hidden.grad, atol=1e-5, rtol=1e-5)


def test_of_equal_logits_the_first_token_counts_as_predicted_as_in_generation(tile):
    head = nn.Linear(4, 97, bias=False)
    with torch.no_grad():
        head.weight.fill_(0.5)
        head.weight[:2] = 0
    result = chunked_head_losses(head, torch.ones(4, 4), torch.tensor([2, 96, 0, 3]))
    assert result.is_correct.tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_and_head_of_other_dtypes_give_the_loss_of_rounded_inputs(dtype):
    torch.manual_seed(0)
    head = nn.Linear(32, 97, bias=False).to(torch.bfloat16)
    hidden = torch.randn(7, 32).to(dtype).requires_grad_()
    labels = torch.randint(0, 97, (7,))
    result = chunked_head_losses(head, hidden, labels)
    result.loss.sum().backward()
    assert hidden.grad.dtype == dtype
    exact = hidden.detach().to(torch.bfloat16).float().requires_grad_()
    expected = functional.cross_entropy(exact @ head.weight.detach().float().T, labels, reduction="none")
    expected.sum().backward()
    # logits are rounded to bf16: 8 bits
    torch.testing.assert_close(result.loss, expected, atol=0.02, rtol=0.01)
    torch.testing.assert_close(hidden.grad.float(), exact.grad, atol=0.01, rtol=0.05)


TERMS = [
    {"soft_labels": True},
    {"l1_weight": 0.7},
    {"l1_weight": 0.7, "ce_weight": 0.3, "soft_labels": True},
    {"kl_weight": 0.4, "kl_top_k": 5, "kl_temperature": 2.0},
    {"kl_weight": 1.0},
    {"kl_weight": 0.2, "l1_weight": 2.0, "kl_top_k": 500},
]


@pytest.mark.parametrize("values", TERMS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_terms_with_target_logits_equal_the_loop_in_value_and_gradient(values, chunk_size):
    torch.manual_seed(0)
    head = nn.Linear(8, 29, bias=False)
    terms = LossTerms(**values)
    hidden, target_states = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)
    labels, weights = torch.randint(0, 29, (5,)), torch.rand(5)

    def target_head(states):
        return 3 * torch.tanh(head(states))

    result = chunked_head_losses(
        head,
        hidden,
        labels,
        terms=terms,
        target_states=target_states,
        compute_target_logits=target_head,
        chunk_size=chunk_size,
    )
    (result.loss * weights).sum().backward()

    reference_hidden = hidden.detach().clone().requires_grad_()
    expected = []
    for row, target_row, label in zip(reference_hidden, target_states, labels.tolist(), strict=True):
        parts = reference.target_terms(
            head.weight.detach() @ row,
            target_head(target_row).detach(),
            label,
            terms.kl_top_k,
            terms.kl_temperature,
        )
        base = terms.ce_weight * parts["soft" if terms.soft_labels else "ce"] + terms.l1_weight * parts["l1"]
        expected.append(terms.kl_weight * parts["kl"] + (1 - terms.kl_weight) * base)
    (torch.stack(expected) * weights).sum().backward()
    torch.testing.assert_close(result.loss, torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden.grad, reference_hidden.grad, atol=1e-5, rtol=1e-4)
    assert all(parameter.grad is None for parameter in head.parameters())


@pytest.mark.parametrize("values", [{"soft_labels": True}, {"l1_weight": 0.1}, {"kl_weight": 0.1}])
def test_a_term_without_target_logits_is_an_error_not_a_skip(values):
    terms = LossTerms(**values)
    with pytest.raises(ValueError, match="compares with the target's distribution"):
        chunked_head_losses(nn.Linear(4, 7, bias=False), torch.randn(2, 4), torch.tensor([0, 1]), terms=terms)
    with pytest.raises(ValueError, match=r"target_logits is None\. Pass target_logits"):
        slot_loss(torch.randn(2, 7), torch.rand(2), None, terms)


@pytest.mark.parametrize("kind", ["biased", "wrapped"])
def test_other_heads_go_through_their_module(kind):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 11, bias=False)
            self.weight = self.linear.weight

        def forward(self, x):
            return 2 * self.linear(x)

    head = nn.Linear(8, 11) if kind == "biased" else Wrapped()
    hidden = torch.randn(5, 8, requires_grad=True)
    labels = torch.randint(0, 11, (5,))
    result = chunked_head_losses(head, hidden, labels, chunk_size=2)
    result.loss.sum().backward()
    assert all(parameter.grad is None for parameter in head.parameters())
    expected = functional.cross_entropy(head(hidden), labels, reduction="none")
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected.sum(), hidden)[0])
    assert result.is_correct.tolist() == (head(hidden).argmax(-1) == labels).tolist()


def test_other_heads_take_an_empty_selection():
    hidden = torch.randn(0, 8, requires_grad=True)
    chunked_head_losses(nn.Linear(8, 11), hidden, torch.zeros(0, dtype=torch.long)).loss.sum().backward()
    assert hidden.grad.shape == (0, 8)


@pytest.mark.parametrize("values", [{}, {"soft_labels": True}, {"l1_weight": 1.0}, {"kl_weight": 0.5}], ids=str)
def test_no_tensor_as_large_as_slots_times_vocabulary_is_ever_made(values, monkeypatch):
    monkeypatch.setitem(losses_module.HEAD_TILES, "cpu", (16, 32))
    slots, vocab_size = 256, 512
    head, largest = nn.Linear(4, vocab_size, bias=False), 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    with Largest():
        result = chunked_head_losses(
            head,
            torch.randn(slots, 4, requires_grad=True),
            torch.randint(0, vocab_size, (slots,)),
            terms=LossTerms(**values),
            target_states=torch.randn(slots, 4),
            compute_target_logits=head,
            chunk_size=16,
        )
        result.loss.sum().backward()
    assert largest <= 16 * vocab_size


def test_decay_weights_fall_with_the_slot_and_are_zero_outside_the_mask():
    mask = torch.tensor([[False, True, True, False]])
    weights = decay_weights(mask, 4.0)
    torch.testing.assert_close(weights, torch.tensor([[0, 1.0, torch.exp(torch.tensor(-0.25)), 0]]))
    assert decay_weights(mask, None).tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize(("block_size", "decay"), [(7, 4), (8, 4), (10, 5), (16, 7), (4, 4), (32, 7)])
def test_default_decay_follows_the_block_size(block_size, decay):
    assert default_loss_decay(block_size) == decay


def test_dpace_weights_equal_the_loop():
    torch.manual_seed(1)
    losses = torch.rand(6, 5) * 3
    mask = torch.rand(6, 5) > 0.3
    mask[:, 0] = False
    mask[5] = False
    expected = [reference.dpace(row.tolist(), m.tolist(), 0.3) for row, m in zip(losses, mask, strict=True)]
    torch.testing.assert_close(dpace_weights(losses, mask, alpha=0.3), torch.tensor(expected))
    assert not dpace_weights(losses.requires_grad_(), mask).requires_grad


def test_accepted_slots_equal_the_loop():
    torch.manual_seed(2)
    correct, mask = torch.rand(50, 5) > 0.3, torch.rand(50, 5) > 0.2
    mask[:, 0] = False
    expected = [reference.accepted(c, m) for c, m in zip(correct.tolist(), mask.tolist(), strict=True)]
    assert accepted_slots(correct, mask).tolist() == expected


def test_metrics_do_not_depend_on_how_rows_are_batched():
    torch.manual_seed(3)
    losses, weights = torch.rand(8, 4), torch.rand(8, 4)
    correct, mask = torch.rand(8, 4) > 0.4, torch.rand(8, 4) > 0.2
    mask[:, 0] = False
    whole = summarize(row_statistics(losses, weights, correct, mask, rows=4))
    parts = [
        row_statistics(losses[a:b], weights[a:b], correct[a:b], mask[a:b], rows=(b - a) // 2)
        for a, b in ((0, 2), (2, 8))
    ]
    assert summarize(torch.cat(parts)) == pytest.approx(whole)
    expected = sum(reference.accepted(c, m) for c, m in zip(correct.tolist(), mask.tolist(), strict=True))
    assert whole["acceptance_length"] == pytest.approx(1 + expected / int(mask.any(-1).sum()))
    assert whole["slot_accuracy_2"] == pytest.approx(float((correct & mask)[:, 2].sum() / mask[:, 2].sum()))


def test_each_row_counts_its_blocks_by_the_tokens_they_would_commit():
    """Blocks of 4 slots, three a row: the first row commits 1, 3 and 4 tokens, the second 2 in its only block."""
    correct = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    mask = torch.tensor([[0, 1, 1, 1]] * 4 + [[0, 0, 0, 0]] * 2).bool()
    statistics = row_statistics(torch.zeros(6, 4), torch.zeros(6, 4), correct, mask, rows=2)
    assert statistics.shape == (2, 12)
    assert statistics[:, 2:6].tolist() == [[1, 0, 1, 1], [0, 1, 0, 0]]
    assert record_of_counts(statistics[:, 2:6]) == AcceptanceRecord((1, 1, 1, 1))
    assert summarize(statistics)["acceptance_length"] == (1 + 3 + 4 + 2) / 4


def test_metrics_of_nothing_are_left_out_but_for_the_loss():
    empty = torch.zeros(2, 4)
    metrics = summarize(row_statistics(empty, empty, empty.bool(), empty.bool(), rows=1))
    assert list(metrics) == ["loss"]
    assert math.isnan(metrics["loss"])


def test_a_slot_that_never_carries_loss_has_no_accuracy():
    mask = torch.tensor([[False, True, True, False]])
    metrics = summarize(row_statistics(mask.float(), mask.float(), mask, mask, rows=1))
    assert metrics == {"loss": 1.0, "acceptance_length": 3.0, "slot_accuracy_1": 1.0, "slot_accuracy_2": 1.0}
