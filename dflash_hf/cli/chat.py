"""`dflash-hf chat`: a conversation in the terminal that shows which tokens the draft got right."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from .chat_session import Answer, ChatSession, Span

DRAFTED_STYLE, OWN_STYLE = "green", "magenta"  # told apart with red-green blindness too, on dark and light
DRAFTED_MARKS = ("‹", "›")  # where there is no colour
REFRESH_S = 0.04
COMMANDS = "/reset forgets the conversation, /plain on|off, /stats, /quit; Ctrl-C stops an answer, Ctrl-D leaves."
NOT_SHOWN = dict.fromkeys([*range(32), *range(127, 160)], "\ufffd") | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def chat(
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Start without the draft, for comparison.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily, above 0 samples.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus when sampling; default: the target's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Best tokens when sampling; default: the target's own.")] = None,
    block_size: Annotated[
        str | None, typer.Option(help="Slots to verify, or auto; default: as trained. 1 drafts nothing.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="Of target and draft: auto, bfloat16, float32.")] = "auto",
) -> None:
    """Chat with a target; see the draft's tokens, tokens a second, acceptance length and speed-up as it answers."""
    from transformers import set_seed
    from transformers.utils import logging

    from ..target.loading import load_pair
    from .chat_session import ChatSession

    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens} must be at least 1.")
    if temperature < 0:
        raise ValueError(f"--temperature {temperature} must be 0 (greedy) or above (sampling).")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p} must be above 0 and at most 1.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k {top_k} must be at least 1.")
    sampling = {"top_p": top_p, "top_k": top_k}
    kwargs: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        kwargs |= {
            "temperature": temperature,
            **{name: value for name, value in sampling.items() if value is not None},
        }
    elif given := [f"--{name.replace('_', '-')}" for name, value in sampling.items() if value is not None]:
        raise ValueError(f"{' and '.join(given)} need sampling. Pass --temperature above 0 too.")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_terminal:
        logging.disable_progress_bar()
    model, pair, tokenizer = load_pair(draft, target, dtype)
    session = ChatSession(
        model,
        pair,
        tokenizer,
        system=system,
        block_size=_parse_block_size(block_size),
        is_plain=plain,
        max_new_tokens=max_new_tokens,
        **kwargs,
    )
    session.warm_up()  # what transformers warns of is shown by now, and would tear the display from here on
    logging.set_verbosity_error()
    if seed is not None:
        set_seed(seed)
    if is_terminal:
        console = Console()
        _greet(console, session)
        converse(session, console)
    else:
        answer_lines(session)


