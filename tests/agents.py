"""Tools, environments and images for the tiny model: what it writes is scripted, so that it calls tools at all."""

import copy
import hashlib
import random
import string
from collections import Counter
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from PIL import Image

import tiny
from benchmarks.environment import RESPONSE


TEMPLATE = """\
{%- for m in messages -%}
{{ m['role'][0] }}:
{%- if m['content'] is string -%}{{ m['content'] }}
{%- else -%}{%- for part in m['content'] -%}
{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
{%- if m['role'] == 'assistant' -%}<eos>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}a:{%- endif -%}"""


def tokenizer(further: tuple[str, ...] = (), image: str = "IMAGE") -> transformers.PreTrainedTokenizerFast:
    """One token a character, and the further ones, of which some show an image."""
    fast = tiny.tokenizer(string.digits + string.ascii_letters + string.punctuation + " \n")
    fast.add_special_tokens({"additional_special_tokens": list(further)})
    fast.chat_template, fast.response_template = TEMPLATE.replace("IMAGE", image), RESPONSE
    return fast


def text_config(size: int, **further: Any) -> dict[str, Any]:
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    widths = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"vocab_size": size, "num_key_value_heads": 1, "max_position_embeddings": 1024, **widths, **ids, **further}


def save(directory) -> str:
    """Save the model of `words`, and return where."""
    for part in words():
        part.save_pretrained(directory)
    return str(directory)


def words() -> tuple[Any, Any]:
    """A model that reads text, and its tokenizer."""
    encoder = tokenizer()
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text_config(len(encoder)))), encoder


def llava_of(family: str, pixels: type, encoder, text, **tiles) -> tuple[Any, Any]:
    """A model of the family of Llava, and its processor."""
    shown = pixels(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, **tiles)
    own = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    make = getattr(transformers, f"{family}Processor")
    processor = make(image_processor=shown, tokenizer=encoder, chat_template=encoder.chat_template, **own)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(
        vision_config=transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **vision),
        text_config=text,
        image_token_index=encoder.convert_tokens_to_ids("<image>"),
        **tiles,
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config), processor


def llava() -> tuple[Any, Any]:
    """A model with `pixel_values` by image, and its processor."""
    encoder = tokenizer(("<image>",), "<image>")
    text = transformers.Qwen2Config(**text_config(len(encoder)))
    torch.manual_seed(0)
    return llava_of("Llava", transformers.CLIPImageProcessor, encoder, text)


class ImagesOnly(transformers.Qwen2VLProcessor):
    """Qwen2-VL's processor without videos, which need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def qwen_of(family: str, encoder, text: dict[str, Any], **vision: Any) -> tuple[Any, Any]:
    """A model of Qwen that sees images. Its processor knows no videos, which need torchvision."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": encoder.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    ids |= {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **ids)
    side = 2 * config.vision_config.patch_size
    sizes = {"patch_size": side // 2, "merge_size": 2, "min_pixels": side**2, "max_pixels": 4 * side**2}
    processor = ImagesOnly(transformers.Qwen2VLImageProcessor(**sizes), encoder, chat_template=encoder.chat_template)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config), processor


def qwen() -> tuple[Any, Any]:
    """A model with `image_grid_thw`, and its processor."""
    special = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    encoder = tokenizer(special, "<|vision_start|><|image_pad|><|vision_end|>")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    torch.manual_seed(0)
    return qwen_of("Qwen2VL", encoder, text_config(len(encoder), rope_parameters=rope), **vision)


def picture(number: int) -> Image.Image:
    """A picture of one of three sizes."""
    height, width = [(8, 8), (8, 16), (16, 8)][number % 3]
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8))


