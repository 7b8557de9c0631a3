"""Let a target answer prompts: training rows whose assistant tokens are the target's own."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.prompts import Conversation, conversation_of_row
from ..files import digest_number
from ..provenance import target_label
from .requests import Completion, Failure, GenerationBackend, RequestQueue, SamplingParameters, TurnRequest
from .shards import RowShards

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class RegenerationSettings:
    """
    What all rows of an output folder have in common.

    Args:
        target (`str`):
            Hub name or folder of the target, or its name on the server.
        target_revision (`str`, *optional*):
            Commit of the Hub.
        sampling ([`SamplingParameters`]):
            How answers are drawn.
        system_prompt (`str`, *optional*):
            Begins each conversation, in place of its own.
        chat_template_kwargs (`Mapping`):
            Reach the chat template for every row.
        thinking_share (`float`, *optional*):
            In 0 … 1: the share of conversations with `enable_thinking=True` for the chat template, the others having
            False. Which they are is decided by their content. None says nothing to the template.

    Raises:
        ValueError: the share is out of its range, or `chat_template_kwargs` have `enable_thinking` as well.
    """

    target: str
    target_revision: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking_share: float | None = None

    def __post_init__(self) -> None:
        if self.thinking_share is None:
            return
        if not 0 <= self.thinking_share <= 1:
            raise ValueError(f"thinking_share={self.thinking_share} must be 0 to 1.")
        if "enable_thinking" in self.chat_template_kwargs:
            raise ValueError("Give either thinking_share or enable_thinking in chat_template_kwargs, not both.")

    def template_kwargs(self, conversation_id: str) -> dict[str, Any]:
        """What the chat template gets for a conversation."""
        kwargs = dict(self.chat_template_kwargs)
        if self.thinking_share is not None:
            kwargs["enable_thinking"] = digest_number(conversation_id, size=6) < self.thinking_share * 2**48
        return kwargs


@dataclass
class RegenerationProgress:
    """
    How far a run is.

    Args:
        num_done (`int`): conversations answered before this run.
        num_repeated (`int`): prompts that are the same as an earlier one, and so are not asked.
        num_answered (`int`): conversations answered in this run.
        num_failed (`int`): conversations without an answer, with their reason in the file of failures.
        num_tokens (`int`): tokens that the target wrote in this run.
    """

    num_done: int = 0
    num_repeated: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    @property
    def num_seen(self) -> int:
        """Prompts that are dealt with."""
        return self.num_done + self.num_repeated + self.num_answered + self.num_failed


def are_completions_of(rows: datasets.Dataset, target: str, tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """
    Whether rows of [`regenerate_rows`] are a target's own answers.

    Args:
        rows (`datasets.Dataset`): any rows.
        target (`str`): Hub name or folder.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.

    Returns:
        `bool`, or None: the rows do not tell. False is warned of, with the names.

    Raises:
        ValueError: the rows hold token ids, and this tokenizer reads another text in them.
    """
    if not {"conversation_id", "input_ids", "loss_mask", "target", "target_revision"} <= set(rows.column_names):
        return None
    first = next((row for row in rows.take(min(len(rows), 100)) if row["input_ids"] is not None), None)
    if first is not None:
        content = first["messages"][-1]["content"] or ""
        if content.strip() not in tokenizer.decode(first["input_ids"]):
            raise ValueError(
                f"The rows hold token ids of {first['target']!r}, in which the tokenizer of {target!r} reads another "
                "text. Rows of ids are for the target that wrote them: let this one answer the prompts, or remove the "
                "columns input_ids and loss_mask."
            )
    writers = sorted(rows.unique("target"))
    if writers != [target_label(target)]:
        logger.warning(
            f"The answers are those of {', '.join(writers)}, and the draft is for {target}. Unless these are the same "
            "model, it learns to guess another one's words: let the target answer the prompts itself."
        )
    return writers == [target_label(target)]


@dataclass
class _Open:
    """A conversation under way: its messages so far, and the ids of each answer's prompt and tokens."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    recorded: list[tuple[list[int] | None, list[int] | None]] = field(default_factory=list)


def regenerate_rows(
    prompts: Iterable[Mapping[str, Any]],
    backend: GenerationBackend,
    shards: RowShards,
    settings: RegenerationSettings,
    *,
    column: str | None = None,
) -> Generator[RegenerationProgress]:
    """
    Completion every prompt that the folder does not hold yet, turn by turn.

    A conversation ends early at an answer that was cut (`finish_reason == "length"`): what a user says next answers
    to something else. A prompt that cannot be read or answered goes into the file of failures, and the run goes on.

    Args:
        prompts (`Iterable[Mapping]`):
            Rows as [`conversation_of_row`] takes them; read only as far as the backend asks.
        backend ([`GenerationBackend`]):
            Answers them.
        shards ([`RowShards`]):
            Entered; takes the rows.
        settings ([`RegenerationSettings`]):
            As the shards have them.
        column (`str`, *optional*):
            Of the prompt.

    Yields:
        [`RegenerationProgress`]: the same object, after every answer and failure. Closing the iterator abandons what
        is under way; what was added to the shards stays.
    """
    return _Regeneration(prompts, shards, settings, column).run(backend)


