"""
Prompts that a target writes itself.

An instruction-tuned model that is given its chat template up to the beginning of a user turn writes a user turn.
Source: Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing"
(arXiv 2406.08464). What differs from it: a seed for each attempt, so that a run can be continued, and the filters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.chat_template import ChatRenderer, ChatTemplateError, encode
from ..data.prompt_sources import OWN
from ..files import Journal, digest_number, read_journal, refuse_other_settings, replace_file, without_lone_surrogates
from ..model.configuration_dflash import text_tokenizer
from .near_duplicates import NearDuplicates
from .requests import Completion, Failure, GenerationBackend, RequestQueue, SamplingParameters, TurnRequest

_MARK = "\ue000user\ue001"  # no text has private-use characters, and no template strips them
WINDOW, MIN_ACCEPTED_SHARE = 400, 0.05  # a run stops if fewer of its last attempts are accepted
SHORTEST_WORDS = 2
MIN_LETTER_SHARE = 0.5  # of the characters other than spaces
# Beginnings of answers rather than of requests
ANSWER_BEGINNINGS = (
    "sure", "certainly", "of course", "absolutely", "here is", "here are", "here's", "as an ai", "i'm sorry",
    "i am sorry", "i apologize", "great question", "thank you for", "you're welcome", "i'm happy to help",
)  # fmt: skip
_OTHER_ROLE = re.compile(r"^\s*(?:assistant|user|system|human|ai|bot|model)\s*(?::|$)", re.IGNORECASE | re.MULTILINE)
_TEMPLATE_TOKEN = re.compile(
    r"<[|｜][^|｜<>]{1,40}[|｜]>|\[/?INST\]|</?(?:start_of_turn|end_of_turn|s|think|tool_call)>"
)
DOMAIN_SYSTEM_PROMPT = (
    "You are a helpful assistant for {domain}. Each message of the user is a request or a question about {domain}."
)


@dataclass(frozen=True)
class UserTurn:
    """
    The beginning of a user turn in a chat template.

    Args:
        prefix_ids (`list[int]`): tokens of the rendered text before the content of the turn.
        end (`str`): the first token that the template writes after the content, or its first line after it.
    """

    prefix_ids: list[int]
    end: str


def user_turn(tokenizer: PreTrainedTokenizerBase, history: list[dict[str, Any]]) -> UserTurn:
    """
    Render a conversation up to the content of its next user turn.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer.
        history (`list[dict]`): the messages before the turn.

    Returns:
        [`UserTurn`]

    Raises:
        ValueError: the tokenizer has no chat template, or one whose user turn has no beginning of its own or another
            content than it was given.
        ChatTemplateError: the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so that its model writes no user turns: "
            "the prompts of a base model are beginnings of texts. Pass a file with a column `text` to "
            "`dflash-hf regenerate`."
        )
    renderer = ChatRenderer(text_tokenizer(tokenizer), None, {})
    turn = {"role": "user", "content": _MARK}
    before, mark, after = renderer.render([*history, turn], add_generation_prompt=True).rpartition(_MARK)
    alone = renderer.render([turn]).partition(_MARK)[0].strip() if mark else ""
    if not mark or alone in ("", str(tokenizer.bos_token or "")):
        what = "writes nothing before the content of a user turn" if mark else "changes the content of a user turn"
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} {what}, so that the model cannot be made to write one. "
            "Pass prompts of your own to `dflash-hf regenerate`."
        )
    after = after.strip()
    tokens = [str(token) for token in text_tokenizer(tokenizer).added_tokens_decoder.values()]
    end = next((token for token in sorted(tokens, key=len, reverse=True) if after.startswith(token)), "")
    return UserTurn(encode(text_tokenizer(tokenizer), before.rstrip(" ")), end or after.split("\n")[0])


@dataclass(frozen=True)
class PromptSettings:
    """
    The settings that all prompts of a file have in common.

    Args:
        target (`str`): Hub name or folder of the target, or its name on the server.
        sampling ([`SamplingParameters`]): of the user turns, and of the answers between two of them.
        system_prompt (`str`, *optional*): the system message under which they are written; it is not part of them.
        follow_ups (`float`, defaults to 0): in [0, 1]: the share of conversations with two user turns.

    Raises:
        ValueError: the share is out of its range, or the sampling is greedy, which would write one prompt only.
    """

    target: str
    sampling: SamplingParameters
    system_prompt: str | None = None
    follow_ups: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.follow_ups <= 1:
            raise ValueError(f"follow_ups={self.follow_ups} must be at least 0 and at most 1. Pass a share.")
        if self.sampling.temperature == 0:
            raise ValueError("temperature=0 would write the same prompt every time. Pass a temperature above 0.")