def rows(count: int = 9, images: int = 0, environments: bool = False, texts: int = 3) -> Dataset:
    """Prompts of some texts, the first none beside its pictures; and what tells them apart: where to start, and pictures."""
    columns: dict[str, list] = {
        "prompt": [[{"role": "user", "content": f"q{i % texts}" if i or not images else ""}] for i in range(count)],
        "start": list(range(count)),
        "seen": [[i] for i in range(count)],
    }
    if images == 1:
        columns["image"] = [picture(i) for i in range(count)]
    elif images:
        columns["images"] = [[picture(i + k) for k in range(images)] for i in range(count)]
    if environments:
        columns["environment"] = ["odd" if i % 2 else "even" for i in range(count)]
    return Dataset.from_dict(columns)


def shown_as_arrays(batch: dict[str, list]) -> dict[str, list]:
    """A transform that gives pictures as arrays."""
    return batch | {"image": [np.asarray(image) for image in batch["image"]]}


def scripted(cls: type, names: tuple[str, ...], argument: str = "a") -> type:
    """
    A trainer whose model calls one of some tools in three of five turns, at most three times, and else answers with a number.
    What it writes depends on what it reads, how often that is in the batch, and the step.
    """

    class Scripted(cls):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            encoder = getattr(self.processing_class, "tokenizer", self.processing_class)
            seen, completions = Counter(), []
            for ids in prompt_ids:
                place, seen[tuple(ids)] = seen[tuple(ids)], seen[tuple(ids)] + 1
                key = f"{list(ids)}|{place}|{self.state.global_step}"
                rng = random.Random(hashlib.sha256(key.encode()).hexdigest())
                text = str(rng.randrange(100))
                if names and rng.random() < 0.6 and encoder.decode(ids).count("t:") < 3:
                    call = f'{{"name": "{rng.choice(names)}", "arguments": {{"{argument}": {rng.randrange(9)}}}}}'
                    text = f"<tool_call>{call}</tool_call>"
                completions.append([*encoder(text)["input_ids"], 1])
            return completions, None

    return Scripted


def odd_answer_reward(completions, **kwargs):
    """Passes odd numbers."""
    return [float(c[-1]["content"][-1:] in tuple("13579")) for c in completions]


def odd_total_reward(environments, **kwargs):
    """Passes environments that end at an odd number."""
    return [float(environment.total % 2) for environment in environments]


def add(a: int) -> str:
    """
    Add one.

    Args:
        a: A number.
    """
    return str(a + 1)


async def add_later(a: int) -> str:
    return add(a)


add_later.__doc__ = add.__doc__


def show(a: int) -> list:
    """
    Show a picture.

    Args:
        a: Its number.
    """
    return [{"type": "image", "image": picture(a)}, {"type": "text", "text": str(a)}]


class Counting:
    """Starts at the number of its row, keeps a list of the row to itself, and ends above 15."""

    __slots__ = ("seen", "total")
    resets = 0

    def reset(self, **row):
        type(self).resets += 1
        self.total, self.seen = row["start"], row["seen"]
        return f" from {self.total}"

    def plus(self, a: int) -> str:
        """
        Add a number.

        Args:
            a: The number.
        """
        self.total += a
        self.seen.append(a)
        if self.total > 15:
            raise FileNotFoundError("too much")
        return str(self.total) if len(self.seen) < 5 else "another episode was here"


class Scored(Counting):
    """Gives its own reward."""

    def get_reward(self) -> float:
        return float(self.total % 2)


class Falling(Counting):
    """Counts downwards too."""

    def minus(self, a: int) -> str:
        """
        Subtract a number.

        Args:
            a: The number.
        """
        copy.deepcopy(self).plus(a)
        self.total -= a
        return str(self.total)

    @staticmethod
    def double(a: int) -> str:
        """
        Double a number.

        Args:
            a: The number.
        """
        return str(2 * a)


class Owner(Scored):
    """Makes its own prompts: four episodes of each."""

    def reset(self, **row):
        type(self).resets += 1
        self.total, self.seen = (self.resets - 1) // 4, []
        return f" from {self.total}"