class _Regeneration:
    def __init__(
        self,
        prompts: Iterable[Mapping[str, Any]],
        shards: RowShards,
        settings: RegenerationSettings,
        column: str | None,
    ) -> None:
        self.prompts, self.shards, self.settings, self.column = prompts, shards, settings, column
        self.progress = RegenerationProgress()
        self.open: dict[str, _Open] = {}

    def run(self, backend: GenerationBackend) -> Generator[RegenerationProgress]:
        feed = RequestQueue(self._first_turns())
        with closing(backend.completions(feed)) as answers:
            for request, answer in answers:
                self._take(feed, request, answer)
                yield self.progress
        yield self.progress  # the last prompts may all have been done, repeated or unreadable

    def _first_turns(self) -> Iterator[TurnRequest]:
        done_before, seen = set(self.shards.done_ids), set()
        for index, row in enumerate(self.prompts):
            try:
                conversation = conversation_of_row(row, column=self.column, system_prompt=self.settings.system_prompt)
            except ValueError as error:
                self._fail({"prompt_index": index, "reason": f"Not readable: {error}"})
                continue
            identity = conversation.conversation_id
            if identity in seen:
                self.progress.num_repeated += 1
                continue
            seen.add(identity)
            if identity in done_before:
                self.progress.num_done += 1
                continue
            self.open[identity] = _Open(conversation, list(conversation.turns[0]))
            yield self._request(identity, 0)

    def _request(self, identity: str, turn: int) -> TurnRequest:
        state = self.open[identity]
        return TurnRequest(
            identity,
            list(state.messages),
            turn,
            state.conversation.tools,
            self.settings.template_kwargs(identity),
        )

    def _take(self, feed: RequestQueue, request: TurnRequest, answer: Completion | Failure) -> None:
        identity = request.conversation_id
        state = self.open[identity]
        if isinstance(answer, Failure):
            del self.open[identity]
            self._fail(
                {
                    "conversation_id": identity,
                    "messages": state.messages,
                    "turn": request.turn,
                    "reason": answer.reason,
                }
            )
            return
        state.messages.append(answer.message)
        state.recorded.append((answer.prompt_ids, answer.token_ids))
        self.progress.num_tokens += len(answer.token_ids) if answer.token_ids is not None else answer.num_tokens or 0
        turns = state.conversation.turns
        if request.turn + 1 < len(turns) and answer.finish_reason == "stop" and not answer.message.get("tool_calls"):
            state.messages.extend(turns[request.turn + 1])
            feed.put(self._request(identity, request.turn + 1))
            return
        del self.open[identity]
        input_ids, loss_mask = _conversation_ids(state.recorded)
        self.shards.add(
            {
                "conversation_id": identity,
                "messages": state.messages,
                "tools": state.conversation.tools,
                "chat_template_kwargs": dict(request.chat_template_kwargs),
                "input_ids": input_ids,
                "loss_mask": loss_mask,
                "finish_reason": answer.finish_reason,
                "target": target_label(self.settings.target),
                "target_revision": self.settings.target_revision,
                "sampling": asdict(self.settings.sampling),
            }
        )
        self.progress.num_answered += 1

    def _fail(self, line: Mapping[str, Any]) -> None:
        self.shards.add_failure(line)
        self.progress.num_failed += 1


def _conversation_ids(
    recorded: list[tuple[list[int] | None, list[int] | None]],
) -> tuple[list[int] | None, list[bool] | None]:
    """
    The conversation as the target read and wrote it at its last answer, and True at what it wrote.

    An earlier answer counts as written only where the last prompt still has it token for token after the very tokens
    that it was written after: a template that strips thinking changes the one or the other.
    """
    prompt_ids, token_ids = recorded[-1]
    if prompt_ids is None or token_ids is None:
        return None, None
    input_ids = prompt_ids + token_ids
    mask = [False] * len(prompt_ids) + [True] * len(token_ids)
    for earlier_prompt, earlier_tokens in recorded[:-1]:
        if earlier_prompt is None or earlier_tokens is None:
            continue
        start, end = len(earlier_prompt), len(earlier_prompt) + len(earlier_tokens)
        if prompt_ids[:end] == earlier_prompt + earlier_tokens:
            mask[start:end] = [True] * (end - start)
    return input_ids, mask