def refusal(text: str, finish_reason: str, before: list[str]) -> str | None:
    """
    Return why a user turn is no usable prompt, or None if it is one.

    Args:
        text (`str`): the turn, without white space at both ends.
        finish_reason (`str`): `"stop"` if the target ended it.
        before (`list[str]`): texts of the conversation that it may not repeat.

    Returns:
        `str`, *optional*: a few words, the same for all turns of a kind.

    Example:
        >>> refusal("How do I bake bread?", "stop", [])
        >>> refusal("Sure, here is a recipe.", "stop", [])
        'begins like an answer'
    """
    letters = sum(character.isalpha() for character in text)
    if not text:
        return "is empty"
    if finish_reason != "stop":
        return "was not ended within the limit"
    if _TEMPLATE_TOKEN.search(text):
        return "has a token of the chat template"
    if _OTHER_ROLE.search(text):
        return "speaks for another role"
    if text.lower().startswith(ANSWER_BEGINNINGS):
        return "begins like an answer"
    if any(normalised(text) in normalised(each) or normalised(each) in normalised(text) for each in before if each):
        return "repeats what stood before it"
    if len(text.split()) < SHORTEST_WORDS and letters < 12:  # some languages write no spaces
        return "is too short"
    if letters < MIN_LETTER_SHARE * sum(not character.isspace() for character in text):
        return "has few letters"
    return None


def normalised(text: str) -> str:
    """Return a text in lower case, with single spaces."""
    return " ".join(text.lower().split())


@dataclass
class PromptProgress:
    """
    The progress of a run.

    Args:
        num_accepted (`int`): prompts of the file so far.
        num_attempts (`int`): texts that were looked at.
        num_tokens (`int`): tokens that the target wrote in this run.
        refused (`Counter`): refused texts by reason.
    """

    num_accepted: int = 0
    num_attempts: int = 0
    num_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class _Attempt:
    """A conversation that the target writes: the texts of its user turns and of the answer between them."""

    number: int
    messages: list[dict[str, Any]]
    finish_reason: str = ""
    is_complete: bool = False


class _Attempts(RequestQueue):
    """A queue that gives out attempts only as far as prompts are missing."""

    def __init__(self, requests: Iterator[TurnRequest], is_wanted: Any) -> None:
        super().__init__(requests)
        self.is_wanted = is_wanted

    def take(self) -> TurnRequest | None:
        return super().take() if self._follow_ups or self.is_wanted() else None