def _parse_block_size(value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--block-size {value!r} must be a number of slots, or auto.") from None


def has_colour(console: Console) -> bool:
    """Whether colours can be seen there: not with NO_COLOR or a dumb terminal."""
    return console.color_system is not None and not console.no_color


def coloured(spans: list[Span], with_colour: bool) -> Text:
    """
    Pieces of an answer as they are shown.

    Args:
        spans (`list[Span]`): the pieces.
        with_colour (`bool`): colours; otherwise marks around what was drafted.

    Returns:
        `Text`: without control characters of the answer, which a terminal would obey.
    """
    text = Text()
    for span in spans:
        shown = span.text.translate(NOT_SHOWN)
        if with_colour:
            text.append(shown, DRAFTED_STYLE if span.is_drafted else OWN_STYLE)
        elif span.is_drafted and (words := shown.strip()):
            text.append(shown.replace(words, words.join(DRAFTED_MARKS)))
        else:
            text.append(shown)
    return text


class AnswerDisplay:
    """
    Shows an answer while it grows, with a line of numbers below it.

    Full lines scroll up for good; the line being written and the numbers are drawn anew, at most 25 times a second. A
    terminal that cannot move its cursor gets the text as it comes, and the numbers at the end.

    Args:
        console (`Console`): where.
        session ([`ChatSession`]): makes the line of numbers.
    """

    def __init__(self, console: Console, session: ChatSession) -> None:
        self.console, self.session = console, session
        self.with_colour = has_colour(console)
        self.can_redraw = console.is_terminal and not console.is_dumb_terminal
        self.answer: Answer | None = None
        self.line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_refresh = 0.0

    def __enter__(self) -> AnswerDisplay:
        if self.can_redraw:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.can_redraw:
            self._live.stop()  # takes the unfinished line away, too
        self.console.print(self.line)
        if self.answer is not None:
            self.console.print(self._numbers())

    def show(self, answer: Answer, spans: list[Span]) -> None:
        """Add pieces of the answer."""
        self.answer = answer
        piece = coloured(spans, self.with_colour)
        if not self.can_redraw:
            self.console.print(piece, end="", soft_wrap=True)
            return
        *full_lines, self.line = self.line.append_text(piece).wrap(self.console, self.console.width, overflow="fold")
        now = time.perf_counter()
        is_due = now >= self._next_refresh
        if is_due or full_lines:
            self._next_refresh = now + REFRESH_S
            numbers = self._numbers()
            numbers.no_wrap, numbers.overflow = True, "ellipsis"
            self._live.update(Group(self.line, numbers), refresh=not full_lines)
        if full_lines:  # printing them draws what is below anew
            self.console.print(Text("\n").join(full_lines))

    def _numbers(self) -> Text:
        return Text("" if self.answer is None else self.session.describe_answer(self.answer), style="dim")


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """
    Inside the context the first Ctrl-C is only noted, and the next one raises `KeyboardInterrupt`.

    Yields:
        `Callable`: whether Ctrl-C was pressed.
    """
    presses: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Inside the context keys do not show, which would tear the display; the next line read begins with them."""
    try:
        import termios
    except ImportError:  # on Windows
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = list(before)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _greet(console: Console, session: ChatSession) -> None:
    from .chat_session import Span

    names = f"target {session.target.name_or_path}, draft {session.draft.name_or_path}"
    console.print(Text(f"{names}, {session.target.dtype}, {session.target.device}".replace("torch.", ""), style="dim"))
    drafted, own = Span("drafted and accepted", True), Span("the target's own token", False)
    console.print(coloured([drafted, Span(" ", False), own], has_colour(console)))
    console.print(Text(COMMANDS, style="dim"))


def _obey(session: ChatSession, line: str) -> list[str] | None:
    """Carry out a command and return what to say about it; `None` to leave."""
    match line.split():
        case ["/quit" | "/exit"]:
            return None
        case ["/reset"]:
            session.reset()
            return ["The conversation starts afresh."]
        case ["/plain", "on" | "off" as state]:
            session.is_plain = state == "on"
            return ["Plain decoding." if session.is_plain else "Decoding with the draft."]
        case ["/stats"]:
            return session.describe_all()
        case ["/help"]:
            return [COMMANDS]
    return [f"{line.split()[0]!r} is no command as it stands. {COMMANDS} A space before the slash makes it a line."]


def converse(session: ChatSession, console: Console) -> None:
    """
    Talk with the user until they leave.

    Args:
        session ([`ChatSession`]): the conversation.
        console (`Console`): the terminal.
    """
    with contextlib.suppress(ImportError):  # not on Windows
        importlib.import_module("readline")  # gives `input` its editing, its history and lines of any length
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(Text(f"\n{COMMANDS}", style="dim"))
            continue
        if not line.strip():
            continue
        if line.startswith("/"):
            replies = _obey(session, line)
            if replies is None:
                return
            for reply in replies:
                console.print(Text(reply, style="dim"))
            continue
        try:
            with stopped_by_ctrl_c() as is_stopped, without_echo(), AnswerDisplay(console, session) as display:
                session.answer(line, display.show, is_stopped)
        except KeyboardInterrupt:
            continue  # pressed again: the answer ended at once
        except (ValueError, RuntimeError) as error:  # a line too long, or memory that ran out: the next may do
            message = " ".join(str(error).split())
            console.print(Text("Error: ", style="bold red") + Text(message), soft_wrap=True)


def answer_lines(session: ChatSession) -> None:
    """
    Answer each line of the standard input on the standard output, as it is; numbers go to the standard error.

    Args:
        session ([`ChatSession`]): the conversation.
    """
    for stream in (sys.stdin, sys.stdout):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")

    def show(answer: Answer, spans: list[Span]) -> None:
        print("".join(span.text for span in spans), end="", flush=True)

    for line in sys.stdin:
        question = line.rstrip("\r\n")
        if not question.strip():
            continue
        if question.startswith("/"):
            replies = _obey(session, question)
            if replies is None:
                return
        else:
            answer = session.answer(question, show)
            print(flush=True)
            replies = [session.describe_answer(answer)]
        for reply in replies:
            print(reply, file=sys.stderr, flush=True)
