"""`dflash-hf chat`: a conversation in the terminal that shows which tokens the draft proposed."""

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
    from .chat_session import ChatSession, Response, Span

DRAFTED_STYLE, OWN_STYLE = (
    "green",
    "magenta",
)  # distinguishable with red-green colour blindness, on dark and light backgrounds
DRAFTED_MARKS = ("‹", "›")  # for terminals without colour
REFRESH_S = 0.04
COMMANDS = (
    "/reset starts a new conversation, /plain on and /plain off switch the draft off and on, /stats shows all "
    "measurements, /quit leaves. Ctrl-C stops a response, Ctrl-D leaves."
)
# The message was too long or has a token that the target cannot read, or memory ran out. Another one can succeed.
TURN_ERRORS = (ValueError, RuntimeError)
NOT_SHOWN = dict.fromkeys([*range(32), *range(127, 160)], "\ufffd") | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def chat(
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Start with plain generation, for comparison.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Greatest length of a response in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily, above 0 samples.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of sampling; default: the target's own.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Number of best tokens to sample from; default: the target's own.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(help="Slots to verify, or auto; default: as many as trained. 1 uses no draft.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampled responses repeatable.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of target and draft: auto, bfloat16, float16 or float32.")
    ] = "auto",
) -> None:
    """
    Chat with a target, and see accepted draft tokens, tokens per second, acceptance length and speed-up.

    Lines of a pipe are answered one after the other; the exit code is 1 if one of them has no answer.
    """
    from transformers import set_seed
    from transformers.utils import logging

    from ..target.loading import load_pair
    from .chat_session import ChatSession

    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens} must be at least 1. Pass a positive number.")
    if temperature < 0:
        raise ValueError(f"--temperature {temperature} must be 0 (greedy) or positive (sampling). Pass such a number.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p} must be above 0 and at most 1. Pass such a number.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k {top_k} must be at least 1. Pass a positive number.")
    sampling = {"top_p": top_p, "top_k": top_k}
    kwargs: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        kwargs |= {
            "temperature": temperature,
            **{name: value for name, value in sampling.items() if value is not None},
        }
    elif given := [f"--{name.replace('_', '-')}" for name, value in sampling.items() if value is not None]:
        raise ValueError(
            f"{' and '.join(given)} need sampling, and --temperature is 0. Pass --temperature above 0, too."
        )
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
    session.warm_up()  # warnings of transformers come by now; later ones would disturb the display
    logging.set_verbosity_error()
    if seed is not None:
        set_seed(seed)
    if is_terminal:
        console = Console()
        _greet(console, session)
        converse(session, console)
    else:
        if not answer_lines(session):
            raise typer.Exit(1)


def _parse_block_size(value: str | None) -> int | str | None:
    """Convert the value of --block-size."""
    if value is None or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--block-size {value!r} must be a number of slots, or auto. Pass one of these.") from None


def has_colour(console: Console) -> bool:
    """Return whether a console shows colours, which it does not with NO_COLOR or as a dumb terminal."""
    return console.color_system is not None and not console.no_color


def coloured(spans: list[Span], with_colour: bool) -> Text:
    """
    Format pieces of a response for the terminal.

    Args:
        spans (`list[Span]`): the pieces.
        with_colour (`bool`): mark drafted text with colours; otherwise with brackets.

    Returns:
        `Text`: text without control characters, which a terminal would interpret.
    """
    text = Text()
    for span in spans:
        shown = span.text.translate(NOT_SHOWN)
        if with_colour:
            text.append(shown, DRAFTED_STYLE if span.is_drafted else OWN_STYLE)
        elif span.is_drafted and (stripped := shown.strip()):
            text.append(shown.replace(stripped, stripped.join(DRAFTED_MARKS)))
        else:
            text.append(shown)
    return text


