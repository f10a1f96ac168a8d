"""Models and data that stand in for those of `trl-internal-testing`: tiny, random, built here, and saved under the same names."""

import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from datasets import DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils as templates

import agents


TESTS = "tests/test_grpo_trainer.py"
ORGANIZATION = "trl-internal-testing"
DATASETS = {
    "zen": "scripts/generate_zen_dataset.py",
    "zen-image": "scripts/generate_zen_image_dataset.py",
    "zen-multi-image": "scripts/generate_zen_multi_image_dataset.py",
}

# ---- Tokens: bytes, a few words of Qwen, and numbers that a random model may write. Fewer than Qwen has, which is faster ----

SIZE = 4096
# What Qwen adds to its vocabulary, in the order of the ids
ADDED = re.findall(
    r"<\S+>",
    """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call>
    </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
    </tool_response> <think> </think>
    """,
)
SHOWN = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
FIRST_ADDED = (151_643, 248_044)  # by Qwen2.5 and Qwen3, and by Qwen3.5
# What else is in completions of TRL's tests, and its ids in those vocabularies. The first 256 are the bytes here too
WORDS = {
    " b": [293], " {": [314], ' "': [330], ">\n": [397], "out": [411], "dec": [450], '",': [497], "</": [510, 522],
    "name": [606], '":': [788], " any": [866, 894], "'t": [914, 944], "sh": [927], "text": [1318],
    " know": [1366, 1414], " don": [1459, 1513], "function": [1628], " won": [2765], '{"': [4913], ' {"': [5212],
    " tool": [5224, 5392], "hi": [6023], "call": [6659], "async": [7692], "step": [9520], "}}\n": [11248],
    "rement": [13477], "=s": [13744], "tool": [14172], " increment": [16252], "arguments": [16370],
    "Done": [16936, 17453], "_tool": [22076, 22785], "creenshot": [30091], "increment": [35744],
    "multiply": [64648], "_multiply": [93054], '"}}\n': [95642],
}  # fmt: skip
IDS = {number: 256 + place for place, numbers in enumerate(WORDS.values()) for number in numbers}
IDS |= {first + place: SIZE + place for first in FIRST_ADDED for place in range(len(ADDED))}
LIST = re.compile(r"\[\d+(?:, \d+)+\]")


def own_id(number: int) -> int:
    """The id here of a token of Qwen's."""
    return IDS.get(number, number)


def with_own_ids(source: str) -> str:
    """A test file whose lists of numbers are tokens of the stand-ins."""
    return LIST.sub(lambda numbers: re.sub(r"\d+", lambda n: str(own_id(int(n[0]))), numbers[0]), source)


def tokenizer(template: str = "qwen2_5", **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of Qwen's form, with further `special` tokens. What it reads, it reads byte by byte."""
    # GPT-2's alphabet: the printable bytes in order, then the other ones
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(other)}
    # Of many lengths, which some rewards go by
    texts = [*WORDS, *(f" {number}{'x' * (number % 11)}" for number in range(256 + len(WORDS), SIZE))]
    tokens = [*letter.values(), *("".join(letter[byte] for byte in text.encode()) for text in texts)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=token not in SHOWN) for token in ADDED])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=special
    )
    made.chat_template = getattr(templates, f"{template}_chat_template")
    return made


# ---- Models ----

WIDTHS = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDTHS |= {"num_hidden_layers": 2, "intermediate_size": 32}
WIDER = WIDTHS | {"hidden_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _ids(encoder: PreTrainedTokenizerFast) -> dict[str, Any]:
    pad = encoder.pad_token_id
    return {"vocab_size": len(encoder), "bos_token_id": pad, "eos_token_id": encoder.eos_token_id, "pad_token_id": pad}


def text(family: str, head: str = "ForCausalLM", template: str = "qwen2_5", **settings: Any) -> tuple[Any, Any]:
    """A model that reads text, by the name of its family in transformers."""
    encoder = tokenizer(template)
    config = getattr(transformers, f"{family}Config")(**WIDTHS | _ids(encoder) | settings)
    return getattr(transformers, f"{family}{head}")(config), encoder


def qwen_vision(family: str, template: str, text_settings: dict, **vision: Any) -> tuple[Any, Any]:
    """A model of Qwen that sees images."""
    encoder = tokenizer(template)
    sizes = {"depth": 2, "num_heads": 4, "hidden_size": 16, "intermediate_size": 32}
    return agents.qwen_of(family, encoder, WIDER | _ids(encoder) | text_settings, **sizes | vision)


def llava_next() -> tuple[Any, Any]:
    """A model with images in tiles."""
    encoder = tokenizer("llava_next", image_token="<image>")
    text = transformers.MistralConfig(**WIDER | _ids(encoder))
    tiles = {"image_grid_pinpoints": [[8, 16], [16, 8]]}
    return agents.llava_of("LlavaNext", transformers.LlavaNextImageProcessor, encoder, text, **tiles)


def gemma3() -> tuple[Any, Any]:
    """A model with token types, and a fixed number of tokens an image."""
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    encoder = tokenizer("gemma3", **special)
    encoder.bos_token = encoder.pad_token
    pixels = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(pixels, encoder, chat_template=encoder.chat_template, image_seq_length=16)
    vision = {name: value for name, value in WIDER.items() if name != "num_key_value_heads"}
    ids = {name: encoder.convert_tokens_to_ids(token) for name, token in special.items()}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**WIDER | _ids(encoder) | {"head_dim": 4}),
        vision_config=transformers.SiglipVisionConfig(image_size=16, patch_size=4, vision_use_head=False, **vision),
        mm_tokens_per_image=16,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 10000.0}}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2}
