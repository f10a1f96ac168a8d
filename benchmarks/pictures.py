"""
Pictures of the app, for the documentation, from recorded runs: `python -m benchmarks.pictures RUN…`.

The first run is the one that is shown; all are compared. Needs Chromium and playwright, as the tests in a browser do.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from lze_trl.app.runs import RunBook


IMAGES = Path(__file__).parents[1] / "docs" / "images"
_PORT = 7877
_WIDE, _PHONE = (1280, 900), (390, 844)


def take(runs: list[str], folder: Path = IMAGES):
    """Save a picture of each view; that of the prompts shows the one visited most of those with completions."""
    from playwright.sync_api import sync_playwright

    book = RunBook(runs)
    prompts = book.open(book.ids[0]).sql(
        """SELECT prompt_id FROM prompt_states WHERE prompt_id IN (SELECT prompt_id FROM completions)
        ORDER BY visits DESC, energy DESC, prompt_id LIMIT 1"""
    )
    opened = {"tab": "Prompts", "prompt": "".join(map(str, prompts["prompt_id"]))}
    pictures = {
        "overview": (_WIDE, {}),
        "training": (_WIDE, {"tab": "Training", "smooth": "0.6"}),
        "prompts": (_WIDE, opened),
        "compare": (_WIDE, {"tab": "Compare", "__theme": "dark"}),
        "phone": (_PHONE, opened),
    }
    executable = os.environ.get("LZE_CHROMIUM") or shutil.which("chromium")
    with _served(runs) as address, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, (size, parameters) in pictures.items():
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.goto(f"{address}?{urlencode(parameters)}")
            page.wait_for_selector("#lze-main :is(.lze-figure, .lze-table)", timeout=60_000)
            page.wait_for_timeout(1000)  # fonts and images
            if size == _PHONE:
                page.locator(".lze-inline").scroll_into_view_if_needed()
                page.evaluate("""document.querySelector(".lze-inline").previousElementSibling.scrollIntoView()""")
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


@contextmanager
def _served(runs: list[str]) -> Iterator[str]:
    """The app over the runs; yields its address."""
    app = subprocess.Popen([sys.executable, "-m", "lze_trl.job.cli", "app", *runs, "--port", str(_PORT)])
    address = f"http://127.0.0.1:{_PORT}/"
    try:
        while app.poll() is None:
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield address
    finally:
        app.terminate()
        app.wait()


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a run, or a folder of runs")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    arguments = parser.parse_args()
    take(arguments.runs, arguments.out)


if __name__ == "__main__":
    main()
