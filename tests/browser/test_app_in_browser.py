"""The app as its users see it: in Chromium, while a run is being recorded."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import lze_trl
import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl.app.page import REFRESH_SECONDS, VIEWS
from lze_trl.record import TelemetryWriter, open_run
from lze_trl.record.ledger import PLAIN, against_plain
from lze_trl.record.schema import SCHEMA_VERSION
from lze_trl.record.status import STATUS_FILE
from lze_trl.record.writer import list_parts

from .conftest import serve, started


NASTY = '<script>alert("x")</script> <img src=x onerror=alert(1)> **bold** ${alert(2)} {{value}} `a`'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, ratio, seed in (("lze-a", 0.4, 0), ("lze-b", 0.4, 1), ("full", 1.0, 0)):
        training = SyntheticTraining(num_prompts=120, groups_per_batch=24, selection_ratio=ratio, seed=seed)
        record_synthetic_run(folder / name, training, generations=60)
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with serve(runs / "lze-a", runs / "lze-b", runs / "full") as address:
        yield address


def open_page(page, address, **parameters):
    page.goto(f"{address}?{urllib.parse.urlencode(parameters)}")
    page.wait_for_selector("#lze-main .lze-figure, #lze-main .lze-table, #lze-main .lze-problem", timeout=30_000)


def rows(page):
    return page.locator(".lze-prompts tbody tr:not(.lze-inline)").count()


def search(page, text):
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


def wait_for(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("The page did not change in time.")
        time.sleep(0.05)


def choose(page, radio, parameter):
    """Choose a filter, and wait until the address has it."""
    page.get_by_role("radio", name=radio, exact=True).check()
    wait_for(lambda: parameter in address_bar(page), seconds=60)


def address_bar(page):
    """Unlike `page.url`, which stays the same while nothing else is asked of the browser."""
    return page.evaluate("location.search")


def test_overview_agrees_with_the_files(page, address, runs):
    open_page(page, address)
    summary = open_run(runs / "lze-a").summary()
    tile = page.locator('[data-tile="groups trained on"]')
    assert f"{100 * summary['selected'] / summary['groups']:.1f} %" in tile.inner_text()
    assert f"of {summary['groups']:,}" in tile.inner_text()
    frontier = page.locator('[data-tile="prompts seen"]').inner_text()
    assert f"{summary['prompts']['frontier']} on the frontier" in frontier
    rollouts, _, updates, total = (work.times for work in against_plain(summary["ledger"]))
    tile = page.locator('[data-tile="FLOPs of plain GRPO"]')
    assert total in tile.inner_text()
    assert f"rollouts {rollouts}, updates {updates}" in tile.inner_text()
    for title in ("Pass rate", "Reward", "Energy of the groups", "Shares", f"Cost, against {PLAIN}"):
        assert page.get_by_text(title, exact=True).count() == 1


# Clocks of the browser and of the files are those of the same machine
WATCH_STEP = """() => {
    const steps = () => document.querySelector('[data-tile="step"] strong')?.innerText;
    window.shown = {};
    new MutationObserver(() => { window.shown[steps()] ??= Date.now() / 1000; })
        .observe(document.getElementById("lze-main"), { childList: true, subtree: true, characterData: true });
}"""


def test_page_follows_a_run_within_two_seconds(page, tmp_path):
    # What is waited for on purpose leaves room for the work
    flush_seconds = signature(TelemetryWriter).parameters["flush_seconds"].default
    assert flush_seconds + REFRESH_SECONDS < 2.0
    training = SyntheticTraining(num_prompts=60, groups_per_batch=16)
    writer = TelemetryWriter(tmp_path / "live", completions="all", settings=training.settings)
    records = training.generations(10_000)
    writer.record(next(records))
    writer.flush()
    requests = []
    page.on("request", lambda request: requests.append(request) if "/queue/join" in request.url else None)
    with serve(tmp_path / "live") as address:
        open_page(page, address)
        page.evaluate(WATCH_STEP)
        recorded = {}
        for _ in range(6):
            record = next(records)
            step = str(record.step + 1)
            recorded[step] = time.time()
            writer.record(record)
            wait_for(lambda step=step: page.evaluate(f"window.shown[{step}]"), seconds=60)
        shown = page.evaluate("window.shown")
        written = {str(row.step): row.time for row in parts_of_steps(tmp_path / "live")}
        writer.close()
        polls = sorted(request.timing["startTime"] / 1000 for request in requests)
    for step, begin in recorded.items():
        # A question that is asked after the file was written is answered with it; one more may be asked meanwhile
        asked = [time for time in polls if written[step] < time < shown[step]]
        assert len(asked) <= 2, (step, written[step], shown[step], polls)
        assert shown[step] > begin
    # A busy machine delays some, but not all of them
    assert min(shown[step] - begin for step, begin in recorded.items()) < 2.0, (recorded, written, shown)
    assert min(np.diff(polls)) < 1.5 * REFRESH_SECONDS


def parts_of_steps(directory):
    """Step and time of writing of every generation batch."""
    parts = list_parts(directory / "telemetry" / "generations")
    return [
        SimpleNamespace(step=step + 1, time=path.stat().st_mtime)
        for path in parts
        for step in pq.read_table(path, columns=["step"])["step"].to_pylist()
    ]


TRAINING = """
import sys
import time
from pathlib import Path
import tiny
from transformers import TrainerCallback
from lze_trl import LZEGRPOTrainer

