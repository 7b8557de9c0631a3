"""The loop of block-parallel speculative decoding: draft, verify, commit, for rows of different lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..model.configuration_dflash import describe_target
from ..model.modeling_dflash import DFlashDraftModel, apply_head, embed_tokens
from .acceptance import Acceptance, accept_by_probability, accept_greedily, accept_in_tree, best_tokens
from .draft_length import BlockLength
from .gqa_attention import packed_attention
from .kv_cache import RowCache
from .logits_processing import BlockScores, StoppingRules
from .masks import draft_masks, target_masks
from .statistics import DecodingStatistics, Stopwatch
from .tree import DraftTree, draft_tree

logger = logging.get_logger(__name__)

# Recurrent states cannot be taken back, so committed tokens wait until so many of them go through the target together.
WAITING_TOKENS = 16


@dataclass
class VerifyPass:
    """
    What one pass of the target committed.

    Args:
        token_ids (`list[list[int]]`): for each row that was still being written, the new tokens.
        num_drafted (`list[int]`): how many of them, from the first on, the draft proposed; a token after these is the
            target's own.
        rows (`list[int]`): which rows of the batch these are.
        num_verified (`int`, defaults to 0): drafted tokens that the pass verified along one path; 0 for the prefill
            and for every other pass without a draft.
    """

    token_ids: list[list[int]]
    num_drafted: list[int]
    rows: list[int]
    num_verified: int = 0


@dataclass
class _Verified:
    """
    What a verify pass of the target gave.

    Args:
        logits (`torch.FloatTensor` of shape `[rows, slots, vocabulary]`): after the anchor and each drafted token.
        outputs: of the target.
        waiting (`list[int]`): for each row, the position of its anchor among the tokens of the pass.
    """

    logits: torch.Tensor
    outputs: Any
    waiting: list[int]


@dataclass
class Continuation:
    """
    What a later call needs, besides the target's cache, to go on from the end of this one.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        tokens (`torch.LongTensor` of shape `[1, columns]`): the text.
        read_length (`int`): columns that the target's cache holds.
        draft_cache ([`RowCache`]): of the draft.
        context_length (`int`): columns that it holds.
        states (`torch.FloatTensor` of shape `[1, n, num_target_layers * hidden_size]`): of the columns after these.
    """

    target: PreTrainedModel
    draft: DFlashDraftModel
    tokens: torch.Tensor
    read_length: int
    draft_cache: RowCache
    context_length: int
    states: torch.Tensor


@dataclass
class _Context:
    """
    Target states that the draft has not read yet.

    Args:
        states (`torch.FloatTensor` of shape `[rows, n, num_target_layers * hidden_size]`): of committed tokens.
        counts (`torch.LongTensor` of shape `[rows]`, *optional*): how many of the `n` a row has; all if `None`.
    """

    states: torch.Tensor
    counts: torch.Tensor | None


class DecodingLoop:
    """
    State of one decoding call.

    Columns count positions of the padded text from the left edge of the prompt batch. Row `r` holds `lengths[r]`
    columns of known text; the last of them is the anchor, which the target has not seen yet. Target and draft write
    their keys at the columns of the text, so that rejected tokens are overwritten by what comes next.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        input_ids (`torch.LongTensor` of shape `[rows, columns]`): the prompts, padded on the left.
        num_padding (`list[int]`): padding columns of each row.
        scores ([`BlockScores`]), rules ([`StoppingRules`]): of `generate`.
        do_sample (`bool`): draw from the target's distribution instead of taking its best token.
        sample_proposals (`bool`): draw the draft's tokens too, instead of taking its best ones.
        block_length ([`BlockLength`]): tokens to verify; more than the slots of a block only where trees may be.
        keep_scores, keep_logits (`bool`): collect the processed and the raw scores of every new token.
        on_pass (`Callable`, *optional*): called with a [`VerifyPass`] after the prefill and after every pass.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        input_ids: torch.Tensor,
        num_padding: list[int],
        *,
        scores: BlockScores,
        rules: StoppingRules,
        do_sample: bool,
        sample_proposals: bool,
        block_length: BlockLength,
        keep_scores: bool = False,
        keep_logits: bool = False,
        on_pass: Callable[[VerifyPass], None] | None = None,
    ) -> None:
        self.target, self.draft, self.config = target, draft, draft.config
        self.scores, self.rules, self.block_length, self.on_pass = scores, rules, block_length, on_pass
        self.do_sample, self.sample_proposals = do_sample, sample_proposals
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        self.device = input_ids.device
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        parameters = inspect.signature(target.forward).parameters
        self.takes_position_ids = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.wanted_states = [layer_id + 1 for layer_id in self.config.target_layer_ids or []]

        num_rows, num_columns = input_ids.shape
        self.max_length = self.rules.max_length
        slack = 2 * (self.config.block_size + WAITING_TOKENS)  # for drafted tokens beyond the longest row
        self.tokens = input_ids.new_zeros(num_rows, self.max_length + slack)
        self.tokens[:, :num_columns] = input_ids
        self.rows = list(range(num_rows))
        self.num_prompt_columns = num_columns
        self.lengths = [num_columns] * num_rows
        self.read_lengths = [0] * num_rows  # columns whose states are in the target's cache for good
        self.context_length = [0] * num_rows  # columns whose states the draft has read
        self.num_padding = num_padding
        self.position_offset: torch.Tensor | None = None
        self.target_cache, self.draft_cache = RowCache(target.config), RowCache(draft.config)
        self.contexts: list[_Context] = []
        self.finished: dict[int, torch.Tensor] = {}
        self.kept: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in range(num_rows)] for name in ("scores", "logits")
        }
        self.watch = Stopwatch(self.device)
        self.is_finite = torch.ones((), dtype=torch.bool)
        self.expected_sum = torch.zeros((), device=self.device)
        self.statistics = DecodingStatistics(self.config.block_size)
        self.statistics.committed = [[] for _ in range(num_rows)]
        self.statistics.verified = [[] for _ in range(num_rows)]
        self.statistics.starts = [[] for _ in range(num_rows)]

    def resume(self, cache: RowCache, continuation: Continuation) -> int:
        """
        Go on from the end of an earlier call, as far as its text is the same.

        Args:
            cache ([`RowCache`]), continuation ([`Continuation`]): of the earlier call, with one row.

        Returns:
            `int`: columns that need not be read again; 0 if nothing can be used.
        """
        if continuation.target is not self.target or continuation.draft is not self.draft or self.num_padding != [0]:
            return 0
        size = min(continuation.tokens.shape[1], self.lengths[0])
        is_equal = continuation.tokens[0, :size] == self.tokens[0, :size]
        num_equal = int(is_equal.long().cumprod(0).sum())
        start = min(num_equal, continuation.read_length, self.lengths[0] - 1)
        if cache.is_recurrent and start < continuation.read_length:
            return 0
        context_length = min(start, continuation.context_length)
        if not (start and cache.shows(start) and continuation.draft_cache.shows(context_length)):
            return 0
        cache.continuation = None  # this call writes into it, and may be interrupted
        self.target_cache, self.draft_cache = cache, continuation.draft_cache
        self.read_lengths, self.context_length = [start], [context_length]
        self.contexts = [_Context(continuation.states[:, : start - context_length], None)]
        return start

    def run(self, prefill_inputs: list[dict[str, Any]]) -> None:
        """
        Decode until every row is finished.

        Args:
            prefill_inputs (`list[dict]`): inputs of the target for the prompt, in one or several chunks.
        """
        watch = self.watch = Stopwatch(self.device)
        logits = self._prefill(prefill_inputs)
        watch.lap("prefill")
        self._commit(self.tokens[:, :0], None, logits, draft_tree(1, 1, self.device))
        watch.lap("rest")
        is_packed = self.device.type == "cpu"  # where it was measured
        with packed_attention(self.target, self.draft) if is_packed else nullcontext():
            self._run_passes()
        for name, seconds in watch.totals().items():
            setattr(self.statistics, f"{name}_s", seconds)
        self.statistics.expected_sum = float(self.expected_sum)
        if len(self.finished) == 1:
            self._keep_continuation()

    def _run_passes(self) -> None:
        watch = self.watch
        while self.rows:
            self.block_length.start_pass()
            num_rows, room = len(self.rows), self.max_length - min(self.lengths)
            num_tokens = self.block_length.choose(num_rows)
            tree = self._tree(num_tokens, room)
            drafted, draft_scores = self.tokens[:, :0], None
            if tree.num_slots > 1:
                drafted, draft_scores = self._propose(tree)
            watch.lap("draft")
            verified = self._verify(drafted, tree)
            watch.lap("verify")
            counts = self._commit(drafted, draft_scores, verified.logits, tree, verified)
            if room >= self.config.block_size:  # not so in the last passes, which say nothing about others
                self.block_length.end_pass(num_rows, num_tokens, counts)
            watch.lap("rest")

    def _tree(self, num_tokens: int, room: int) -> DraftTree:
        """The tokens to verify: a chain, or a tree if there are to be more of them than slots."""
        num_slots = min(self.config.block_size, num_tokens, room)
        is_chain = num_tokens <= self.config.block_size
        return draft_tree(num_slots, num_slots if is_chain else num_tokens, self.device)

    def _keep_continuation(self) -> None:
        """Leave with the cache what a later call needs to go on from here."""
        self.target_cache.close(self.read_lengths[0])
        self.draft_cache.close(self.context_length[0])
        self.target_cache.continuation = Continuation(
            self.target,
            self.draft,
            self.finished[0][None],
            self.read_lengths[0],
            self.draft_cache,
            self.context_length[0],
            torch.cat([context.states for context in self.contexts], dim=1),
        )

    def _prefill(self, prefill_inputs: list[dict[str, Any]]) -> torch.Tensor:
        """Read the prompts, and return the logits of the first new token, `[rows, 1, vocabulary]`."""
        for inputs in prefill_inputs:
            start = self.read_lengths[0]
            end = start + inputs["input_ids"].shape[1]
            self.target_cache.place(start, end)
            outputs = self.target(
                **{**inputs, "cache": self.target_cache, "use_cache": True},
                output_hidden_states=self.wanted_states,
                return_dict=True,
            )
            self.contexts.append(_Context(self._tapped(outputs, slice(None)), None))
            self.read_lengths = [end] * len(self.rows)
        self.target_cache.accept_states()
        positions = inputs.get("position_ids")
        if positions is not None:  # `[rows, n]`, or one such tensor for each axis of a multimodal target
            offset = positions[..., -1].to(self.device) - (self.lengths[0] - 1)
            self.position_offset = offset.expand(*offset.shape[:-1], len(self.rows))
        return outputs.logits[:, -1:]

    def _tapped(self, outputs: Any, index: Any) -> torch.Tensor:
        """States of the tapped layers at some positions, joined on the last axis, on the draft's device."""
        states = outputs.hidden_states
        missing = [index - 1 for index in self.wanted_states if index >= len(states) or states[index] is None]
        if missing:
            raise ValueError(
                f"The target {describe_target(self.target)} returned no hidden states for layers {missing}, which the "
                "draft reads. Use the draft with its own target."
            )
        return torch.cat([states[wanted][:, index].to(self.draft.device) for wanted in self.wanted_states], dim=-1)

    def _columns(self, first: list[int], count: int, device: torch.device) -> torch.Tensor:
        return torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)

    # ---- drafting ----

    def _propose(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft the tokens of a tree for each row; with the scores they were drawn from, if they were drawn."""
        block_size, device = self.config.block_size, self.draft.device
        anchors = [length - 1 for length in self.lengths]
        states, context_columns = self._new_context(anchors)
        end = max(anchors) + block_size
        block_columns = self._columns(anchors, block_size, device)
        columns = torch.cat([context_columns, block_columns], dim=1)
        is_simple = len(self.rows) == 1 and not self.num_padding[0]
        self.draft_cache.place(min(self.context_length), end, None if len(self.rows) == 1 else columns)
        padding = torch.tensor(self.num_padding, device=device)[:, None]
        block_ids = self.tokens.new_full((len(self.rows), block_size), self.config.mask_token_id)
        block_ids[:, 0] = self.tokens.gather(1, self._columns(anchors, 1, self.device))[:, 0]
        hidden = self.draft(
            noise_embeds=embed_tokens(self.embedding, block_ids).to(device),
            context_hidden_states=states,
            position_ids=(columns - padding).clamp(min=0),
            attention_mask=None
            if is_simple
            else draft_masks(self.config, self.draft_cache, block_columns, padding, end),
            cache=self.draft_cache,
        ).last_hidden_state
        self.contexts, self.context_length = [], anchors
        self.is_finite = hidden.isfinite().all()
        # all slots are drafted, as in training; the head, the dearer part, takes those in use
        logits = apply_head(self.head, hidden[:, 1 : tree.num_slots].contiguous()).to(self.device)
        if not self.sample_proposals:
            if tree.is_chain:
                return best_tokens(logits), None
            return logits.topk(tree.num_ranks).indices[:, tree.depths[1:] - 1, tree.ranks[1:]], None
        # nothing can be drawn from what is not finite; what is accepted is right whatever the draft draws from
        draft_scores = self.scores.prefix_free(logits.float().nan_to_num(0.0, 0.0, 0.0))
        drafted = torch.multinomial(draft_scores.softmax(-1).flatten(0, 1), 1).view(draft_scores.shape[:2])
        return drafted, draft_scores

    def _new_context(self, anchors: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that the draft has not read yet, and the column of each; column `end` for what does not exist."""
        device = self.draft.device
        states = torch.cat([context.states for context in self.contexts], dim=1)
        if all(context.counts is None for context in self.contexts):
            return states, self._columns(self.context_length, states.shape[1], device)
        exists = torch.cat([self._exists(context) for context in self.contexts], dim=1)
        columns = torch.tensor(self.context_length, device=device)[:, None] + exists.cumsum(1) - 1
        return states, torch.where(exists, columns, max(anchors) + self.config.block_size)

    def _exists(self, context: _Context) -> torch.Tensor:
        num_rows, count = context.states.shape[:2]
        slots = torch.arange(count, device=context.states.device).expand(num_rows, -1)
        return slots >= 0 if context.counts is None else slots < context.counts[:, None]

    # ---- verifying ----

    def _verify(self, drafted: torch.Tensor, tree: DraftTree) -> _Verified:
        """Run the target over anchor and drafted tokens, after those that its recurrent states have not seen."""
        if not tree.is_chain:
            anchors = self.tokens.gather(1, self._columns([length - 1 for length in self.lengths], 1, self.device))
            outputs = self._run_target(tree.num_nodes, tree.num_nodes, torch.cat([anchors, drafted], dim=1), tree)
            return _Verified(outputs.logits[:, -tree.num_nodes :], outputs, [0] * len(self.rows))
        num_slots = tree.num_slots
        self.tokens.scatter_(1, self._columns(self.lengths, num_slots - 1, self.device), drafted)
        if self.target_cache.is_recurrent:
            self.target_cache.save_states()
        waiting = self._waiting()
        num_logits = num_slots + max(waiting) - min(waiting)
        outputs = self._run_target(max(waiting) + num_slots, num_logits)
        logits = outputs.logits[:, -num_logits:]
        if min(waiting) != max(waiting):
            logits = _from_each_row(logits, [count - min(waiting) for count in waiting], num_slots)
        return _Verified(logits, outputs, waiting)

    def _waiting(self) -> list[int]:
        """Tokens of each row before the anchor that are not in the target's cache for good."""
        return [length - 1 - read for length, read in zip(self.lengths, self.read_lengths, strict=True)]

    def _run_target(
        self, count: int, num_logits: int, input_ids: torch.Tensor | None = None, tree: DraftTree | None = None
    ) -> Any:
        """
        Run the target over `count` tokens of each row, from the first that is not in its cache for good.

        They are those of the text, unless a tree of tokens is given, whose first one is the anchor.
        """
        start, end = min(self.read_lengths), max(self.read_lengths) + count
        columns = self._columns(self.read_lengths, count, self.device)
        if len(self.rows) == 1:
            self.target_cache.place(start, end)
        else:
            self.target_cache.place(start, end, columns)
        mask = target_masks(self.target, self.target_cache, columns, self.num_padding, end, tree)
        inputs: dict[str, Any] = {"attention_mask": mask}
        if self.takes_position_ids and self.position_offset is not None:
            positions = columns if tree is None else columns[:, :1] + tree.depths
            inputs["position_ids"] = positions.clamp(max=self.max_length - 1) + self.position_offset[..., None]
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        return self.target(
            input_ids=self.tokens.gather(1, columns) if input_ids is None else input_ids,
            cache=self.target_cache,
            use_cache=True,
            output_hidden_states=self.wanted_states,
            return_dict=True,
            **inputs,
        )

    # ---- committing ----

    def _decide(
        self, drafted: torch.Tensor, draft_scores: torch.Tensor | None, logits: torch.Tensor, tree: DraftTree
    ) -> tuple[Acceptance, torch.Tensor, torch.Tensor]:
        """Which drafted tokens stay, the last accepted node, and the processed scores that said so."""
        scores = logits.to(self.device)
        if len(self.scores) or self.do_sample or self.keep_scores:
            scores = scores.to(torch.float32, copy=True)
        if len(self.scores):
            scores = self.scores(self.tokens, self.lengths, scores, self.rows)
        if not tree.is_chain:
            acceptance, node = accept_in_tree(drafted, scores, tree, do_sample=self.do_sample)
            return acceptance, node, scores
        if self.do_sample:
            acceptance = accept_by_probability(drafted, scores, draft_scores)
        else:
            acceptance = accept_greedily(drafted, scores)
        return acceptance, acceptance.num_accepted, scores

    def _commit(
        self,
        drafted: torch.Tensor,
        draft_scores: torch.Tensor | None,
        logits: torch.Tensor,
        tree: DraftTree,
        verified: _Verified | None = None,
    ) -> list[int]:
        """Append the tokens that stay and let finished rows go; returns how many tokens each row got."""
        num_slots = tree.num_slots
        acceptance, node, scores = self._decide(drafted, draft_scores, logits, tree)
        columns, path = self._columns(self.lengths, num_slots, self.device), tree.paths[node]
        if not tree.is_chain:
            self.tokens.scatter_(1, columns[:, :-1], drafted.gather(1, (path[:, 1:] - 1).clamp(min=0)))
            if self.keep_scores or self.keep_logits:
                scores, logits = (values.take_along_dim(path[..., None], 1) for values in (scores, logits))
        last = columns.gather(1, acceptance.num_accepted[:, None])
        self.tokens.scatter_(1, last, acceptance.next_tokens[:, None])
        parts = [self.tokens.gather(1, columns), acceptance.num_accepted[:, None], node[:, None]]
        if num_slots > 1:
            parts.append(self.is_finite.to(self.device).long().expand(len(self.rows), 1))
            self.expected_sum = self.expected_sum + acceptance.expected.sum()
        on_host = torch.cat(parts, dim=1).tolist()  # the one moment at which the host waits for the device

        counts, is_finished = [], []
        for row, values in enumerate(on_host):
            count, done = self._cut(row, values[:num_slots], values[num_slots] + 1)
            counts.append(count)
            is_finished.append(done)
        if num_slots > 1 and not on_host[0][-1]:
            self._warn_of_overflow()
        self._record(num_slots, counts, scores, logits, is_prefill=verified is None)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if verified is not None:
            is_on_chain = all(values[num_slots + 1] < tree.chain_length for values in on_host)
            self._keep_states(verified, tree, None if is_on_chain else path, counts)
        if self.on_pass is not None:
            self.on_pass(
                VerifyPass(
                    [values[:count] for values, count in zip(on_host, counts, strict=True)],
                    [min(values[num_slots], count) for values, count in zip(on_host, counts, strict=True)],
                    list(self.rows),
                    num_slots - 1,
                )
            )
        if any(is_finished):
            self._drop(is_finished)
        return counts

    def _cut(self, row: int, text: list[int], count: int) -> tuple[int, bool]:
        """Tokens of a pass up to the first at which the row has to stop, and whether it does."""
        length = self.lengths[row]
        is_finished = length + count >= self.max_length
        count = min(count, self.max_length - length)
        for index, token in enumerate(text[:count]):
            if token in self.rules.end_token_ids:
                count, is_finished = index + 1, True
                break
        other = self.rules.count_until_other_stop(self.tokens[row : row + 1], length, count)
        return (count, is_finished) if other is None else (other, True)

    def _record(
        self, num_slots: int, counts: list[int], scores: torch.Tensor, logits: torch.Tensor, *, is_prefill: bool
    ) -> None:
        statistics = self.statistics
        statistics.num_tokens += sum(counts)
        if num_slots > 1:
            statistics.num_verify_passes += 1
            for row, length, count in zip(self.rows, self.lengths, counts, strict=True):
                statistics.committed[row].append(count)
                statistics.verified[row].append(num_slots - 1)
                statistics.starts[row].append(length - self.num_prompt_columns)
        elif not is_prefill:
            statistics.num_plain_passes += 1
        for is_kept, name, values in ((self.keep_scores, "scores", scores), (self.keep_logits, "logits", logits)):
            if is_kept:
                for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
                    self.kept[name][row] += values[index, :count].float().unbind(0)

    def _keep_states(self, verified: _Verified, tree: DraftTree, path: torch.Tensor | None, counts: list[int]) -> None:
        """Hand the states of committed tokens to the draft, and move the target's cache on."""
        waiting, longest = verified.waiting, max(counts)
        is_uniform = min(waiting) == max(waiting)
        if path is not None:
            states = self._tapped(verified.outputs, slice(None))
            states = states.take_along_dim(path[:, :longest, None].to(states.device), 1)
            anchors = torch.tensor(self.read_lengths, device=self.device)[:, None]
            places = anchors + torch.arange(tree.num_slots, device=self.device)
            self.target_cache.move(anchors + path[:, 1:], places[:, 1:])
        elif is_uniform:
            states = self._tapped(verified.outputs, slice(waiting[0], waiting[0] + longest))
        else:
            states = _from_each_row(self._tapped(verified.outputs, slice(None)), waiting, longest)
        is_even = min(counts) == longest
        self.contexts.append(_Context(states, None if is_even else torch.tensor(counts, device=states.device)))

        if self.target_cache.is_recurrent and not (is_uniform and min(counts) == tree.num_slots):
            self.target_cache.restore_states()
            self._read_waiting_tokens()
        else:
            self.target_cache.accept_states()
            self.read_lengths = [length - 1 for length in self.lengths]

    def _read_waiting_tokens(self) -> None:
        """Move recurrent states over committed tokens, once enough of them wait."""
        while True:
            waiting = self._waiting()
            if max(waiting) <= WAITING_TOKENS:
                return
            count = min(number for number in waiting if number >= WAITING_TOKENS // 2)
            self.target_cache.save_states()
            self.watch.lap("rest")
            self._run_target(count, num_logits=1)
            self.watch.lap("verify")
            moves = [number >= count for number in waiting]
            self.target_cache.accept_states(torch.tensor(moves))
            self.read_lengths = [
                read + count if move else read for read, move in zip(self.read_lengths, moves, strict=True)
            ]

    def _drop(self, is_finished: list[bool]) -> None:
        """Finished rows leave the batch and cost nothing from here on."""
        for index, done in enumerate(is_finished):
            if done:
                self.finished[self.rows[index]] = self.tokens[index, : self.lengths[index]].clone()
        keep = [index for index, done in enumerate(is_finished) if not done]
        self.rows = [self.rows[index] for index in keep]
        if not keep:  # what is left is for a call that goes on from here
            return
        for name in ("lengths", "num_padding", "read_lengths", "context_length"):
            setattr(self, name, [getattr(self, name)[index] for index in keep])
        kept_rows = torch.tensor(keep, device=self.device)
        self.tokens = self.tokens[kept_rows]
        if self.position_offset is not None:
            self.position_offset = self.position_offset[..., kept_rows]
        self.target_cache.select_rows(kept_rows)
        self.draft_cache.select_rows(kept_rows)
        self.contexts = [
            _Context(
                context.states[kept_rows.to(context.states.device)],
                None if context.counts is None else context.counts[kept_rows.to(context.states.device)],
            )
            for context in self.contexts
        ]

    def _warn_of_overflow(self) -> None:
        logger.warning_once(
            f"The draft's hidden states are not finite, so that nothing it drafts is accepted. Target in "
            f"{self.target.dtype}, draft in {self.draft.dtype}: float16 overflows in the draft's first projection; "
            "load both in bfloat16 or float32."
        )


def _from_each_row(values: torch.Tensor, first: list[int], count: int) -> torch.Tensor:
    """`values[r, first[r] : first[r] + count]` of every row; the last one repeats where a row has fewer."""
    slots = torch.tensor(first, device=values.device)[:, None] + torch.arange(count, device=values.device)
    rows = torch.arange(len(first), device=values.device)[:, None]
    return values[rows, slots.clamp(max=values.shape[1] - 1)]