class SelfPrompts:
    """
    Let a target write prompts into a file, and continue where an earlier run ended.

    The attempts are numbered, and each has a seed of its own. Their texts are kept in a journal beside the file, and
    are looked at in the order of their numbers, so that the file does not depend on batches or interruptions.

    Args:
        out (`Path`): the file of the prompts. The journal beside it is named `.NAME.attempts`.
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer, with a chat template.
        settings ([`PromptSettings`]): of the file.

    Attributes:
        end (`str`): the text that ends a user turn, for the backend's `stop_strings`.
        progress ([`PromptProgress`]): of the run.

    Raises:
        ValueError: the template does not suit (see [`user_turn`]), or the journal was made with other settings.
    """

    def __init__(self, out: Path, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        self.out, self.tokenizer, self.settings = out, tokenizer, settings
        system = settings.system_prompt
        self.head = [{"role": "system", "content": system}] if system is not None else []
        turn = user_turn(tokenizer, self.head)
        self.prefix_ids, self.end = turn.prefix_ids, turn.end
        self.progress = PromptProgress()
        self.prompts: list[dict[str, Any]] = []
        self.known = NearDuplicates()
        self.attempts: dict[int, _Attempt] = {}
        self.recent: deque[bool] = deque(maxlen=WINDOW)
        self.next_number = 0  # of the first attempt that was not looked at

    def write(self, backend: GenerationBackend, number: int) -> Generator[PromptProgress]:
        """
        Write prompts until the file has a number of them.

        Args:
            backend ([`GenerationBackend`]): continues `prompt_ids`, and stops at [`SelfPrompts.end`].
            number (`int`): prompts of the file.

        Yields:
            [`PromptProgress`]: the same object, after every completion. Closing the generator keeps what was written.

        Raises:
            ValueError: `number` is below 1.
            RuntimeError: hardly any text is accepted; the message has the reasons.
        """
        if number < 1:
            raise ValueError(f"number={number} must be at least 1. Pass the number of prompts to write.")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        path = self.out.with_name(f".{self.out.name}.attempts")
        lines = read_journal(path, dict) if path.is_file() else []
        journal = Journal(path)
        try:
            if lines:
                refuse_other_settings(self.out, lines[0]["settings"], asdict(self.settings))
            else:
                journal.append({"settings": asdict(self.settings)})
            for line in lines[1:]:
                self.attempts[line["number"]] = _Attempt(
                    line["number"], line["messages"], line["finish_reason"], is_complete=True
                )
            self._look_at(number)
            yield self.progress
            yield from self._write(backend, number, journal)
        finally:
            journal.close()
            self._save(number)

    def _write(self, backend: GenerationBackend, number: int, journal: Journal) -> Generator[PromptProgress]:
        def is_wanted() -> bool:
            in_progress = sum(not attempt.is_complete for attempt in self.attempts.values())
            accepted, seen = self.progress.num_accepted, self.progress.num_attempts
            share = max(0.25, accepted / seen if seen else 0.8)
            waiting = len(self.attempts) - in_progress
            return in_progress + waiting < math.ceil((number - accepted) / share)

        requests = _Attempts(self._requests(), is_wanted)
        if self.progress.num_accepted >= number:
            return
        with closing(backend.completions(requests)) as outcomes:
            for request, outcome in outcomes:
                self._record(requests, request, outcome, journal)
                self._look_at(number)
                yield self.progress
                if self.progress.num_accepted >= number:
                    return
        if self.progress.num_accepted < number:
            raise RuntimeError("The backend ended before all prompts were written. Run the same command again.")

    def _requests(self) -> Iterator[TurnRequest]:
        number = self.next_number
        while True:
            if number not in self.attempts:
                self.attempts[number] = _Attempt(number, [])
                yield self._user_request(number, 0)
            number += 1

    def _user_request(self, number: int, turn: int) -> TurnRequest:
        history = [*self.head, *self.attempts[number].messages]
        ids = user_turn(self.tokenizer, history).prefix_ids if turn else self.prefix_ids
        return TurnRequest(str(number), history, turn, prompt_ids=ids)

    def _record(
        self, requests: RequestQueue, request: TurnRequest, outcome: Completion | Failure, journal: Journal
    ) -> None:
        """Add a text to its attempt, and request the next one or complete the attempt."""
        attempt = self.attempts[int(request.conversation_id)]
        if isinstance(outcome, Failure):
            attempt.finish_reason = attempt.finish_reason or f"failed: {outcome.reason}"
        else:
            self.progress.num_tokens += len(outcome.token_ids or ()) or outcome.num_tokens or 0
            text = without_lone_surrogates(str(outcome.message.get("content") or ""))
            if request.turn != 1:
                text = (text.partition(self.end)[0] if self.end else text).strip()
            if self._goes_on(requests, request, attempt, text, outcome.finish_reason):
                return
        attempt.is_complete = True
        journal.append(
            {"number": attempt.number, "messages": attempt.messages, "finish_reason": attempt.finish_reason}
        )

    def _goes_on(
        self, requests: RequestQueue, request: TurnRequest, attempt: _Attempt, text: str, finish_reason: str
    ) -> bool:
        """Add a text to an attempt, and return whether another one was requested."""
        number, turn = attempt.number, request.turn
        if turn == 0:
            attempt.messages.append({"role": "user", "content": text})
            attempt.finish_reason = finish_reason
            has_two = digest_number(f"follow-up {self.settings.sampling.seed} {number}", size=6)
            if has_two >= self.settings.follow_ups * 2**48 or self._refusal(text, finish_reason, []):
                return False
            requests.put(TurnRequest(str(number), [*self.head, *attempt.messages], 1))
            return True
        if finish_reason != "stop":
            return False
        if turn == 1:
            attempt.messages.append({"role": "assistant", "content": text})
            try:
                requests.put(self._user_request(number, 2))
            except (ChatTemplateError, ValueError):
                return False
            return True
        before = [message["content"] for message in attempt.messages]
        if self._refusal(text, finish_reason, before) is None:
            attempt.messages.append({"role": "user", "content": text})
        return False

    def _refusal(self, text: str, finish_reason: str, before: list[str]) -> str | None:
        return refusal(text, finish_reason, [self.settings.system_prompt or "", *before])

    def _look_at(self, number: int) -> None:
        """Accept or refuse the completed attempts, in the order of their numbers."""
        progress = self.progress
        while progress.num_accepted < number:
            attempt = self.attempts.get(self.next_number)
            if attempt is None or not attempt.is_complete:
                return
            del self.attempts[self.next_number]
            self.next_number += 1
            progress.num_attempts += 1
            reason = self._reason(attempt)
            self.recent.append(reason is None)
            if reason is None:
                turns = [each["content"] for each in attempt.messages if each["role"] == "user"]
                row: dict[str, Any] = {"prompt": turns[0]} if len(turns) == 1 else {"turns": turns}
                self.prompts.append({**row, "source": OWN})
                progress.num_accepted += 1
                continue
            progress.refused[reason] += 1
            if len(self.recent) == WINDOW and sum(self.recent) < MIN_ACCEPTED_SHARE * WINDOW:
                reasons = ", ".join(f"{name} ({count})" for name, count in progress.refused.most_common(3))
                raise RuntimeError(
                    f"Of the last {WINDOW} texts that the target wrote, {sum(self.recent)} are usable prompts. Most "
                    f"of the others: {reasons}. Another temperature, --domain or --system-prompt may help, or "
                    f"prompts of your own. The {progress.num_accepted} prompts in {self.out} are kept."
                )

    def _reason(self, attempt: _Attempt) -> str | None:
        """Return why an attempt is refused, or None."""
        if not attempt.messages:
            return attempt.finish_reason
        text = attempt.messages[0]["content"]
        return self._refusal(text, attempt.finish_reason, []) or self.known.add(normalised(text))

    def _save(self, number: int) -> None:
        """Write the prompts, of which an earlier run may have asked for more."""

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(_line(row) for row in self.prompts[:number])

        if self.prompts:
            replace_file(self.out, write)


def _line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of a JSON-lines file."""
    return json.dumps(row, ensure_ascii=False) + "\n"
