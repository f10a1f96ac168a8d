"""The app as its users see it: in Chromium, while a run is being recorded."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

import lze_trl
import tiny
from benchmarks import stress
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl.app import views
from lze_trl.app.charts import METRICS, comparison, overview
from lze_trl.app.meanings import MEANINGS
from lze_trl.app.page import TABS
from lze_trl.app.report import write_report
from lze_trl.record import Meta, TelemetryWriter, open_run
from lze_trl.record.cards import cards
from lze_trl.record.curves import curve, value_tables
from lze_trl.record.ledger import against_plain
from lze_trl.record.schema import STATUS_FILE, Status
from test_by_value import make as make_by_value
from test_telemetry import record_run
from test_telemetry import wait_for as wait_for_seconds


OFF = "gpu", "quic", "background-networking", "component-update", "sync"
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in OFF)]
pytestmark = pytest.mark.browser
wait_for = partial(wait_for_seconds, seconds=300)  # of a machine that does other work
NASTY = '<script>alert("x")</script> <img src=x onerror=alert(1)> **bold** ${alert(2)} {{value}} `a`'


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    executable = os.environ.get("LZE_CHROMIUM") or shutil.which("chromium")
    if executable is None:
        pytest.skip("Chromium is not installed (Debian: `apt-get install chromium`).")
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A page that fails the test when its script does."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(300_000)
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield page
    context.close()
    assert not problems


def answers(address):
    with suppress(OSError):
        urllib.request.urlopen(address, timeout=5).close()
        return True


@contextmanager
def serve(*runs):
    """The app in a process of its own, as a user starts it; yields its address."""
    port = str(tiny.free_port())
    command = [sys.executable, "-m", "lze_trl.job.cli", "app", *map(str, runs), "--port", port]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}/"
    try:
        wait_for(lambda: process.poll() is not None or answers(address), seconds=180)
        assert process.poll() is None, process.communicate()[1]
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, ratio, seed in (("lze-a", 0.4, 0), ("lze-b", 0.4, 1), ("full", 1.0, 0)):
        training = SyntheticTraining(num_prompts=120, groups_per_batch=24, selection_ratio=ratio, seed=seed)
        record_synthetic_run(folder / name, training, generations=60)
    return folder


@pytest.fixture(scope="module")
def address(runs):
    (runs / "lze-a" / "telemetry" / "status.json").touch()  # the latest of them is shown first
    with serve(runs / "lze-a", runs / "lze-b", runs / "full") as address:
        yield address


def open_page(page, address, tab="Overview", **parameters):
    page.goto(f"{address}?{urllib.parse.urlencode(parameters)}")
    page.wait_for_function("document.querySelector('#lze-standing')?.innerText.trim()", timeout=60_000)
    open_tab(page, tab)


def open_tab(page, name):
    tab = page.get_by_role("tab", name=name)
    if tab.is_visible():
        tab.click()
    else:  # a narrow page has a menu for what does not fit
        page.locator(".overflow-menu > button").click()
        page.locator(".overflow-dropdown").get_by_text(name).click()


def search(page, text):
    page.locator("#lze-search textarea, #lze-search input").fill(text)


def choose(page, dropdown, option):
    page.locator(f"{dropdown} input").click()
    page.get_by_role("option", name=option, exact=True).click()


def cells(page, table):
    """Texts of the rows of a table, by the first cell."""
    rows = page.evaluate(
        """(table) => [...document.querySelectorAll(`${table} tbody tr`)].map(
            (row) => [...row.cells].map((cell) => cell.innerText.trim()))""",
        table,
    )
    return {first: others for first, *others in rows}


def row(page, table, place):
    return page.locator(f"{table} tbody tr").nth(place)


def shown_lines(figure):
    """What one chart of Plotly shows: the values of each line, by name."""
    return figure.evaluate(
        """(figure) => Object.fromEntries((figure.data ?? []).map(
            (line) => [line.name, Array.from(line.y?._inputArray ?? line.y ?? [])]))"""
    )


def titles(page):
    return page.locator(".lze-chart.js-plotly-plot:visible .gtitle").all_text_contents()


def test_overview_agrees_with_the_files_and_forecasts_from_them(page, address, runs):
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    open_page(page, address)
    page.wait_for_selector(".lze-cards")
    *_, total = against_plain(open_run(runs / "lze-a").summary()["ledger"])
    assert page.evaluate(CARDS)["saved"] == total.times
    page.wait_for_selector(".lze-spark.js-plotly-plot")
    wait_for(lambda: len(titles(page)) == len(overview(open_run(runs / "lze-a"))))
    widths = page.evaluate(
        "[...document.querySelectorAll('#lze-plots .lze-chart')].map((c) => [c.clientWidth, c._fullLayout.width])"
    )
    assert len(widths) > 5 and all(abs(place - drawn) <= 2 for place, drawn in widths)  # none covers its neighbour
    page.get_by_role("button", name="What other strategies would cost").click()
    page.get_by_role("button", name="Forecast").click()
    told = page.locator("#lze-forecast")
    wait_for(lambda: told.count() and "Time to the accuracy of plain GRPO" in told.inner_text(), seconds=120)
    assert told.locator("meter").count() > 3
    assert told.locator(".lze-advice").inner_text().startswith(("Choose strategy: ", "Do not bother: "))
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []  # it works offline


def empty_answers(prompts, trainer):
    ids = [[trainer.processing_class.eos_token_id] for _ in prompts]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-0.01]] * len(ids),
    }


def short(completion_ids, **kwargs):
    return [0.2 - 0.02 * len(ids) for ids in completion_ids]


def share_of_digits(completions, **kwargs):
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def situations(tmp_path_factory):
    """Runs as users have them: one that trains, one that collapsed, one of graded rewards, of the gate, one that crashed, and a long one."""
    folder, held_out = tmp_path_factory.mktemp("situations"), {"eval_dataset": tiny.prompts(3)}
    common = {"telemetry": True, "max_steps": 12, "trainer": held_out, "eval_strategy": "steps", "eval_steps": 6}
    tiny.run(folder / "trains", **common, strategy="exact")
    collapsed = common | {"trainer": held_out | {"rollout_func": empty_answers}}
    tiny.run(folder / "collapsed", **collapsed, strategy="exact", reward_funcs=[tiny.digit_reward, short])
    tiny.run(folder / "graded", **common, reward_funcs=share_of_digits)
    tiny.run(folder / "gate", **common, strategy="gate", reward_funcs=tiny.digit_reward)
    tiny.run(folder / "crashed", **common, save_strategy="steps", save_steps=6)
    status = Status("running", max_steps=100)
    status.write(folder / "crashed/telemetry")
    file = folder / "crashed/telemetry" / STATUS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"time": time.time() - 3600}))
    stress.make(folder / "long", records=20_000, prompts=10_000, times=50)
    with serve(folder) as address:
        yield address, folder


TOLD = {
    "trains": "exact · ",
    "collapsed": "the policy has collapsed on short (0.18 of 0.18)",
    "graded": "lze · ",
    "gate": "gate · ",
    "crashed": "To go on from checkpoint-12",
    "long": "step 1,000",
}


@pytest.mark.parametrize("name", TOLD)
def test_every_run_has_its_answers_its_charts_and_a_prompt_that_is_open(page, situations, name):
    address, folder = situations
    run = open_run(folder / name)
    open_page(page, address, run=name)
    page.wait_for_selector(".lze-cards")
    shown = page.locator("#lze-overview")
    for card in cards(run):  # what the console prints
        for text in (card.value, *card.notes):
            assert text in shown.inner_text()
    assert TOLD[name] in page.locator("#lze-standing").inner_text() + shown.inner_text()
    wait_for(lambda: len(titles(page)) >= len(overview(run)))
    open_tab(page, "Prompts")
    page.wait_for_selector("#lze-prompts tbody tr")
    first = row(page, "#lze-prompts", 0).get_attribute("data-row")
    opened = page.locator("#lze-detail [data-copy]")
    wait_for(lambda: opened.count() and opened.get_attribute("data-copy") == first)
    assert "prompt=" not in page.url  # nobody has chosen it
    row(page, "#lze-prompts", 2).click()
    second = row(page, "#lze-prompts", 2).get_attribute("data-row")
    wait_for(lambda: opened.get_attribute("data-copy") == second and f"prompt={second}" in page.url)
    drawn = set(run.prompts(limit=views.MOST_ROWS)["drawn"].astype(str))
    assert {others[3] for others in cells(page, "#lze-prompts").values()} <= drawn


def test_page_follows_a_run(page, tmp_path):
    training = SyntheticTraining(num_prompts=60, groups_per_batch=16)
    writer = TelemetryWriter(tmp_path / "live", training.meta)
    records = training.generations(10_000)
    writer.record(next(records))
    writer.flush()
    with serve(tmp_path / "live") as address:
        open_page(page, address)
        standing, plot = page.locator("#lze-standing"), page.locator(".lze-chart.js-plotly-plot").first
        plot.wait_for(timeout=60_000)
        box = plot.locator(".nsewdrag").bounding_box()
        x, y = box["x"] + box["width"] / 4, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + box["width"] / 2, y, steps=5)
        page.mouse.up()  # the reader has zoomed in, which stays
        ranges = "(plot) => [...plot.layout.xaxis.range, plot.layout.xaxis.autorange]"
        wait_for(lambda: plot.evaluate(ranges)[-1] is False)
        zoomed = plot.evaluate(ranges)
        for record in islice(records, 6):
            writer.record(record)
            wait_for(lambda record=record: f"step {record.step + 1} " in standing.inner_text(), seconds=60)
        wait_for(lambda: len(shown_lines(plot)["frontier (learnable)"]) == 7)
        assert plot.evaluate(ranges) == zoomed
        writer.close()


CARDS = """() => Object.fromEntries([...document.querySelectorAll("[data-card]")].map(
    (card) => [card.dataset.card, card.querySelector("strong").innerText]))"""


def test_a_click_on_a_state_lists_its_prompts(page, address, runs):
    open_page(page, address)
    plot = page.locator("#lze-flow .js-plotly-plot")
    plot.wait_for(timeout=60_000)
    bar = plot.locator(".barlayer .trace.bars").first.locator(".point").nth(-3)
    state = plot.evaluate("(plot) => plot.data[0].customdata[0]")
    box = bar.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    count = open_run(runs / "lze-a").prompt_counts()[state]
    wait_for(lambda: page.locator("#lze-found").inner_text().strip().startswith(f"{count} prompt"))
    assert page.locator("#lze-state input").input_value() == state
    assert page.get_by_role("tab", name="Prompts").get_attribute("aria-selected") == "true"


def test_a_click_on_a_value_of_a_column_lists_its_prompts(page, tmp_path):
    make_by_value(tmp_path / "run", max_steps=4).train()
    run = open_run(tmp_path / "run")
    expected = value_tables(run)["source"]["value"].tolist()
    value = expected[0]
    with serve(tmp_path / "run") as address:
        open_page(page, address)
        page.locator("#lze-by-source").wait_for(timeout=60_000)
        assert list(cells(page, "#lze-by-source")) == expected
        charts = page.locator("#lze-cost [data-figure].js-plotly-plot")
        wait_for(lambda: charts.count() == 3)
        assert {"easy", "mid"} <= set(shown_lines(charts.nth(1)))
        row(page, "#lze-by-source", 0).click()
        count = run.groups().query("`by.source` == @value")["prompt_id"].nunique()
        wait_for(lambda: page.locator("#lze-found").inner_text().strip().startswith(f"{count} prompt"))
        assert f"search=source%3D{value}" in page.url


def test_a_live_run_can_be_paused_and_its_prompts_opened(page, tmp_path):
    training = SyntheticTraining(num_prompts=60, groups_per_batch=16)
    recording = tmp_path / "live", training, 600, 0.1  # ten generation batches a second, for a minute
    # A process, not a thread: one that still writes when the interpreter ends would abort it
    multiprocessing.get_context("spawn").Process(target=record_synthetic_run, args=recording, daemon=True).start()
    wait_for(lambda: (tmp_path / "live" / "telemetry" / "generations").exists())
    with serve(tmp_path / "live") as address:
        open_page(page, address, "Prompts")
        wait_for(lambda: len(cells(page, "#lze-prompts")) > 20)
        # The reader's order, place and prompt stay while the table changes
        for order in ("descending", "ascending"):
            page.get_by_role("columnheader", name="visits").click()
            page.locator(f"#lze-prompts [aria-sort={order}]").wait_for()
        page.set_viewport_size({"width": 1280, "height": 420})
        scroll = page.locator("#lze-prompt-table .lze-scroll")
        scroll.evaluate("(element) => element.scrollTop = 90")
        row(page, "#lze-prompts", 5).click()
        page.wait_for_selector("#lze-detail pre")
        visits = page.locator("#lze-detail dl div", has_text="visits").locator("dd")
        place = scroll.evaluate("(element) => element.scrollTop")  # the click may have moved it
        assert place >= 90
        before = int(visits.inner_text())
        wait_for(lambda: int(visits.inner_text()) > before)
        assert page.locator("#lze-prompts [aria-sort=ascending]").inner_text() == "visits"
        assert scroll.evaluate("(element) => element.scrollTop") == place

        def column(place):
            return [others[place] for others in cells(page, "#lze-prompts").values()]

        # Rows under the pointer keep their places while their numbers change, and are sorted anew once it leaves
        held, last = list(cells(page, "#lze-prompts")), column(6)
        wait_for(lambda: column(6) != last)
        assert list(cells(page, "#lze-prompts")) == held
        assert page.locator("#lze-prompts tr.lze-changed").count() > 0
        page.mouse.move(5, 5)
        wait_for(lambda: list(cells(page, "#lze-prompts")) != held)
        found = [int(visits) for visits in column(5)]
        assert found == sorted(found)
        page.get_by_role("checkbox", name="Live").uncheck()

        def still():
            before = cells(page, "#lze-prompts")
            page.wait_for_timeout(2500)
            return cells(page, "#lze-prompts") == before

        wait_for(still, seconds=60)
        paused = cells(page, "#lze-prompts")
        page.get_by_role("checkbox", name="Live").check()
        wait_for(lambda: cells(page, "#lze-prompts") != paused)


def test_runs_of_a_folder_and_their_status(page, runs, tmp_path):
    for name in ("lze-a", "sweep/full"):
        shutil.copytree(runs / Path(name).name, tmp_path / name)
    status = tmp_path / "sweep" / "full" / "telemetry" / STATUS_FILE
    with serve(tmp_path) as address:
        # A run that dies silently is noticed, although nothing is recorded
        for age, state in ((30, "running"), (3600, "crashed")):
            status.write_text(json.dumps({"state": "running", "time": time.time() - age, "max_steps": 80}))
            open_page(page, address, "Runs")
            wait_for(lambda: set(cells(page, "#lze-runs")) == {"lze-a", "sweep/full"})
            shown = cells(page, "#lze-runs")
            assert shown["lze-a"][:3] == ["–", "finished", "60 of 60"]
            assert shown["sweep/full"][1].startswith(state) and shown["sweep/full"][2] == "60 of 80"
        shutil.copytree(runs / "lze-b", tmp_path / "late")  # a run that begins is found when the page is loaded again
        open_page(page, address, "Runs")
        wait_for(lambda: "late" in cells(page, "#lze-runs"))
        open_tab(page, "Overview")
        choose(page, "#lze-run", "late")
        wait_for(lambda: "finished · step 60 of 60" in page.locator("#lze-standing").inner_text())


def test_prompts_are_searched_and_opened(page, address, runs):
    open_page(page, address, "Prompts")
    run = open_run(runs / "lze-a")
    counts, found = run.prompt_counts(), page.locator("#lze-found")
    for state in ("frontier", "solved", "hopeless", "pruned", "forgotten"):
        assert counts[state] > 0
        label = views.LABELS.get(state, state)
        choose(page, "#lze-state", label)
        wait_for(lambda n=counts[state]: found.inner_text().strip() == f"{n} prompt{'s' * (n != 1)}.")
        wait_for(lambda label=label: {row[0] for row in cells(page, "#lze-prompts").values()} == {label})
        names, scatter = (
            {f"{label} ({counts[state]})", "E at D = 1, m = 0"},
            page.locator("#lze-scatter .js-plotly-plot"),
        )
        wait_for(lambda names=names, scatter=scatter: set(shown_lines(scatter)) == names)
    choose(page, "#lze-state", "all")
    search(page, "geometry")
    expected = sum(run.prompt_counts("geometry").values())
    wait_for(lambda: found.inner_text().strip() == f"{expected} prompts.")
    prompts = run.prompts(search="geometry", limit=3)
    detail = page.locator("#lze-detail")
    wait_for(lambda: prompts.text[0] in detail.inner_text())  # the first is open by itself
    row(page, "#lze-prompts", 0).click()  # by the pointer
    # `page.url` alone stays as it was until Playwright is asked for something else
    wait_for(lambda: f"prompt={prompts.prompt_id[0]}" in page.evaluate("location.href"))
    for _ in range(2):
        page.keyboard.press("ArrowDown")  # and by the keyboard
    page.keyboard.press("Enter")
    wait_for(lambda: prompts.text[2] in detail.inner_text())
    completions = run.completions(int(prompts.prompt_id[2]))
    shown = page.locator("#lze-completions")
    ordered = completions.sort_values("reward", ascending=False, kind="stable")
    once = ordered.drop_duplicates(["completion", "completion_tokens", "reward"]).completion.tolist()
    assert shown.locator(".lze-completion pre").all_inner_texts() == once
    assert detail.locator("[data-copy]").get_attribute("data-copy") == str(prompts.prompt_id[2])
    step = run.groups(int(prompts.prompt_id[2])).step.tolist()[-3] + 1  # an earlier visit
    page.locator("#lze-visit input").click()
    page.get_by_role("option", name=f"step {step}:").click()
    shown.get_by_role("heading", name=f"Completions at step {step}", exact=True).wait_for()
    # A point of the chart opens its prompt
    search(page, str(prompts.prompt_id[1]))
    wait_for(lambda: found.inner_text().strip() == "1 prompt.")
    point = page.locator("#lze-scatter .point")
    wait_for(lambda: point.count() == 1)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#lze-scatter .hovertext").wait_for()
    page.mouse.down()
    page.mouse.up()
    wait_for(lambda: prompts.text[1] in detail.inner_text())
    search(page, "no such prompt anywhere")
    wait_for(lambda: found.inner_text().strip() == "No prompt has all of: no such prompt anywhere")
    # No prompt stays open, and no empty chart
    wait_for(lambda: not detail.locator("pre").count() and not page.locator("#lze-scatter .gtitle").count())
    search(page, "problem")
    choose(page, "#lze-column", "subject=number_theory")  # beside the other word
    expected = sum(1 for row in run.prompts()["columns"] if json.loads(row)["subject"] == "number theory")
    wait_for(lambda: found.inner_text().strip() == f"{expected} prompts.")
    assert page.locator("#lze-search textarea, #lze-search input").input_value() == "problem subject=number_theory"
    choose(page, "#lze-column", "any value")
    wait_for(lambda: page.locator("#lze-search textarea, #lze-search input").input_value() == "problem")


def test_run_tab_prompt_and_search_stand_in_the_address(page, address, runs):
    open_page(page, address)
    choose(page, "#lze-run", "lze-b")
    wait_for(lambda: page.locator("#lze-standing h1").inner_text() == "lze-b", seconds=60)
    open_tab(page, "Prompts")
    search(page, "level geometry")
    found = page.locator("#lze-found")
    expected = sum(open_run(runs / "lze-b").prompt_counts("geometry").values())
    wait_for(lambda: found.inner_text().strip() == f"{expected} prompts.", seconds=60)
    row(page, "#lze-prompts", 1).click()
    id, opened = row(page, "#lze-prompts", 1).get_attribute("data-row"), page.locator("#lze-detail [data-copy]")
    wait_for(lambda: opened.get_attribute("data-copy") == id and f"prompt={id}" in page.url)
    text = page.locator("#lze-detail pre").first.inner_text()
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(page.url).query)
    assert (query["run"], query["tab"], query["search"]) == (["lze-b"], ["Prompts"], ["level geometry"])
    page.reload()
    page.wait_for_selector("#lze-detail pre", timeout=60_000)
    assert page.locator("#lze-detail pre").first.inner_text() == text
    assert page.locator("#lze-standing h1").inner_text() == "lze-b"
    wait_for(lambda: found.inner_text().strip() == f"{expected} prompts.", seconds=60)
    page.goto(f"{address}?run=nothing&tab=nowhere&prompt=x")  # what there is not, is left out
    wait_for(lambda: page.locator("#lze-standing h1").inner_text() == "lze-a", seconds=60)


def test_runs_are_found_sorted_and_opened(page, address, runs):
    open_page(page, address, "Runs")
    wait_for(lambda: set(cells(page, "#lze-runs")) == {"lze-a", "lze-b", "full"})
    assert page.locator("#lze-runs [aria-sort=descending]").inner_text() == "started"
    assert page.locator("#lze-run-table .lze-scroll").evaluate(
        "(box) => box.scrollWidth <= box.clientWidth"
    )  # all columns
    tokens = {name: curve(open_run(runs / name)).tokens.iloc[-1] for name in ("lze-a", "lze-b", "full")}
    heading = page.get_by_role("columnheader", name="tokens")
    assert heading.get_attribute("title") == MEANINGS["tokens"]
    for reverse in (True, False):
        heading.click()
        expected = sorted(tokens, key=tokens.__getitem__, reverse=reverse)
        wait_for(lambda expected=expected: list(cells(page, "#lze-runs")) == expected)
    page.locator("#lze-words textarea, #lze-words input").fill("finished full")
    wait_for(lambda: list(cells(page, "#lze-runs")) == ["full"])
    page.locator("#lze-runs [data-tick=full]").uncheck()  # which opens nothing, and is seen on Compare
    for count in (2, 3):
        open_tab(page, "Compare")
        wait_for(lambda count=count: page.locator("#lze-compared .token").count() == count, seconds=60)
        open_tab(page, "Runs")
        page.locator("#lze-runs [data-tick=full]").check()
    row(page, "#lze-runs", 0).locator("td").nth(4).click()
    wait_for(lambda: page.locator("#lze-standing h1").inner_text() == "full")
    assert page.get_by_role("tab", name="Overview").get_attribute("aria-selected") == "true"
    assert page.locator("#lze-run input").input_value() == "full"


def test_runs_are_compared(page, address, runs):
    open_page(page, address, "Compare")
    charts = page.locator(".lze-chart.js-plotly-plot:visible")
    compared = {name: open_run(runs / name) for name in ("lze-a", "lze-b", "full")}
    drawn = [figure.layout.title.text for name in [*METRICS][:4] for figure in comparison(compared, "step", name)]
    rewards = drawn.index("Reward, in total and one by one")
    wait_for(lambda: titles(page) == drawn)
    shapes = {(round(box["width"]), box["height"]) for box in (chart.bounding_box() for chart in charts.all())}
    assert len(shapes) == 1
    wait_for(lambda: set(shown_lines(charts.nth(rewards))) == {"lze-a", "lze-b", "full"})
    page.get_by_role("radio", name="FLOPs").check()
    wait_for(lambda: charts.nth(rewards).locator(".xtitle").text_content() == "FLOPs")
    page.locator("#lze-compared .token", has_text="lze-b").get_by_role("button").click()
    wait_for(lambda: set(shown_lines(charts.nth(rewards))) == {"lze-a", "full"})
    wait_for(lambda: cells(page, "#lze-differing").get("pruning") == ["refill", "none"])
    ends = [views.run_row(open_run(runs / name))["cost ×"] for name in ("lze-a", "full")]
    told = [f"{ends[0]:.3f}", f"{ends[1]:.3f} (+{ends[1] - ends[0]:.3f})"]
    wait_for(lambda: cells(page, "#lze-final")["cost ×"] == told)
    told = page.locator("#lze-differences p").first
    assert " is reached by lze-a after " in told.inner_text() and "by full after" in told.inner_text()
    open_tab(page, "Settings")
    wait_for(lambda: cells(page, "#lze-settings-all").get("pruning") == ["refill", "–", "–"])
    page.locator("#lze-named textarea, #lze-named input").fill("refill PRUN")
    wait_for(lambda: set(cells(page, "#lze-settings-all")) == {"pruning"})


def test_a_prompt_that_costs_without_a_pass_can_be_opened(page, address):
    open_page(page, address)
    page.wait_for_selector("#lze-stuck tr[data-row]", timeout=120_000)
    stuck = row(page, "#lze-stuck", 0)
    id = stuck.get_attribute("data-row")
    stuck.click()
    wait_for(
        lambda: page.locator("#lze-detail [data-copy]").get_attribute("data-copy", timeout=60_000) == id, seconds=60
    )
    assert page.get_by_role("tab", name="Prompts").get_attribute("aria-selected") == "true"


def test_advice_opens_the_prompts_and_the_settings_that_it_names(page, tmp_path):
    nothing, settings = lambda completions, **kwargs: [0.0] * len(completions), {"max_completion_length": 30}
    tiny.run(tmp_path, telemetry=True, strategy="exact", max_steps=3, reward_funcs=nothing, **settings)
    count = open_run(tmp_path).prompt_counts()["hopeless"]
    with serve(tmp_path) as address:
        open_page(page, address)
        page.get_by_role("button", name="Open these prompts").press("Enter")
        wait_for(lambda: page.locator("#lze-found").inner_text().strip() == f"{count} prompts.")
        assert page.locator("#lze-state input").input_value() == views.LABELS["hopeless"]
        open_tab(page, "Overview")
        page.get_by_role("button", name="Open num_generations").click()
        wait_for(lambda: 0 < len(cells(page, "#lze-settings-all")) < 5)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_report_is_one_file_that_draws_its_charts(browser, runs, width):
    path = write_report(runs / "lze-b")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="dark", offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("#lze-figures .js-plotly-plot", timeout=60_000)
    wait_for(lambda: len(titles(page)) == len(overview(open_run(runs / "lze-b"))))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("[data-card]").count() == 3 and page.locator(".lze-completion").count() == 10
    assert page.locator("main h1").inner_text() == "lze-b" and cells(page, "#lze-made-of")["model name or path"] == [
        "synthetic"
    ]
    context.close()


def test_text_of_a_run_is_shown_never_interpreted(page, tmp_path):
    record = next(SyntheticTraining(num_prompts=4, groups_per_batch=4).generations(1))
    record.prompts["text"][:] = record.rows["completion"][:] = NASTY
    record.prompts["columns"][:] = [{NASTY: NASTY}] * len(record)
    record_run(tmp_path / "nasty", [record], Meta({NASTY: NASTY}, [NASTY, "b"]))
    with serve(tmp_path / "nasty") as address:
        open_page(page, address)
        page.wait_for_selector(".js-plotly-plot:visible")
        open_tab(page, "Prompts")
        search(page, NASTY)
        wait_for(lambda: list(cells(page, "#lze-prompts")) == [NASTY])
        page.locator("#lze-scatter .point").first.hover(force=True)
        row(page, "#lze-prompts", 0).click()
        page.wait_for_selector("#lze-completions .lze-completion")
        assert page.locator("#lze-detail pre").first.inner_text() == NASTY
        assert page.locator("#lze-completions pre").first.inner_text() == NASTY
        assert NASTY in page.locator("#lze-detail dl").inner_text()
        open_tab(page, "Settings")
        wait_for(lambda: cells(page, "#lze-settings-all") == {NASTY: [NASTY, "–", "–"]})
        assert page.locator(".gradio-container script, img[src=x]").count() == 0


def test_states_without_data_are_worded(page, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(runs / "full", tmp_path / "damaged")
    (tmp_path / "damaged" / "telemetry" / "meta.json").write_text("{")
    with serve(tmp_path / "empty", tmp_path / "damaged") as address:
        open_page(page, address)
        for name, words in {"damaged": "cannot be read", "empty": "Nothing has been recorded here yet"}.items():
            choose(page, "#lze-run", name)
            wait_for(lambda words=words: words in page.locator("#lze-standing").inner_text())
            assert "Traceback" not in page.content()
        # A run that begins while the page is open appears
        record_synthetic_run(tmp_path / "empty", SyntheticTraining(num_prompts=20, groups_per_batch=8), 3)
        page.wait_for_selector("#lze-overview .lze-cards", timeout=60_000)
        page.wait_for_selector(".js-plotly-plot", timeout=60_000)  # else the server ends while its charts are fetched


def test_no_file_outside_the_runs_is_served(address, runs):
    root = Path(lze_trl.__file__).parents[1]
    for target in ("/etc/passwd", str(runs / "lze-a" / "telemetry" / "meta.json"), "lze_trl/hub.py", "setup.cfg"):
        secret = max((root / target).read_bytes().splitlines(), key=len)
        for route in ("gradio_api/file=", "file=", "file/", "static/", "gradio_api/file=../../../../"):
            try:
                with urllib.request.urlopen(address + route + urllib.parse.quote(target)) as answer:
                    assert secret not in answer.read(), (route, target)
            except urllib.error.HTTPError as error:
                assert error.code in (400, 403, 404, 405), (route, target)


def test_only_this_machine_reaches_the_app(address):
    port = urllib.parse.urlsplit(address).port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    # The same address reaches a server that listens on every address
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        socket.create_connection(("127.0.0.2", everywhere.getsockname()[1]), timeout=10).close()


def test_readable_on_a_phone(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
    page = context.new_page()
    for tab in TABS:
        open_page(page, address, tab, __theme="dark")
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wait_for(lambda: len({page.get_by_role("tab", name=tab).bounding_box()["y"] for tab in TABS}) == 1)  # in one row
    open_tab(page, "Prompts")
    wait_for(lambda: len(cells(page, "#lze-prompts")) > 10)
    # A prompt that is opened comes into sight, before the chart of all prompts
    row(page, "#lze-prompts", 2).tap()
    page.wait_for_selector("#lze-detail pre")
    wait_for(lambda: 0 <= page.locator("#lze-detail pre").first.bounding_box()["y"] < 700)
    page.wait_for_selector("#lze-scatter .js-plotly-plot")
    page.get_by_role("columnheader", name="energy").tap()  # a tap says what a word means
    wait_for(lambda: page.locator(".lze-told").inner_text() == MEANINGS["energy"])
    page.locator(".lze-told").tap()
    assert page.locator(".lze-told").count() == 0
    places = [page.locator(place).bounding_box()["y"] for place in ("#lze-prompts", "#lze-detail", "#lze-scatter")]
    assert places == sorted(places)
    context.close()
