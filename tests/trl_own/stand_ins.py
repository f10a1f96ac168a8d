"""Models and data that stand in for those of `trl-internal-testing`: tiny, random, built here, and saved under the same names."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from datasets import DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils as templates

from agents import ImagesOnly


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
# Other ids in completions of TRL's tests, and what they are in those vocabularies. The first 256 are the bytes here too.
WORDS = {
    293: " b",
    314: " {",
    330: ' "',
    397: ">\n",
    411: "out",
    450: "dec",
    497: '",',
    510: "</",
    522: "</",
    606: "name",
    788: '":',
    866: " any",
    894: " any",
    914: "'t",
    927: "sh",
    944: "'t",
    1318: "text",
    1366: " know",
    1414: " know",
    1459: " don",
    1513: " don",
    1628: "function",
    2765: " won",
    4913: '{"',
    5212: ' {"',
    5224: " tool",
    5392: " tool",
    6023: "hi",
    6659: "call",
    7692: "async",
    9520: "step",
    11248: "}}\n",
    13477: "rement",
    13744: "=s",
    14172: "tool",
    16252: " increment",
    16370: "arguments",
    16936: "Done",
    17453: "Done",
    22076: "_tool",
    22785: "_tool",
    30091: "creenshot",
    35744: "increment",
    64648: "multiply",
    93054: "_multiply",
    95642: '"}}\n',
}
OWN = list(dict.fromkeys(WORDS.values()))
LIST = re.compile(r"\[\d+(?:, \d+)+\]")


def own_id(number: int) -> int:
    """The id here of a token of Qwen's."""
    if number in WORDS:
        return 256 + OWN.index(WORDS[number])
    added = next((number - first for first in FIRST_ADDED if 0 <= number - first < len(ADDED)), None)
    return number if added is None else SIZE + added


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
    texts = [*OWN, *(f" {number}{'x' * (number % 11)}" for number in range(256 + len(OWN), SIZE))]
    tokens = [letter[byte] for byte in printable + other] + [
        "".join(letter[byte] for byte in text.encode()) for text in texts
    ]
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

Builder = Callable[[], tuple[Any, Any]]
WIDTHS = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
WIDER = WIDTHS | {"hidden_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _ids(encoder: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(encoder),
        "bos_token_id": encoder.pad_token_id,
        "eos_token_id": encoder.eos_token_id,
        "pad_token_id": encoder.pad_token_id,
    }


def text(family: str, head: str = "ForCausalLM", template: str = "qwen2_5", **settings: Any) -> Builder:
    """A model that reads text, by the name of its family in transformers."""

    def build() -> tuple[Any, Any]:
        encoder = tokenizer(template)
        config = getattr(transformers, f"{family}Config")(**WIDTHS | _ids(encoder) | settings)
        return getattr(transformers, f"{family}{head}")(config), encoder

    return build


def qwen_vision(family: str, template: str, text_settings: dict, **vision: Any) -> Builder:
    """A model of Qwen that sees images. Its processor knows no videos, which need torchvision."""

    def build() -> tuple[Any, Any]:
        encoder = tokenizer(template)
        number = encoder.convert_tokens_to_ids
        config = getattr(transformers, f"{family}Config")(
            text_config=WIDER | _ids(encoder) | text_settings,
            vision_config={"depth": 2, "num_heads": 4, "hidden_size": 16, "intermediate_size": 32} | vision,
            image_token_id=number("<|image_pad|>"),
            video_token_id=number("<|video_pad|>"),
            vision_start_token_id=number("<|vision_start|>"),
            vision_end_token_id=number("<|vision_end|>"),
            **{name: value for name, value in _ids(encoder).items() if name != "vocab_size"},
        )
        patch_size = config.vision_config.patch_size
        side = patch_size * 2
        pixels = transformers.Qwen2VLImageProcessor(
            patch_size=patch_size, merge_size=2, min_pixels=side**2, max_pixels=4 * side**2
        )
        processor = ImagesOnly(pixels, encoder, chat_template=encoder.chat_template)
        return getattr(transformers, f"{family}ForConditionalGeneration")(config), processor

    return build


def llava_next() -> tuple[Any, Any]:
    """A model with images in tiles."""
    encoder = tokenizer("llava_next", image_token="<image>")
    pixels = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_grid_pinpoints=[[8, 16], [16, 8]]
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=pixels,
        tokenizer=encoder,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=encoder.chat_template,
    )
    vision = {name: value for name, value in WIDER.items() if name != "num_key_value_heads"}
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **vision),
        text_config=transformers.MistralConfig(**WIDER | _ids(encoder)),
        image_token_index=encoder.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pixels.image_grid_pinpoints,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


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
MODELS: dict[str, Builder] = {
    "tiny-Qwen2ForCausalLM-2.5": text("Qwen2"),
    "tiny-Qwen2ForSequenceClassification-2.5": text("Qwen2", "ForSequenceClassification", num_labels=1),
    "tiny-Qwen3ForCausalLM": text("Qwen3", template="qwen3", head_dim=4),
    "tiny-Qwen3ForSequenceClassification": text(
        "Qwen3", "ForSequenceClassification", "qwen3", num_labels=1, head_dim=4
    ),
    "tiny-Qwen3MoeForCausalLM": text("Qwen3Moe", template="qwen3", head_dim=4, norm_topk_prob=True, **EXPERTS),
    "tiny-LlamaForSequenceClassification-3.2": text("Llama", "ForSequenceClassification", num_labels=1),
    "tiny-Cohere2ForCausalLM": text("Cohere2", logit_scale=1.0),
    "tiny-Gemma2ForCausalLM": text("Gemma2", head_dim=4),
    "tiny-Glm4MoeForCausalLM": text(
        "Glm4Moe", moe_intermediate_size=32, head_dim=2, n_routed_experts=4, num_experts_per_tok=2, attention_bias=True
    ),
    "tiny-GptOssForCausalLM": text("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=4),
    "tiny-NemotronHForCausalLM-nano": text(
        "NemotronH",
        hidden_size=16,
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=4,
        mamba_n_groups=1,
        ssm_state_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "tiny-Qwen2VLForConditionalGeneration": qwen_vision(
        "Qwen2VL", "qwen2_5_vl", ROPE, embed_dim=16, hidden_size=16, patch_size=4, mlp_ratio=2
    ),
    "tiny-Qwen2_5_VLForConditionalGeneration": qwen_vision(
        "Qwen2_5_VL", "qwen2_5_vl", ROPE, patch_size=4, out_hidden_size=16, fullatt_block_indexes=[1]
    ),
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": qwen_vision(
        "Qwen3_5", "qwen3_5_nothink", LINEAR, patch_size=4, out_hidden_size=16
    ),
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": qwen_vision(
        "Qwen3_5Moe",
        "qwen3_6",
        LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
        patch_size=4,
        out_hidden_size=16,
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