class UntilTold(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.1)  # the recorder takes a small share of the time, and lags behind dozens of steps a second
        control.should_training_stop = Path(sys.argv[2]).exists()

LZEGRPOTrainer(
    model=tiny.model(),
    reward_funcs=tiny.even_length_reward,
    args=tiny.config(sys.argv[1], telemetry=True, telemetry_completions="all", max_steps=100_000, learning_rate=1e-5),
    train_dataset=tiny.prompts(12),
    processing_class=tiny.tokenizer(),
    callbacks=[UntilTold()],
).train()
"""


@contextmanager
def training(directory):
    """A real training that goes on for as long as it is looked at."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    stop = directory.with_name("stop")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory), str(stop)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        directory.mkdir(exist_ok=True)
        yield process
        assert process.poll() is None, "it was still training"
        stop.touch()
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
        process.wait()


TILES = """() => Object.fromEntries([...document.querySelectorAll("[data-tile]")].map(
    (tile) => [tile.dataset.tile, [tile.querySelector("strong").innerText, tile.querySelector("small").innerText]]))"""


def agrees_with_the_files(tiles, run):
    """Whether the numbers of the page are those of the run's first generation batches, as many as it had then."""
    shown = int(tiles["groups trained on"][1].removeprefix("of ").replace(",", ""))
    generations = run.generations()
    then = generations[generations.groups.cumsum() <= shown]
    assert then.groups.sum() == shown
    assert tiles["step"][0] == f"{then.step.max() + 1:,}"
    assert tiles["groups trained on"][0] == f"{100 * then.selected.sum() / shown:.1f} %"
    seen = run.sql(
        "SELECT count(DISTINCT prompt_id) AS seen FROM groups WHERE generation <= ?", [int(then.generation.max())]
    )
    assert tiles["prompts seen"][0] == str(seen.seen.item())


@pytest.mark.slow
def test_page_follows_a_real_training(page, tmp_path, runs):
    with training(tmp_path / "run") as process, serve(tmp_path / "run", runs / "full") as address:
        open_page(page, address)
        page.wait_for_selector('[data-tile="step"]', timeout=180_000)
        samples = []
        while len(samples) < 4:
            wait_for(lambda: page.evaluate(TILES) not in samples, seconds=60)
            samples.append(page.evaluate(TILES))
            assert process.poll() is None
            run = open_run(tmp_path / "run")
            agrees_with_the_files(samples[-1], run)
            run.close()
        prompts_of_a_live_run(page)
        comparison_with_a_live_run(page)


ROWS = """() => [...document.querySelectorAll(".lze-prompts tbody tr:not(.lze-inline)")].map(
    (row) => [...row.children].map((cell) => cell.innerText.trim()))"""


def prompts_of_a_live_run(page):
    """Filter, search, sort and open a prompt, while the table changes."""
    page.get_by_role("radio", name="Prompts").check()
    wait_for(lambda: len(page.evaluate(ROWS)) == 12, seconds=60)
    choose(page, "frontier", "state=frontier")
    wait_for(lambda: states_shown(page) == {"frontier"}, seconds=60)
    page.get_by_role("radio", name="all", exact=True).check()
    wait_for(lambda: "state=" not in address_bar(page) and len(page.evaluate(ROWS)) == 12, seconds=60)
    page.locator("#lze-sort input").click()
    page.get_by_role("option", name="pass rate, lowest first").click()
    wait_for(lambda: "sort=pass_rate" in address_bar(page) and len(page.evaluate(ROWS)) == 12, seconds=60)
    wait_for(lambda: in_order(page), seconds=60)
    search(page, "3+9=")
    wait_for(lambda: [row[0] for row in page.evaluate(ROWS)] == ["3+9="], seconds=60)
    page.locator("[data-prompt]").first.click()
    page.wait_for_selector("#lze-detail .lze-completion", timeout=60_000)
    assert page.locator("#lze-detail .lze-text").first.inner_text() == "3+9="
    assert page.locator("#lze-detail .lze-completion").count() == 4
    before = visits(page)
    wait_for(lambda: visits(page) > before, seconds=60)


