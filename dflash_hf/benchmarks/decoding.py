"""Benchmark of decoding: ours, the loop of transformers and the reference decoder, side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from ..checkpoints.write_layouts import layout_config
from ..data.chat_template import chat_inputs
from ..decoding.generate import speculative_generate
from ..decoding.statistics import DecodingStatistics, Stopwatch
from ..evaluation.compare import PairDecoding, committed_by_pass
from ..model.modeling_dflash import DFlashDraftModel
from .decoding_results import PHASES, DecodingRun, Method
from .decoding_settings import BenchmarkSettings


class ReferenceDecoder:
    """
    The decoder of `dflash` with the weights of a draft: the same tensors, no copy.

    Args:
        draft ([`DFlashDraftModel`]): whose weights it takes.

    Raises:
        ImportError: the package is not installed, or another version without these functions is.
    """

    def __init__(self, draft: DFlashDraftModel) -> None:
        try:
            from dflash import model as reference

            self._generate, model_class = reference.dflash_generate, reference.DFlashDraftModel
            self.version = version("dflash")
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"The reference decoder is not there ({error}): it is in the package dflash 0.1.0. Run "
                "pip install --no-deps dflash==0.1.0 (the versions that it pins are not needed)."
            ) from error
        described = layout_config(draft.config, "serving", str(draft.dtype).removeprefix("torch."))
        self.model: nn.Module = model_class(Qwen3Config(**described)).eval()
        self.model.to(draft.device)  # no dtype: its rotary frequencies stay in fp32
        self.model.load_state_dict(draft.state_dict(), assign=True)

    def generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int,
        end_token_ids: list[int],
        temperature: float,
    ) -> torch.Tensor:
        """
        Decode one row.

        Args:
            target (`PreTrainedModel`): the target.
            input_ids (`torch.LongTensor` of shape `[1, columns]`): the prompt.
            max_new_tokens (`int`): longest answer in tokens.
            end_token_ids (`list[int]`): tokens that end the answer.
            temperature (`float`): 0 decodes greedily.

        Returns:
            `torch.LongTensor` of shape `[1, columns]`: prompt and answer, the end token included.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it passes `past_key_values`
            generate: Any = self._generate
            return generate(
                self.model,
                target,
                input_ids,
                max_new_tokens,
                end_token_ids or None,
                temperature=temperature,
            )


WARM_UP_TOKENS = 16


