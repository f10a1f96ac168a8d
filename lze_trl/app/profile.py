"""Profiles in the app: how many prompts have each pass rate, and the completions of each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
import pyarrow.parquet as pq

from ..profile.folder import DATA, GROUPS, MANIFEST, PREFIX, read_groups, read_manifest
from ..record.numbers import percent
from ..record.schema import DIRECTORY, META_FILE
from ..record.tables import plain_text
from . import charts, views


def sort_out(sources: list[str]) -> tuple[list[Path], list[str]]:
    """Find the profiles in some folders. Returns their folders, and the sources that hold something else as well."""
    below = {source: [file.parent for file in sorted(Path(source).rglob(MANIFEST))] for source in sources}
    found = {source: [folder for folder in below[source] if read_manifest(folder)] for source in sources}
    others = [source for source in sources if not found[source] or any(Path(source).rglob(f"{DIRECTORY}/{META_FILE}"))]
    return [folder for folders in found.values() for folder in folders], others


def rows_of(folder: Path) -> pd.DataFrame:
    """Read the prompts of a profile, by their ids as text: what the data say of each, and the `place` of its completions; empty until it has ended."""
    if not (path := folder / "data" / DATA).is_file():
        return pd.DataFrame(columns=["prompt", "pass_rate", "place"])
    prefix = PREFIX if f"{PREFIX}pass_rate" in pq.read_schema(path).names else ""
    names = ("pass_rate", "mean_reward", "mean_length", "truncated_share", "num_completions", "cause")
    table = pq.read_table(path, columns=["prompt", *(f"{prefix}{name}" for name in names)])
    frame = pd.DataFrame({name: table[f"{prefix}{name}"].to_pandas() for name in names})
    texts = [plain_text(prompt) for prompt in table["prompt"].to_pylist()]
    groups = {group["row"]: group for group in read_groups(folder)}
    own = [groups.get(row, {"place": None, "prompt_id": f"row {row}"}) for row in range(len(frame))]
    frame = frame.assign(place=[group["place"] for group in own])
    frame.insert(0, "prompt", [views.short_text({"text": text}) for text in texts])
    return frame.set_index(pd.Index([str(group["prompt_id"]) for group in own], name="prompt id"))


def prompts(rows: pd.DataFrame, order: str) -> Any:
    """Tabulate the first prompts in an order of a [`~lze_trl.app.views.table`]."""
    column = order.removeprefix("-")
    forms: dict[str, Callable[[Any], str]] = dict.fromkeys(("pass_rate", "truncated_share"), percent)
    shown = rows.sort_values(column, ascending=column == order, kind="stable").drop(columns="place")
    return views.table("profile", shown.head(views.MOST_ROWS), order, forms=forms)


def completions(folder: Path, place: int) -> Any:
    """Tabulate the completions of a prompt, with their rewards."""
    with open(folder / GROUPS, "rb") as lines:
        lines.seek(place)
        group = json.loads(lines.readline())
    columns = {"completion": "completions", "reward": "rewards", "tokens": "completion_tokens"}
    return views.table("drawn", pd.DataFrame({name: group[own] for name, own in columns.items()}))


def show(folder: Path, html: Callable[..., Any], chart: Callable[..., Any], opened: bool = True):
    """Add a profile to the page that is being made, `opened` or to be opened by a click."""
    rows, name = rows_of(folder), folder.resolve().name

    def sort(event: gr.EventData) -> Any:
        return prompts(rows, event.sort)

    def open_prompt(event: gr.EventData) -> Any:
        place = rows["place"][event.row]
        return "The completions of this prompt are not there." if pd.isna(place) else completions(folder, int(place))

    with gr.Accordion(f"Profile {name}: {len(rows):,} prompts", open=opened):
        chart(value=f"[{charts.pass_rates(rows['pass_rate']).to_json()}]")
        table = html(f"profile-{name}", value=prompts(rows, "pass_rate"))
        detail = html("profile-completions", value="Choose a prompt to see its completions.")
    table.select(sort, None, table, api_visibility="private")
    table.click(open_prompt, None, detail, api_visibility="private")