def in_order(page):
    """Whether rows are sorted by pass rate. They keep their places while the rates change, until one asks for an update."""
    rates = pass_rates(page)
    if rates != sorted(rates):
        page.evaluate("() => document.querySelector('[data-update]:not([disabled])')?.click()")
    return rates == sorted(rates)


def states_shown(page):
    return {row[1].split()[-1] for row in page.evaluate(ROWS) if len(row) > 1}


def pass_rates(page):
    return [float(row[3].removesuffix(" %")) for row in page.evaluate(ROWS)]


def visits(page):
    facts = "[...document.querySelectorAll('.lze-facts div')]"
    return int(page.evaluate(f"{facts}.find((fact) => fact.children[0].innerText === 'visits').children[1].innerText"))


def comparison_with_a_live_run(page):
    """The run that is training beside one that has ended: the step of the one alone goes on."""
    page.get_by_role("radio", name="Compare").check()

    def steps():
        return dict(
            page.evaluate("""() => [...document.querySelectorAll("#lze-main .lze-table tbody tr")].filter(
            (row) => row.children.length > 4).map((row) => [row.children[0].innerText, Number(row.children[4].innerText.replace(",", ""))])""")
        )

    wait_for(lambda: set(steps()) == {"run", "full"}, seconds=60)
    legend = page.locator("#lze-main .lze-legend")
    assert legend.inner_text().split("\n") == ["run", "full"]
    before = steps()
    wait_for(lambda: steps()["run"] > before["run"], seconds=60)
    assert steps()["full"] == before["full"] == 60


@contextmanager
def live_run(directory, max_steps=0, **logged):
    """A run that records ten generation batches a second for as long as it is looked at."""
    stop = threading.Event()

    def train():
        training = SyntheticTraining(num_prompts=60, groups_per_batch=16)
        writer = TelemetryWriter(directory, completions="all", settings=training.settings)
        for record in training.generations(10_000):
            record.max_steps = max_steps
            writer.record(record)
            writer.record_step(record.step + 1, {name: value(record.step) for name, value in logged.items()})
            if stop.wait(0.1):
                break
        writer.close()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_for(lambda: (directory / "telemetry" / "generations").exists())
        with serve(directory) as address:
            yield address
    finally:
        stop.set()
        thread.join()


def test_refresh_moves_nothing(page, tmp_path):
    with live_run(tmp_path / "live") as address:
        open_page(page, address)
        page.wait_for_timeout(1500)
        page.evaluate("""() => {
            window.shift = 0;
            new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) window.shift += entry.value;
            }).observe({ type: "layout-shift" });
        }""")
        first = page.locator('[data-tile="step"] strong').inner_text()
        wait_for(lambda: page.locator('[data-tile="step"] strong').inner_text() != first)
        page.wait_for_timeout(3000)
        assert page.evaluate("window.shift") < 0.02


ORDER = """() => [...document.querySelectorAll(".lze-prompts tbody [data-prompt]")].map((row) => row.dataset.prompt)"""
VISITS = """() => [...document.querySelectorAll(".lze-prompts tbody tr:not(.lze-inline)")].map((row) => +row.lastElementChild.innerText)"""
PLACE = """(row) => row.getBoundingClientRect().toJSON()"""


def test_click_in_a_live_run_opens_the_row_under_the_pointer(page, tmp_path):
    with live_run(tmp_path / "live") as address:
        open_page(page, address, tab="Prompts")
        wait_for(lambda: rows(page) == 25)
        order = page.evaluate(ORDER)
        for number in (3, 17, 9, 21, 0, 12):
            row = page.locator(".lze-prompts tbody tr:not(.lze-inline)").nth(number)
            row.scroll_into_view_if_needed()
            place = row.evaluate(PLACE)
            page.mouse.move(place["x"] + 40, place["y"] + place["height"] / 2)
            visits_before = page.evaluate(VISITS)
            wait_for(lambda before=visits_before: page.evaluate(VISITS) != before)  # a refresh comes before the click
            assert row.evaluate(PLACE) == place
            page.mouse.down()
            page.wait_for_timeout(120)
            page.mouse.up()
            wait_for(
                lambda number=number: any(
                    order[number] in facts for facts in page.locator("#lze-detail .lze-facts").all_inner_texts()
                )
            )
            assert f"prompt={order[number]}" in address_bar(page)
            assert page.locator(".lze-prompts thead [data-prompt]").get_attribute("data-prompt") == order[number]
            assert row.evaluate(PLACE)["y"] == place["y"]
        assert page.evaluate(ORDER) == order
        the_reader_asks(page, order)
        pause(page)