class CallRecorder:
    """
    Phases of one decoding call of any loop, told by hooks on target, draft and head while the context is open.

    Args:
        target (`PreTrainedModel`): the target.
        draft (`nn.Module`, *optional*): the draft.
        context_name (`str`): the draft's argument with the target's states, of shape `[rows, n, width]`.
    """

    def __init__(self, target: PreTrainedModel, draft: nn.Module | None, context_name: str) -> None:
        self.target, self.draft, self.context_name = target, draft, context_name
        self.num_target_passes = 0
        self.context_lengths: list[int] = []
        self._in_target = False
        self._handles: list[Any] = []
        self.phase_s: dict[str, float] = {}

    def __enter__(self) -> CallRecorder:
        head: Any = self.target.get_output_embeddings()
        self._handles = [
            self.target.register_forward_pre_hook(self._target_starts),
            self.target.register_forward_hook(self._target_ends),
            head.register_forward_pre_hook(self._head_starts),
            head.register_forward_hook(self._head_ends),
        ]
        if self.draft is not None:
            self._handles += [
                self.draft.register_forward_pre_hook(self._draft_starts, with_kwargs=True),
                self.draft.register_forward_hook(self._draft_ends),
            ]
        self.watch = Stopwatch(self.target.device)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.watch.lap("rest")
        self.phase_s = {**dict.fromkeys(PHASES, 0.0), **self.watch.totals()}
        for handle in self._handles:
            handle.remove()

    def _target_starts(self, module: nn.Module, args: Any) -> None:
        self.watch.lap("rest")
        self._in_target = True

    def _target_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.watch.lap("verify" if self.num_target_passes else "prefill")
        self.num_target_passes += 1
        self._in_target = False

    def _head_starts(self, module: nn.Module, args: Any) -> None:
        if not self._in_target:
            self.watch.lap("rest")

    def _head_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._in_target:
            self.watch.lap("draft")

    def _draft_starts(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.watch.lap("rest")
        self.context_lengths.append(kwargs[self.context_name].shape[1])

    def _draft_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.watch.lap("draft")


class DecodingBenchmark:
    """
    Decode the same prompts with every method, in turn.

    For each temperature and batch size every method is warmed up once; then the methods alternate batch by batch, each
    time in an order that has moved on by one, so that a drift of the machine hits all. All methods draw from the same
    distribution: the target's own settings for generation, apart from its special tokens, are set aside.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair, with
            the same dtype.
        prompts (`Sequence[str]`): user messages.
        settings ([`BenchmarkSettings`]): what to measure.

    Raises:
        ValueError: the settings do not fit the prompts or the draft.
        ImportError: the package `dflash` is asked for and not installed.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        settings: BenchmarkSettings,
    ) -> None:
        settings.check(len(prompts), draft.config.block_size)
        self.target, self.draft, self.settings = target, draft, settings
        self.reference = ReferenceDecoder(draft) if settings.against_reference else None
        self.decoding = PairDecoding(target, tokenizer)
        self.rows = [
            chat_inputs(tokenizer, prompt, target.device, draft.config.chat_template_kwargs)["input_ids"][0]
            for prompt in prompts
        ]
        self.left_out: dict[str, str] = {}

    @property
    def num_runs(self) -> int:
        """`int`: calls that are measured in all."""
        return sum(
            self.settings.repeats * len(self.rows) // batch_size * len(self._methods(temperature, batch_size))
            for temperature in self.settings.temperatures
            for batch_size in self.settings.batch_sizes
        )

    def _methods(self, temperature: float, batch_size: int) -> list[Method]:
        methods = self.settings.methods(temperature, batch_size)
        return [method for method in methods if method.name not in self.left_out]

    def run(self, on_start: Callable[[str], None] | None = None) -> Iterator[DecodingRun]:
        """
        Measure.

        Args:
            on_start (`Callable`, *optional*): called with a few words before each call.

        Yields:
            [`DecodingRun`], one a call.
        """
        say = on_start or (lambda words: None)
        with self.decoding.own_settings_aside():
            for temperature in self.settings.temperatures:
                for batch_size in self.settings.batch_sizes:
                    place = f"T = {temperature:g}, batch {batch_size}: "
                    for method in self._methods(temperature, batch_size):
                        say(f"{place}{method.label}, warm-up")
                        self._warm_up(temperature, batch_size, method)
                    methods, num_rounds = self._methods(temperature, batch_size), 0
                    for repeat in range(self.settings.repeats):
                        for first in range(0, len(self.rows), batch_size):
                            prompts = list(range(first, first + batch_size))
                            turn = num_rounds % len(methods)
                            num_rounds += 1
                            for method in methods[turn:] + methods[:turn]:
                                say(place + method.label)
                                torch.manual_seed(self.settings.seed + num_rounds)
                                yield self._decode(temperature, prompts, method, repeat, self.settings.max_new_tokens)

    def _warm_up(self, temperature: float, batch_size: int, method: Method) -> None:
        num_tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        try:
            self._decode(temperature, list(range(batch_size)), method, 0, num_tokens)
        except ValueError as error:
            if method.name != "native":
                raise
            self.left_out["native"] = str(error)  # a target that only the loop of transformers cannot take

    def _decode(
        self, temperature: float, prompts: list[int], method: Method, repeat: int, max_new_tokens: int
    ) -> DecodingRun:
        arguments = self.decoding.arguments([self.rows[prompt] for prompt in prompts], temperature, max_new_tokens)
        draft: nn.Module | None = None if method.name == "plain" else self.draft
        context_name = "context_hidden_states"
        if method.name == "reference" and self.reference is not None:
            draft, context_name = self.reference.model, "target_hidden"
        with CallRecorder(self.target, draft, context_name) as recorder:
            sequences, ours = self._call(method, arguments)
        answers = sequences[:, arguments["input_ids"].shape[1] :].tolist()
        token_ids = [self.decoding.answer(row) for row in answers]
        if ours is not None:
            committed = [count for row in ours.committed for count in row]
        else:
            committed = committed_by_pass(recorder.context_lengths, recorder.num_target_passes, len(token_ids[0]))
        return DecodingRun(
            temperature,
            len(prompts),
            method,
            repeat,
            prompts,
            token_ids,
            recorder.phase_s,
            recorder.num_target_passes - 1,
            committed,
            None if ours is None else ours.expected_sum,
        )

    def _call(self, method: Method, arguments: dict[str, Any]) -> tuple[torch.Tensor, DecodingStatistics | None]:
        """Sequences of shape `[rows, columns]`, and what ours says about them."""
        if method.name == "reference" and self.reference is not None:
            sequences = self.reference.generate(
                self.target,
                arguments["input_ids"],
                max_new_tokens=arguments["max_new_tokens"],
                end_token_ids=self.decoding.end_token_ids,
                temperature=arguments.get("temperature", 0.0),
            )
            return sequences, None
        kwargs = dict(arguments)
        if method.name == "ours":
            kwargs.update(
                block_size=method.block_size, tree_size=method.tree_size, proposal=method.proposal or "argmax"
            )
            output = speculative_generate(self.target, self.draft, **kwargs)
            return output.sequences, output.statistics
        if method.name == "native":
            kwargs.update(assistant_model=self.draft, speculation_type="dflash")
        generate: Any = self.target.generate  # a mixin's method, which type checkers do not see
        return generate(**kwargs), None

    @torch.no_grad()
    def top_two_gap(self, prompt: int, answer: list[int]) -> float:
        """
        How sure the target is of the token after the beginning of an answer.

        Args:
            prompt (`int`): index of the prompt.
            answer (`list[int]`): the answer's tokens until there.

        Returns:
            `float`: difference of the two largest logits, in the target's precision.
        """
        row = self.rows[prompt]
        logits = self.target(input_ids=torch.cat([row, row.new_tensor(answer)])[None]).logits[0, -1]
        best, second = logits.float().topk(2).values.tolist()
        return best - second