class ResponseDisplay:
    """
    Show a response while it is generated, with a line of measurements below it.

    Complete lines are printed once. The last line and the measurements are redrawn at most 25 times per second. A
    terminal that cannot move its cursor gets the text in order, and the measurements at the end.

    Args:
        console (`Console`): the terminal.
        session ([`ChatSession`]): the session that describes the measurements.
    """

    def __init__(self, console: Console, session: ChatSession) -> None:
        self.console, self.session = console, session
        self.with_colour = has_colour(console)
        self.can_redraw = console.is_terminal and not console.is_dumb_terminal
        self.response: Response | None = None
        self.line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_refresh = 0.0

    def __enter__(self) -> ResponseDisplay:
        if self.can_redraw:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.can_redraw:
            self._live.stop()  # this removes the last line, which is printed below
        self.console.print(self.line)
        if self.response is not None:
            self.console.print(self._numbers())

    def show(self, response: Response, spans: list[Span]) -> None:
        """
        Add pieces of the response.

        Args:
            response ([`Response`]): the response so far.
            spans (`list[Span]`): its new pieces.
        """
        self.response = response
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
        if full_lines:  # this redraws the lines below
            self.console.print(Text("\n").join(full_lines))

    def _numbers(self) -> Text:
        """Describe the measurements of the response."""
        return Text("" if self.response is None else self.session.describe_response(self.response), style="dim")


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """
    Record the first Ctrl-C inside the context, and raise `KeyboardInterrupt` at the next one.

    Yields:
        `Callable`: returns whether Ctrl-C was pressed.
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
    """Do not show typed keys inside the context, since they would disturb the display. They are read afterwards."""
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
    """Print the pair, the legend of the colours, and the commands."""
    from .chat_session import Span

    names = f"target {session.target.name_or_path}, draft {session.draft.name_or_path}"
    console.print(Text(f"{names}, {session.target.dtype}, {session.target.device}".replace("torch.", ""), style="dim"))
    drafted, own = Span("drafted and accepted", True), Span("the target's own token", False)
    console.print(coloured([drafted, Span(" ", False), own], has_colour(console)))
    console.print(Text(COMMANDS, style="dim"))


def _obey(session: ChatSession, line: str) -> list[str] | None:
    """Execute a command, and return lines to print, or `None` to leave the program."""
    match line.split():
        case ["/quit" | "/exit"]:
            return None
        case ["/reset"]:
            session.reset()
            return ["A new conversation starts."]
        case ["/plain", "on" | "off" as state]:
            session.is_plain = state == "on"
            return ["Plain decoding." if session.is_plain else "Decoding with the draft."]
        case ["/stats"]:
            return session.describe_all()
        case ["/help"]:
            return [COMMANDS]
    return [
        f"{line.split()[0]!r} is not a valid command. {COMMANDS} Type a space before the slash to send the line as a "
        "message."
    ]


def converse(session: ChatSession, console: Console) -> None:
    """
    Answer the user in a terminal until they leave.

    Args:
        session ([`ChatSession`]): the conversation.
        console (`Console`): the terminal.
    """
    with contextlib.suppress(ImportError):  # not on Windows
        importlib.import_module("readline")  # adds editing, history and long lines to `input`
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
            with stopped_by_ctrl_c() as is_stopped, without_echo(), ResponseDisplay(console, session) as display:
                session.answer(line, display.show, is_stopped)
        except KeyboardInterrupt:
            continue  # the second Ctrl-C ended the response at once
        except TURN_ERRORS as error:
            message = " ".join(str(error).split())
            console.print(Text("Error: ", style="bold red") + Text(message), soft_wrap=True)


def answer_lines(session: ChatSession) -> bool:
    """
    Answer each line of the standard input on the standard output, and print measurements to the standard error.

    A line without an answer is an error of one line, and the next line is answered.

    Args:
        session ([`ChatSession`]): the conversation.

    Returns:
        `bool`: whether every line was answered.
    """
    is_complete = True
    for stream in (sys.stdin, sys.stdout):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")

    def show(response: Response, spans: list[Span]) -> None:
        print("".join(span.text for span in spans), end="", flush=True)

    for line in sys.stdin:
        question = line.rstrip("\r\n")
        if not question.strip():
            continue
        if question.startswith("/"):
            replies = _obey(session, question)
            if replies is None:
                return is_complete
        else:
            try:
                response = session.answer(question, show)
                replies = [session.describe_response(response)]
            except TURN_ERRORS as error:
                is_complete = False
                replies = [f"Error: {' '.join(str(error).split())}"]
            print(flush=True)
        for reply in replies:
            print(reply, file=sys.stderr, flush=True)
    return is_complete