def the_reader_asks(page, order):
    """The order of now comes when asked for, and the open prompt stays open and visible."""
    pill = page.locator("[data-update]")
    wait_for(lambda: int(pill.text_content().split()[0]) > 5)
    chosen = page.locator(".lze-prompts thead [data-prompt]").get_attribute("data-prompt")
    pill.click()
    wait_for(lambda: page.evaluate(ORDER) != order)
    now = page.evaluate(ORDER)
    page.get_by_role("button", name="Next →").click()
    wait_for(lambda: "page 2 of" in page.locator("#lze-main").inner_text())
    assert page.locator(".lze-prompts thead [data-prompt]").get_attribute("data-prompt") == chosen
    assert chosen in page.locator("#lze-detail .lze-facts").inner_text()
    assert page.evaluate(ORDER) != now


def pause(page):
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(2500)
    paused = page.evaluate(VISITS)
    page.wait_for_timeout(2500)
    assert page.evaluate(VISITS) == paused
    page.get_by_role("button", name="Resume").click()
    wait_for(lambda: page.evaluate(VISITS) != paused)


def test_training_tab_of_a_live_run_and_its_tooltips(page, tmp_path):
    logged = {
        "loss": lambda step: 1.0 / (1 + step),
        "entropy": lambda step: 0.5,
        "lze/updates_vs_plain": lambda step: 0.4,
    }
    with live_run(tmp_path / "live", **logged) as address:
        open_page(page, address)
        page.get_by_role("radio", name="Training").check()
        loss = page.get_by_role("group", name="Loss. Latest: loss")
        loss.wait_for()
        assert "tab=Training" in address_bar(page)
        titles = page.locator("#lze-main figcaption strong").all_inner_texts()
        assert titles[:4] == ["Held-out accuracy", "Reward", "Loss", "Gradient norm"]
        assert "Seconds of a generation batch" in titles
        plot = loss.locator("[data-lze]")
        plot.hover()
        tip = page.locator(".lze-tip")
        before, label = tip.inner_text(), loss.get_attribute("aria-label")
        assert re.fullmatch(r"\d+\nloss  [\d.e-]+", before)
        for _ in range(3):
            wait_for(lambda label=label: loss.get_attribute("aria-label") != label)
            label = loss.get_attribute("aria-label")
            assert tip.count() == 1
        # The middle of the axis is a later step by now
        wait_for(lambda: int(tip.inner_text().split()[0]) > int(before.split()[0]))
        page.mouse.move(2, 2)
        assert tip.count() == 0


def cells(page):
    """Cells of the rows of a table, by the first."""
    texts = page.evaluate("""() => [...document.querySelectorAll("#lze-main .lze-table tbody tr")].map(
        (row) => [...row.children].map((cell) => cell.innerText.trim()))""")
    return {first: others for first, *others in texts}


def test_runs_of_a_folder_and_their_status(page, runs, tmp_path):
    for name in ("lze-a", "sweep/full"):
        shutil.copytree(runs / Path(name).name, tmp_path / name)
    status = tmp_path / "sweep" / "full" / "telemetry" / STATUS_FILE
    status.write_text(json.dumps({"state": "running", "time": time.time() - 3600, "max_steps": 80}))
    with live_run(tmp_path / "live", max_steps=10_000), serve(tmp_path) as address:
        open_page(page, address, tab="Runs")
        page.wait_for_selector(".lze-runs")
        shown = cells(page)
        assert list(shown) == ["live", "lze-a", "sweep/full"] or list(shown) == ["live", "sweep/full", "lze-a"]
        assert shown["lze-a"][:3] == ["finished", "60 of 60", "–"]
        assert shown["sweep/full"][:3] == ["crashed", "60 of 80", "–"]
        assert shown["live"][0] == "running"
        wait_for(lambda: re.fullmatch(r"\d+ min|\d+ h \d+ min", cells(page)["live"][2]))
        # A run that begins is found by a look
        shutil.copytree(runs / "lze-b", tmp_path / "late")
        page.reload()
        page.wait_for_selector(".lze-runs")
        assert "late" in cells(page)
        page.get_by_role("button", name="late").click()
        page.wait_for_selector(".lze-tiles")
        assert "run=late" in address_bar(page)
        assert page.locator("#lze-run input").input_value() == "late"
        assert "finished step 60 of 60" in page.locator(".lze-standing").inner_text()
        # One that dies without a word is noticed, although nothing is recorded
        status = tmp_path / "late" / "telemetry" / STATUS_FILE
        status.write_text(json.dumps({"state": "running", "time": time.time() - 57, "max_steps": 80}))
        for state in ("running", "crashed"):
            wait_for(lambda state=state: f"{state} step 60 of 80" in page.locator(".lze-standing").inner_text())


