"""Benchmark of decoding: plain generation, the loop of this package, that of transformers and that of `dflash`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat_template import chat_inputs
from ..decoding.statistics import DecodingStatistics
from ..evaluation.near_ties import logit_gap
from ..evaluation.timed_generation import GenerationProtocol, run_loop
from ..model.modeling_dflash import DFlashDraftModel
from ..target.token_ids import check_prompt_ids
from .decoding_results import DecodingRun
from .decoding_settings import BenchmarkSettings, Method
from .phases import PhaseRecorder
from .reference_decoder import ReferenceDecoder

WARM_UP_TOKENS = 16


class DecodingBenchmark:
    """
    Decode the same prompts with every method.

    For each temperature and batch size every method is warmed up once. Then all methods decode one batch after the
    other, and the order of the methods rotates by one with every batch, so that a change of the machine's speed
    affects all of them. All methods generate from the same distribution, since the target's generation config is
    replaced by one that keeps only its special tokens and stop strings.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair, with
            the same dtype.
        prompts (`Sequence[str]`): user messages.
        settings ([`BenchmarkSettings`]): settings of the benchmark.

    Attributes:
        left_out (`dict[str, str]`): methods that cannot decode this target, and the reason.

    Raises:
        ValueError: the settings do not fit the prompts or the draft, or a prompt has a token without a row in the
            target's embedding.
        ImportError: the settings ask for the package `dflash`, which is not installed.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DFlashDraftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        settings: BenchmarkSettings,
    ) -> None:
        settings.check(len(prompts), draft.config.tokens_per_block)
        self.target, self.draft, self.settings = target, draft, settings
        self.reference = ReferenceDecoder(draft) if settings.against_reference else None
        self.protocol = GenerationProtocol(target, tokenizer)
        self.prompts = [
            chat_inputs(tokenizer, prompt, target.device, draft.config.chat_template_kwargs)["input_ids"][0]
            for prompt in prompts
        ]
        for ids in self.prompts:
            check_prompt_ids(target, ids, tokenizer)
        self.left_out: dict[str, str] = {}
        if self.protocol.stop_strings:
            reason = "it does not look for the target's stop strings at every token"
            self.left_out = {"native": reason} | ({"reference": reason} if self.reference is not None else {})

    @property
    def num_runs(self) -> int:
        """`int`: number of calls that are measured."""
        return sum(
            self.settings.repeats * len(self.prompts) // batch_size * len(self._methods(temperature, batch_size))
            for temperature in self.settings.temperatures
            for batch_size in self.settings.batch_sizes
        )

    def _methods(self, temperature: float, batch_size: int) -> list[Method]:
        """Return the methods that can decode such a batch of this target."""
        methods = self.settings.methods(temperature, batch_size)
        return [method for method in methods if method.name not in self.left_out]

    def run(self, on_start: Callable[[str], None] | None = None) -> Iterator[DecodingRun]:
        """
        Measure all methods.

        Args:
            on_start (`Callable`, *optional*): called before each call with a short description of it.

        Yields:
            [`DecodingRun`], one for each call.
        """
        report = on_start or (lambda description: None)
        with self.protocol.override_generation_config():
            for temperature in self.settings.temperatures:
                for batch_size in self.settings.batch_sizes:
                    place = f"T = {temperature:g}, batch {batch_size}: "
                    for method in self._methods(temperature, batch_size):
                        report(f"{place}{method.label}, warm-up")
                        self._warm_up(temperature, batch_size, method)
                    methods, num_rounds = self._methods(temperature, batch_size), 0
                    for repeat in range(self.settings.repeats):
                        for first in range(0, len(self.prompts), batch_size):
                            prompts = list(range(first, first + batch_size))
                            turn = num_rounds % len(methods)
                            num_rounds += 1
                            for method in methods[turn:] + methods[:turn]:
                                report(place + method.label)
                                torch.manual_seed(self.settings.seed + num_rounds)
                                yield self._decode(temperature, prompts, method, repeat, self.settings.max_new_tokens)

    def _warm_up(self, temperature: float, batch_size: int, method: Method) -> None:
        """Decode a batch without measuring it, and leave out the loop of transformers if it refuses the target."""
        num_tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        try:
            self._decode(temperature, list(range(batch_size)), method, 0, num_tokens)
        except ValueError as error:
            if method.name != "native":
                raise
            self.left_out["native"] = str(error)

    def _decode(
        self, temperature: float, prompts: list[int], method: Method, repeat: int, max_new_tokens: int
    ) -> DecodingRun:
        """Decode a batch once with one method, and record its phases."""
        arguments = self.protocol.arguments([self.prompts[prompt] for prompt in prompts], temperature, max_new_tokens)
        draft: nn.Module | None = None if method.name == "plain" else self.draft
        context_name = "context_hidden_states"
        if method.name == "reference" and self.reference is not None:
            draft, context_name = self.reference.model, "target_hidden"
        with PhaseRecorder(self.target, draft, context_name) as recorder:
            sequences, statistics = self._run_loop(method, arguments)
        token_ids = self.protocol.responses(sequences, arguments["input_ids"].shape[1])
        run = DecodingRun(
            temperature=temperature,
            batch_size=len(prompts),
            method=method,
            repeat=repeat,
            prompts=prompts,
            token_ids=token_ids,
            phase_s=recorder.phase_s,
            num_passes=recorder.num_target_passes - 1,
            committed=[],
        )
        if statistics is None:
            run.committed = recorder.committed(len(token_ids[0]))
        else:
            run.committed = [count for sequence in statistics.committed for count in sequence]
            run.expected_sum = statistics.expected_sum
        return run

    def _run_loop(self, method: Method, arguments: dict[str, Any]) -> tuple[torch.Tensor, DecodingStatistics | None]:
        """Return sequences of shape `[batch, length]`, and the statistics of the loop of this package."""
        if method.name == "reference" and self.reference is not None:
            sequences = self.reference.generate(
                self.target,
                arguments["input_ids"],
                max_new_tokens=arguments["max_new_tokens"],
                end_token_ids=self.protocol.end_token_ids,
                temperature=arguments.get("temperature", 0.0),
            )
            return sequences, None
        if method.name == "native":
            return run_loop(self.target, self.draft, arguments, "transformers")
        draft = None if method.name == "plain" else self.draft
        return run_loop(
            self.target,
            draft,
            arguments,
            block_size=method.block_size,
            tree_size=method.tree_size,
            proposal=method.proposal or "argmax",
        )

    def logit_gap(self, prompt: int, one: list[int], other: list[int]) -> float:
        """
        Compare the target's logits where two greedy responses differ first.

        Args:
            prompt (`int`): index of the prompt.
            one (`list[int]`), other (`list[int]`): token ids of the two responses.

        Returns:
            `float`: see [`~dflash_hf.evaluation.near_ties.logit_gap`].
        """
        return logit_gap(self.target, self.prompts[prompt], one, other)
