from __future__ import annotations

import pytest
import reference
import torch
from torch import nn

from dflash_hf.losses import decay_weights, default_loss_decay, dpace_weights, head_cross_entropy
from dflash_hf.metrics import accepted_slots, row_statistics, summarize


@pytest.mark.parametrize("chunk_size", [1, 3, 256])
@pytest.mark.parametrize("num_slots", [0, 1, 7])
def test_frozen_head_loss_equals_the_loop_in_value_and_gradient(chunk_size, num_slots):
    torch.manual_seed(0)
    head = nn.Linear(32, 97, bias=False)
    hidden = torch.randn(num_slots, 32, requires_grad=True)
    labels = torch.randint(0, 97, (num_slots,))
    weights = torch.rand(num_slots)
    losses, predictions = head_cross_entropy(head, hidden, labels, chunk_size=chunk_size)
    (losses * weights).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.shape == hidden.shape
    if num_slots:
        reference_hidden = hidden.detach().clone().requires_grad_()
        expected = torch.stack(reference.cross_entropy(reference_hidden, head.weight.detach(), labels.tolist()))
        (expected * weights).sum().backward()
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hidden.grad, reference_hidden.grad, atol=1e-5, rtol=1e-5)
        assert predictions.tolist() == (hidden @ head.weight.T).argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["biased", "wrapped"])
def test_other_heads_take_autograd_through_the_module(kind):
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
    losses, _ = head_cross_entropy(head, hidden, labels, chunk_size=2)
    losses.sum().backward()
    assert all(parameter.grad is None for parameter in head.parameters())
    expected = nn.functional.cross_entropy(head(hidden), labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected.sum(), hidden)[0])


def test_other_heads_take_an_empty_selection():
    hidden = torch.randn(0, 8, requires_grad=True)
    losses, _ = head_cross_entropy(nn.Linear(8, 11), hidden, torch.zeros(0, dtype=torch.long))
    losses.sum().backward()
    assert hidden.grad.shape == (0, 8)


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
    assert whole["accept_len"] == pytest.approx(1 + expected / int(mask.any(-1).sum()))
    assert whole["slot_accuracy_2"] == pytest.approx(float((correct & mask)[:, 2].sum() / mask[:, 2].sum()))


def test_metrics_of_nothing_are_nan():
    empty = torch.zeros(2, 4)
    metrics = summarize(row_statistics(empty, empty, empty.bool(), empty.bool(), rows=1))
    assert all(value != value for value in metrics.values())