def test_settings_and_their_differences(page, address, runs):
    open_page(page, address, tab="Settings", run="full")
    shown = cells(page)
    assert shown["pruning"] == ['"none"']
    assert set(shown) == set(open_run(runs / "full").meta.settings)
    open_page(page, address, tab="Compare", runs="lze-b,full")
    differences = page.locator("#lze-main .lze-table").last
    assert differences.locator("thead").inner_text().split() == ["setting", "lze-b", "full"]
    names = differences.locator("tbody th").all_inner_texts()
    assert names == ["pruning", "seed", "selection_ratio", "selector"]


def test_charts_are_zoomed_smoothed_and_saved(page, address, tmp_path):
    open_page(page, address, tab="Training", run="lze-a")
    loss = page.get_by_role("group", name="Loss. Latest: loss")
    plot = loss.locator("[data-lze]")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=4)
    assert page.locator(".lze-rule").count() == 2
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    page.mouse.up()
    wait_for(lambda: "zoom=" in address_bar(page))
    low, high = (float(end) for end in re.search(r"zoom=([\d.]+)%2C([\d.]+)", address_bar(page)).groups())
    assert (low, high) == (pytest.approx(0.25 * 59, abs=0.6), pytest.approx(0.5 * 59, abs=0.6))
    wait_for(lambda: json.loads(plot.get_attribute("data-lze"))["low"] == low)
    with page.expect_download() as download:
        loss.get_by_role("button", name="CSV").click()
    table = pd.read_csv(download.value.path())
    assert list(table) == ["line", "step", "Loss"]
    assert table["step"].tolist() == list(range(int(np.ceil(low)), int(high) + 1))
    assert table["Loss"].tolist() == pytest.approx((1 / (1 + table["step"])).tolist(), rel=1e-3)
    ticks = loss.locator(".lze-y span")
    before = ticks.all_inner_texts()
    page.get_by_role("checkbox", name="Logarithmic").check()
    wait_for(lambda: ticks.all_inner_texts() != before)
    assert "log=true" in address_bar(page)
    assert page.locator(".lze-shadow").count() == 0
    page.locator("#lze-smooth input[type=number]").fill("0.9")
    page.keyboard.press("Enter")
    page.locator(".lze-shadow").first.wait_for(state="attached")
    # The address brings the same view back
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    page.locator(".lze-shadow").first.wait_for(state="attached")
    assert json.loads(plot.get_attribute("data-lze"))["low"] == low
    plot.dblclick()
    wait_for(lambda: json.loads(plot.get_attribute("data-lze"))["low"] == 0)
    assert "zoom=" not in address_bar(page)


def test_the_pointer_compares_runs(page, address):
    open_page(page, address, tab="Compare", runs="lze-a,full", metric="loss")
    page.locator("#lze-main [data-lze]").hover()
    tip = page.locator(".lze-tip").inner_text().splitlines()
    assert tip[1].startswith("lze-a  0.0")
    assert re.fullmatch(r"full  0\.0\d+  \(\+0\)", tip[2])
    # What was chosen of one axis is nothing of another
    open_page(page, address, tab="Compare", zoom="10,20")
    page.get_by_role("radio", name="tokens").check()
    wait_for(lambda: page.locator("#lze-main .lze-x-label").inner_text() == "tokens")
    assert "zoom=" not in address_bar(page)
    page.get_by_text("Drag over a chart to zoom in.").wait_for()


def test_alerts_are_seen(page, tmp_path):
    writer = TelemetryWriter(tmp_path / "dead")
    for record in SyntheticTraining(num_prompts=60, groups_per_batch=16).generations(8):
        record.prompts["dead"][:] = True
        writer.record(record)
    writer.close()
    with serve(tmp_path / "dead") as address:
        open_page(page, address)
        assert "All groups of the latest 8 generation batches are dead" in page.get_by_role("alert").inner_text()
        page.get_by_role("radio", name="Runs").check()
        wait_for(lambda: cells(page).get("dead", [""])[-1] == "1")


