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


IMAGES = Path(__file__).parents[1] / "docs" / "images"
_PORT = 7877
_WIDE, _PHONE = (1280, 900), (390, 844)
_PICTURES = {
    "overview": (_WIDE, "Overview"),
    "training": (_WIDE, "Training"),
    "prompts": (_WIDE, "Prompts"),
    "compare": (_WIDE, "Runs"),
    "phone": (_PHONE, "Prompts"),
}


def take(runs: list[str], folder: Path = IMAGES):
    """Save a picture of each tab; that of the prompts shows the first prompt of the table."""
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("LZE_CHROMIUM") or shutil.which("chromium")
    with _served(runs) as address, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, (size, tab) in _PICTURES.items():
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.goto(address)
            page.wait_for_selector("#lze-overview .lze-tiles", timeout=60_000)
            page.get_by_role("tab", name=tab).click()
            if tab == "Prompts":
                page.locator("#lze-table tbody td").first.click()
                page.wait_for_selector("#lze-detail pre", timeout=60_000)
            page.wait_for_timeout(2000)  # fonts and charts
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
