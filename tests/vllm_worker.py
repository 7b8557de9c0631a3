"""
Run vLLM greedily with or without a draft, for the tests of other software. It reads and writes JSON files.

The interpreter of an environment with vLLM runs this file, which imports nothing of this package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def counters(llm: Any) -> dict[str, Any]:
    """Return the number of passes with a draft and of accepted draft tokens, in total and for each slot."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in ("num_drafts", "num_accepted_tokens"):
            found[name] = found.get(name, 0) + metric.value
        elif name == "num_accepted_tokens_per_pos":
            found[name] = list(metric.values)
    return found


def num_slots(folder: str) -> int:
    """Return the number of slots that a draft fills in a block, which are all but the anchor."""
    return json.loads((Path(folder) / "config.json").read_text())["block_size"] - 1


def use_each_layers_k_norm(worker: Any) -> None:
    """
    Normalise the context keys of every draft layer with the weight of that layer.

    The CPU kernel of vLLM 0.32 uses the weight of the first layer for all of them. Its CUDA kernel does it right.
    """
    import torch

    draft = worker.model_runner.drafter.model.model

    def normalize(keys: torch.Tensor) -> torch.Tensor:
        weight = draft._k_norm_weights[:, None, None].float()
        return (
            torch.nn.functional.rms_norm(keys.float(), keys.shape[-1:], eps=draft._rms_norm_eps).mul(weight).to(keys)
        )

    draft._normalize_context_k = normalize


def main(request_file: str, result_file: str) -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text())
    settings: dict[str, Any] = {}
    if request["draft"] is not None:
        settings["speculative_config"] = {
            "method": "dflash",
            "model": request["draft"],
            "num_speculative_tokens": num_slots(request["draft"]),
        }
        settings["per_request_spec_decode_metrics"] = "detailed"
    llm = LLM(
        model=request["target"],
        dtype=request["dtype"],
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **settings,
    )
    if request.get("use_each_layers_k_norm"):
        llm.collective_rpc(use_each_layers_k_norm)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    result = {
        "token_ids": [list(answer.token_ids) for answer in answers],
        "margins": [  # between the two best tokens, in nats
            [max(pair) - min(pair) for pair in ([entry.logprob for entry in step.values()][:2] for step in steps)]
            for steps in (answer.logprobs for answer in answers)
        ],
        "accepted": [  # drafted tokens that each pass accepted
            answer.spec_decode_metrics.per_step_accepted if answer.spec_decode_metrics else [] for answer in answers
        ],
        "seconds": [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs],
        **counters(llm),
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