def test_only_the_address_is_said(runs):
    command = [sys.executable, "-m", "lze_trl.job.cli", "app", str(runs / "full"), "--port", str(tiny.free_port())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout.readline() == f"The app is at http://127.0.0.1:{command[-1]}/\n"
        assert process.poll() is None
    finally:
        process.terminate()
    assert "share" not in process.communicate(timeout=20)[0]


def test_search_filter_sort_and_open_a_prompt(page, address, runs):
    open_page(page, address)
    page.get_by_role("radio", name="Prompts").check()
    page.wait_for_selector(".lze-prompts")
    run = open_run(runs / "lze-a")
    counts = run.prompt_counts()
    page.get_by_role("radio", name="pruned", exact=True).check()
    wait_for(lambda: f"{counts['pruned']} prompts" in page.locator("#lze-main").inner_text())
    assert "state=pruned" in page.url
    page.get_by_role("radio", name="all", exact=True).check()
    search(page, "geometry")
    expected = sum(run.prompt_counts("geometry").values())
    wait_for(lambda: f"{expected} prompts" in page.locator("#lze-main").inner_text())
    page.locator("#lze-sort input").click()
    page.get_by_role("option", name="pass rate, lowest first").click()
    lowest = run.prompts(search="geometry", sort="pass_rate", descending=False, limit=1).iloc[0]
    wait_for(lambda: page.locator("[data-prompt]").first.get_attribute("data-prompt") == str(lowest.prompt_id))
    # With the keyboard: the row is a button
    page.locator("[data-prompt]").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#lze-detail .lze-completion")
    detail = page.locator("#lze-detail").inner_text()
    assert lowest.text in detail
    completions = run.completions(int(lowest.prompt_id))
    assert page.locator("#lze-detail .lze-completion").count() == len(completions)
    assert completions.completion[0].splitlines()[0] in detail
    # The address brings the same view back
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    page.wait_for_selector("#lze-detail .lze-completion")
    assert lowest.text in page.locator("#lze-detail").inner_text()
    assert page.get_by_role("textbox", name="Search").input_value() == "geometry"


def test_completions_by_visit_and_their_difference(page, address, runs):
    run = open_run(runs / "lze-a")
    known = run.sql("""SELECT prompt_id, count(DISTINCT generation) AS visits FROM completions WHERE index = 0
        GROUP BY prompt_id HAVING count(DISTINCT completion) > 1 AND visits BETWEEN 3 AND 12 ORDER BY prompt_id LIMIT 1""")
    prompt, visits = int(known.prompt_id.item()), int(known.visits.item())
    texts = run.sql(
        "SELECT generation, completion FROM completions WHERE prompt_id = ? AND index = 0 ORDER BY generation",
        [prompt],
    ).set_index("generation")["completion"]
    open_page(page, address, tab="Prompts", prompt=str(prompt))
    detail = page.locator("#lze-detail")
    shown = detail.locator(".lze-completion pre").first
    shown.wait_for()
    assert detail.locator(".lze-visit").count() == visits
    assert shown.inner_text() == texts.iloc[-1]
    older = next(generation for generation, text in texts.items() if text != texts.iloc[-1])
    detail.get_by_role("button", name="compare").first.click()
    detail.get_by_text("Choose another completion").wait_for()
    detail.locator(f'[data-visit="{older}"]').click()
    detail.get_by_role("heading", name=f"Completions at step {older + 1}", exact=True).wait_for()
    assert shown.inner_text() == texts[older]
    detail.get_by_role("button", name="compare").first.click()
    difference = detail.locator(".lze-difference")
    difference.wait_for()
    for tag, text in (("ins", texts[older]), ("del", texts.iloc[-1])):
        kept = difference.evaluate(
            "(node, tag) => [...node.children].filter((c) => c.localName !== tag).map((c) => c.textContent).join('')",
            tag,
        )
        assert kept == text
    wanted = f"picked={older}.0%2C{texts.index[-1]}.0"
    wait_for(lambda: wanted in address_bar(page))
    assert f"step {older + 1}, completion 1 → step {texts.index[-1] + 1}, completion 1" in detail.inner_text()
    # Another prompt begins anew
    page.locator(".lze-prompts tbody [data-prompt]").first.click()
    wait_for(lambda: "picked=" not in address_bar(page) and "visit=" not in address_bar(page))


def test_breakdown_by_a_column(page, address, runs):
    open_page(page, address, tab="Prompts")
    page.locator("#lze-by input").click()
    page.get_by_role("option", name="subject").click()
    page.wait_for_selector(".lze-breakdown")
    expected = open_run(runs / "lze-a").breakdown("subject").set_index("value")
    body = page.locator(".lze-breakdown tbody tr")
    assert [row.split("\t")[:2] for row in body.all_inner_texts()] == [
        [value, str(count)] for value, count in expected["prompts"].items()
    ]
    assert "by=subject" in address_bar(page)
    # All columns are in sight
    assert page.locator(".lze-breakdown .lze-scroll").evaluate("box => box.scrollWidth <= box.clientWidth")
    assert rows(page) == 25
    page.locator("#lze-run input").click()
    page.get_by_role("option", name="full").click()
    counts = open_run(runs / "full").breakdown("subject")["prompts"]
    wait_for(lambda: [int(row.split("\t")[1]) for row in body.all_inner_texts()] == counts.tolist())


def test_details_open_below_the_row_on_a_phone(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    open_page(page, address, tab="Prompts")
    heads = {head.inner_text(): head.bounding_box() for head in page.locator(".lze-prompts th:visible").all()}
    assert list(heads) == ["prompt", "state", "energy", "pass rate"]
    assert all(box["x"] + box["width"] <= 390 for box in heads.values())
    row = page.locator(".lze-prompts tbody [data-prompt]").nth(4)
    row.scroll_into_view_if_needed()
    row.tap()
    detail = page.locator(".lze-inline .lze-detail")
    detail.wait_for()
    below, opened = row.bounding_box(), detail.bounding_box()
    assert 0 < opened["y"] - below["y"] < 60
    # A prompt that is not on the page is above the others
    open_page(page, address, tab="Prompts", prompt=row.get_attribute("data-prompt"), sort="energy")
    detail.wait_for()
    table = page.locator(".lze-scroll:has(> .lze-prompts)")
    assert page.locator("thead .lze-inline").count() == 1
    assert table.evaluate("(node) => node.scrollWidth") <= table.bounding_box()["width"] <= 374
    assert detail.bounding_box()["width"] > 300
    assert not page.locator("#lze-detail").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_every_state_is_a_filter(page, address, runs):
    open_page(page, address, tab="Prompts")
    counts = open_run(runs / "lze-a").prompt_counts()
    for state in ("frontier", "solved", "hopeless", "pruned", "forgotten"):
        assert counts[state] > 0
        page.get_by_role("radio", name=state, exact=True).check()
        wait_for(lambda state=state: f"\n{counts[state]} prompts" in page.locator("#lze-main").inner_text())
        assert states_shown(page) == {state}
        assert rows(page) == min(counts[state], 25)


def test_pages_of_the_table(page, address, runs):
    open_page(page, address, tab="Prompts")
    assert rows(page) == 25
    first = page.locator("[data-prompt]").first.get_attribute("data-prompt")
    page.get_by_role("button", name="Next →").click()
    wait_for(lambda: page.locator("[data-prompt]").first.get_attribute("data-prompt") != first)
    assert "page 2 of" in page.locator("#lze-main").inner_text()
    search(page, "no such prompt anywhere")
    wait_for(lambda: "No prompt matches" in page.locator("#lze-main").inner_text())


def test_compare_shows_seeds_as_one_band(page, address):
    open_page(page, address, tab="Compare")
    assert page.locator("#lze-main .lze-legend").inner_text().split("\n") == ["lze-a (2 seeds)", "full"]
    assert page.locator("#lze-main .lze-band").count() == 1
    page.get_by_role("radio", name="FLOPs").check()
    wait_for(lambda: page.locator("#lze-main .lze-x-label").inner_text() == "FLOPs")
    page.get_by_role("checkbox", name="lze-b").uncheck()
    wait_for(lambda: page.locator("#lze-main .lze-band").count() == 0)
    assert "axis=flops" in page.url
    assert "runs=lze-a%2Cfull" in page.url


def test_text_of_a_run_is_shown_never_interpreted(page, tmp_path):
    training = SyntheticTraining(num_prompts=4, groups_per_batch=4)
    record = next(training.generations(1))
    record.prompts["text"][:] = NASTY
    record.rows["completion"][:] = NASTY
    record.prompts["columns"][:] = [{NASTY: NASTY}] * len(record)
    record.reward_names = [NASTY, "b"]
    writer = TelemetryWriter(tmp_path / "nasty", completions="all", settings={NASTY: NASTY})
    writer.record(record)
    writer.close()
    with serve(tmp_path / "nasty") as address:
        open_page(page, address)
        open_page(page, address, tab="Prompts", q=NASTY)
        assert page.locator("[data-prompt]").first.inner_text() == NASTY
        page.locator("[data-prompt]").first.click()
        page.wait_for_selector("#lze-detail .lze-completion")
        assert page.locator("#lze-detail .lze-text").first.inner_text() == NASTY
        assert page.locator("#lze-detail .lze-completion pre").first.inner_text() == NASTY
        assert page.locator("#lze-detail script, #lze-detail img[src=x], #lze-main img[src=x]").count() == 0
        assert NASTY in page.locator("#lze-detail .lze-facts").inner_text()


def test_states_without_data_are_worded(page, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(runs / "full", tmp_path / "newer")
    meta = tmp_path / "newer" / "telemetry" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "schema_version": SCHEMA_VERSION + 1}))
    shutil.copytree(runs / "full", tmp_path / "half")
    for part in (tmp_path / "half" / "telemetry" / "groups").iterdir():
        part.write_bytes(part.read_bytes()[:500])
    shutil.copytree(runs / "full", tmp_path / "damaged")
    (tmp_path / "damaged" / "telemetry" / "meta.json").write_text("{")
    names = ("empty", "newer", "half", "damaged")
    with serve(*(tmp_path / name for name in names)) as address:
        for name, words in {
            "empty": "Nothing has been recorded here yet",
            "newer": "Upgrade lze_trl",
            "damaged": "cannot be read",
            "half": "Left out, because cut off or damaged",
        }.items():
            open_page(page, address, run=name)
            wait_for(lambda words=words: words in page.locator("#lze-main").inner_text())
            assert "Traceback" not in page.content()
        open_page(page, address, run="nobody", tab="Nothing", at="-3", sort="1; DROP TABLE groups")
        open_page(page, address, tab="Compare")
        # A run that begins while the page is open appears
        open_page(page, address, run="empty")
        record_synthetic_run(tmp_path / "empty", SyntheticTraining(num_prompts=20, groups_per_batch=8), 3)
        page.wait_for_selector("#lze-main .lze-tiles", timeout=10_000)


