"""A browser, and the app over runs that are made for the tests."""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiny


_OFF = "gpu", "quic", "background-networking", "component-update", "sync"
_FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in _OFF)]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    executable = os.environ.get("LZE_CHROMIUM") or shutil.which("chromium")
    if executable is None:
        pytest.skip("Chromium is not installed (Debian: `apt-get install chromium`).")
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=executable, args=_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A page that fails the test when its script does."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield page
    context.close()
    assert not problems


@contextmanager
def serve(*runs):
    """The app in a process of its own, as a user starts it; yields its address."""
    port = str(tiny.free_port())
    command = [sys.executable, "-m", "lze_trl.job.cli", "app", *map(str, runs), "--port", port]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}/"
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    pytest.fail(f"The app did not start: {process.communicate()[1]}")
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=20)