CLASSIFIER = {"head": "ForSequenceClassification", "num_labels": 1}
QWEN3 = {"template": "qwen3", "head_dim": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"hidden_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16}
MAMBA |= {"layers_block_type": ["mamba", "attention", "moe"], "moe_shared_expert_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
SEEN = {"patch_size": 4, "out_hidden_size": 16}
MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": partial(text, "Qwen2"),
    "tiny-Qwen2ForSequenceClassification-2.5": partial(text, "Qwen2", **CLASSIFIER),
    "tiny-Qwen3ForCausalLM": partial(text, "Qwen3", **QWEN3),
    "tiny-Qwen3ForSequenceClassification": partial(text, "Qwen3", **CLASSIFIER, **QWEN3),
    "tiny-Qwen3MoeForCausalLM": partial(text, "Qwen3Moe", norm_topk_prob=True, **QWEN3, **EXPERTS),
    "tiny-LlamaForSequenceClassification-3.2": partial(text, "Llama", **CLASSIFIER),
    "tiny-Cohere2ForCausalLM": partial(text, "Cohere2", logit_scale=1.0),
    "tiny-Gemma2ForCausalLM": partial(text, "Gemma2", head_dim=4),
    "tiny-Glm4MoeForCausalLM": partial(text, "Glm4Moe", head_dim=2, attention_bias=True, **ROUTED),
    "tiny-GptOssForCausalLM": partial(text, "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=4),
    "tiny-NemotronHForCausalLM-nano": partial(text, "NemotronH", **MAMBA, **ROUTED),
    "tiny-Qwen2VLForConditionalGeneration": partial(
        qwen_vision, "Qwen2VL", "qwen2_5_vl", ROPE, embed_dim=16, hidden_size=16, patch_size=4, mlp_ratio=2
    ),
    "tiny-Qwen2_5_VLForConditionalGeneration": partial(
        qwen_vision, "Qwen2_5_VL", "qwen2_5_vl", ROPE, fullatt_block_indexes=[1], **SEEN
    ),
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": partial(qwen_vision, "Qwen3_5", "qwen3_5_nothink", LINEAR, **SEEN),
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": partial(
        qwen_vision, "Qwen3_5Moe", "qwen3_6", LINEAR | SHARED, **SEEN
    ),
    "tiny-LlavaNextForConditionalGeneration": llava_next,
    "tiny-Gemma3ForConditionalGeneration": gemma3,
}
# Of these configurations, tests load a processor without videos
IMAGES_ONLY = ("Qwen2VLConfig", "Qwen2_5_VLConfig", "Qwen3_5Config", "Qwen3_5MoeConfig")


def save_model(name: str, folder: Path) -> None:
    """Build one of `MODELS`, and save it."""
    transformers.set_seed(0)
    model, processing = MODELS[name]()
    for module in model.modules():  # as TRL does: larger than by default, so that gradients do not vanish
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    model.save_pretrained(folder)
    processing.save_pretrained(folder)


def save_datasets(script: Path, folder: Path, rows: int | None) -> None:
    """Let a script of TRL's checkout make a data set, and keep the prompts that it would upload, the first `rows` of each split."""
    configs = []

    def keep(data: DatasetDict, repo_id: str, config_name: str):
        if not config_name.endswith("prompt_only"):
            return
        configs.append(f"- config_name: {config_name}\n  data_files:")
        for split, table in data.items():
            file = f"{config_name}/{split}.parquet"
            table.select(range(min(len(table), rows or len(table)))).to_parquet(folder / file)
            configs.append(f"  - {{split: {split}, path: {file}}}")

    transformers.set_seed(0)
    with patch.object(DatasetDict, "push_to_hub", keep):
        runpy.run_path(str(script))["main"](0.1, True, folder.name)
    (folder / "README.md").write_text("\n".join(["---", "configs:", *configs, "---", ""]))


def prepare(source: Path, folder: Path, rows: int | None = None) -> None:
    """Put TRL's tests into a folder, with what stands in for the models and data that they name."""
    if not (source / TESTS).is_file():
        raise SystemExit(
            f"{source} is no checkout of TRL: it has no {TESTS}. Make one by `git clone https://github.com/huggingface/trl`."
        )
    # Tests alone: the package beside them would hide the installed one
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    for file in (source / "tests").glob("*.py"):
        text, copy = with_own_ids(file.read_text()), folder / "tests" / file.name
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    text = (source / TESTS).read_text()
    named = set(re.findall(rf"{ORGANIZATION}/([\w.-]+)", text))
    for name in sorted(named & DATASETS.keys()):
        kept = folder / ORGANIZATION / name / "rows"
        if not kept.exists() or kept.read_text() != str(rows):
            save_datasets(source / DATASETS[name], kept.parent, rows)
            kept.write_text(str(rows))
    for name in sorted(named & MODELS.keys()):
        built = folder / ORGANIZATION / name / "tokenizer.json"  # which is saved last
        if not built.exists() or built.stat().st_mtime < Path(__file__).stat().st_mtime:
            save_model(name, built.parent)