def test_unknown_prompt_is_worded(page, address):
    for prompt in ("1", "x", "99999999999999999999"):
        open_page(page, address, tab="Prompts", prompt=prompt)
        wait_for(lambda: "This run has no such prompt" in page.locator("#lze-detail").inner_text())


def test_no_file_outside_the_runs_is_served(address, runs):
    root = Path(lze_trl.__file__).parents[1]
    files = {
        "/etc/passwd": Path("/etc/passwd"),
        str(runs / "lze-a" / "telemetry" / "meta.json"): runs / "lze-a" / "telemetry" / "meta.json",
        "lze_trl/hub.py": root / "lze_trl" / "hub.py",
        "setup.cfg": root / "setup.cfg",
    }
    for target, file in files.items():
        secret = max(file.read_bytes().splitlines(), key=len)
        for route in ("gradio_api/file=", "file=", "file/", "static/", "gradio_api/file=../../../../"):
            try:
                with urllib.request.urlopen(address + route + urllib.parse.quote(target)) as answer:
                    assert secret not in answer.read(), (route, target)
            except urllib.error.HTTPError as error:
                assert error.code in (400, 403, 404, 405), (route, target)


def test_only_this_machine_reaches_the_app(address):
    port = urllib.parse.urlsplit(address).port
    others = ["127.0.0.2", *addresses_of_this_machine()]
    for other in others:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=10)
    # The same addresses reach what listens on all of them
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        for other in others:
            socket.create_connection((other, everywhere.getsockname()[1]), timeout=10).close()


def addresses_of_this_machine():
    """IPv4 addresses that others could reach it by; none without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address for documentation
        except OSError:
            return []
        return [probe.getsockname()[0]]


def test_space_shows_a_run(page, runs, tmp_path):
    # As it is uploaded: the package beside the app, and nothing that trains
    space, package = tmp_path / "space", Path(lze_trl.__file__).parent
    shutil.copytree(package.parent / "app", space)
    shutil.copytree(package, space / "lze_trl", ignore=shutil.ignore_patterns("__pycache__"))
    missing = dict.fromkeys(("torch", "trl", "transformers", "datasets"))
    code = f"import runpy, sys; sys.modules.update({missing}); runpy.run_path('app.py', run_name='__main__')"
    environment = {**os.environ, "LZE_RUNS": str(runs / "lze-a"), "PYTHONPATH": str(space)}
    command = ["env", "GRADIO_SERVER_PORT={port}", sys.executable, "-c", code]
    with started(command, cwd=space, env=environment) as address:
        open_page(page, address)
        summary = open_run(runs / "lze-a").summary()
        assert page.evaluate(TILES)["groups trained on"][1] == f"of {summary['groups']:,}"


def test_readable_on_a_phone_and_in_the_dark(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = context.new_page()
    for view in VIEWS:
        open_page(page, address, tab=view, __theme="dark")
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        ink, card = page.evaluate("""() => {
            const style = getComputedStyle(document.body);
            return [style.getPropertyValue("--lze-ink"), style.getPropertyValue("--lze-card")];
        }""")
        assert contrast(ink, card) > 7
    context.close()


def contrast(first, second):
    """Contrast ratio of two colours as WCAG defines it."""

    def luminance(colour):
        channels = [int(part, 16) / 255 for part in re.findall("..", colour.strip().lstrip("#"))]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
