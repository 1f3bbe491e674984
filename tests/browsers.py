"""A real JupyterLab, and a page of a real browser that someone uses it with."""

import base64
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
import psutil
from isolation import own_environment
from isolation import processes_of
from kernels import wait_until
from playwright.sync_api import Browser
from playwright.sync_api import Locator
from playwright.sync_api import expect

ARTIFACTS = Path(__file__).parents[1] / "test-artifacts"
"""Where screenshots are kept."""

START_S = 120
END_S = 60
WAIT_MS = 60_000
PNG = "data:image/png;base64,"

NO_NEWS = {"fetchNews": "false", "checkForUpdates": False}

expect.set_options(timeout=WAIT_MS)

_WATCH_PICTURES = """
panel => {
  const seen = (window.picturesSeen ??= {});
  const look = () => {
    const cells = panel.querySelectorAll(".jp-Notebook-cell");
    cells.forEach((cell, index) => {
      const picture = cell.querySelector(".jp-OutputArea-output img");
      if (picture && !(seen[index] ??= []).includes(picture.src))
        seen[index].push(picture.src);
    });
  };
  const options = { subtree: true, childList: true, attributes: true };
  new MutationObserver(look).observe(panel, options);
}
"""


def find_browser() -> str | None:
    """The path of a Chromium of this machine."""
    names = ("chromium", "google-chrome", "chromium-browser")
    return next((path for path in map(shutil.which, names) if path), None)


class LabServer:
    """JupyterLab on a folder of notebooks, with settings of its own."""

    def __init__(self, folder: Path, notebooks: Path) -> None:
        self.folder = folder
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        for notebook in notebooks.glob("*.ipynb"):
            shutil.copy(notebook, self.notebooks)
        settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(NO_NEWS))
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", self.notebooks),
            ],
            env=own_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._info: dict[str, Any] = {}
        wait_until(self._is_ready, START_S, "JupyterLab does not start")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self.folder / "server.log").read_text()
        try:
            [file] = (self.folder / "runtime").glob("jpserver-*.json")
            self._info = json.loads(file.read_text())
            self.ask("GET", "api/status")
        except (ValueError, OSError):
            return False  # not written yet, or does not listen yet
        return True

    def ask(self, method: str, path: str) -> Any:
        """What the server's REST interface answers; None where it answers nothing."""
        request = urllib.request.Request(
            self._info["url"] + path,
            method=method,
            headers={"Authorization": f"token {self._info['token']}"},
        )
        with urllib.request.urlopen(request, timeout=END_S) as response:
            return json.loads(response.read() or "null")

    def url(self, path: str = "lab") -> str:
        """An address with the token, as the server prints it."""
        return f"{self._info['url']}{path}?token={self._info['token']}"

    def end_kernels(self) -> None:
        """End every kernel, and wait until only the server is left."""
        for kernel in self.ask("GET", "api/kernels"):
            self.ask("DELETE", f"api/kernels/{kernel['id']}")
        wait_until(lambda: self._left_behind() == [], END_S, "processes are left")

    def close(self) -> None:
        """End the server; AssertionError where it leaves a process behind."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
            wait_until(lambda: self._left_behind() == [], END_S, "processes are left")
        finally:
            for process in self._left_behind():
                process.kill()
            self._process.kill()
            self._process.wait()
            self._log.close()

    def _left_behind(self) -> list[psutil.Process]:
        return [
            process
            for process in processes_of(self.folder)
            if process.pid != self._process.pid
        ]


class NotebookPage:
    """A notebook open in JupyterLab, used as someone with a mouse uses it."""

    def __init__(self, browser: Browser, server: LabServer, name: str) -> None:
        self.path = server.notebooks / name
        self._server = server
        self._page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self._page.set_default_timeout(WAIT_MS)
        # To leave a page with changes is confirmed, where the browser asks.
        self._page.on("dialog", lambda dialog: dialog.accept())
        self._page.goto(server.url("lab") + "&reset")
        self._page.locator(".jp-DirListing-item", has_text=name).dblclick()
        self.wait_until_idle()

    @property
    def panel(self) -> Locator:
        """The notebook that is in front."""
        return self._page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def cell(self, index: int) -> Locator:
        """A cell; texts count as well."""
        return self.panel.locator(".jp-Notebook-cell").nth(index)

    def output(self, index: int) -> Locator:
        """All that is below a cell."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    def reload(self) -> None:
        """Load the page again, by the notebook's address.

        What `watch_pictures` noted is gone then. (To reload it shows what JupyterLab
        noted last of its layout, which is another notebook now and then.)
        """
        self._page.goto(self._server.url(f"lab/tree/{self.path.name}") + "&reset")
        expect(self.cell(0)).to_be_visible()
        expect(self._page.locator(".jp-Spinner")).to_have_count(0)

    def close(self) -> None:
        self._page.close()

    # ---- running ----

    def choose(self, menu: str, item: str) -> None:
        """Choose an item of the menu bar."""
        self._page.get_by_role("menuitem", name=menu, exact=True).click()
        # Where it has a shortcut, that is part of its name.
        label = self._page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True)
        label.click()

    def run_all(self) -> None:
        """Run All Cells; does not wait for them."""
        self.choose("Run", "Run All Cells")

    def run(self, index: int) -> None:
        """Run one cell; does not wait for it."""
        self.cell(index).locator(".jp-InputArea-editor").click()
        self._page.keyboard.press("Control+Enter")

    def press_stop(self) -> None:
        """Press the stop button of the toolbar."""
        self.panel.locator("[data-command='notebook:interrupt-kernel']").click()

    def wait_until_idle(self, timeout_ms: float = WAIT_MS) -> None:
        """Return once no cell waits or runs, and there is a kernel that is idle."""
        waiting = self.panel.locator(".jp-InputPrompt", has_text="[*]")
        expect(waiting).to_have_count(0, timeout=timeout_ms)
        status = self._page.locator("#jp-main-statusbar")
        expect(status).to_contain_text("| Idle", timeout=timeout_ms)

    def is_busy(self) -> bool:
        """Whether a cell waits or runs."""
        return self.panel.locator(".jp-InputPrompt", has_text="[*]").count() > 0

    def save(self) -> Any:
        """Save by the menu; the notebook that is on disk then."""
        self.choose("File", "Save Notebook")
        expect(self._page.locator(".jp-mod-current.jp-mod-dirty")).to_have_count(0)
        return nbformat.read(self.path, as_version=4)

    def open_from(self, index: int, button: str, address: str, stub: str) -> bytes:
        """Press a button below a cell that opens `address`, where `stub` stands for the
        page; what that page was given then."""
        self._page.context.route(
            f"{address}**",
            lambda route: route.fulfill(body=stub, content_type="text/html"),
        )
        with self._page.expect_popup() as opened:
            self.output(index).get_by_role("button", name=button).click()
        opened.value.wait_for_function("window.trace")
        return bytes(opened.value.evaluate("window.trace"))

    # ---- looking ----

    def watch_pictures(self) -> None:
        """From now on note every picture below a cell; see `pictures_seen`."""
        self.panel.evaluate(_WATCH_PICTURES)

    def pictures_seen(self, index: int) -> list[bytes]:
        """The different pictures below a cell since `watch_pictures`, in order."""
        seen = self._page.evaluate("index => picturesSeen[index] ?? []", index)
        return [decoded(source) for source in seen]

    def wait_for_pictures(self, index: int, number: int) -> None:
        """Return once so many different pictures have been below a cell."""
        self._page.wait_for_function(
            "([index, number]) => (picturesSeen[index] ?? []).length >= number",
            arg=[index, number],
        )

    def picture(self, index: int) -> bytes:
        """The picture that is below a cell, once the browser has drawn it."""
        picture = self.output(index).locator("img")
        picture.scroll_into_view_if_needed()
        drawn = "picture => picture.complete && picture.naturalWidth > 0"
        self._page.wait_for_function(drawn, arg=picture.element_handle())
        return decoded(picture.get_attribute("src") or "")

    def picture_of_page(self, index: int, width: int = 960, height: int = 840) -> bytes:
        """A PNG of what the page shows from the top left corner of a cell on."""
        box = self.cell(index).bounding_box()
        assert box is not None
        clip = {"x": box["x"], "y": box["y"], "width": width, "height": height}
        return self._page.screenshot(clip=clip)

    def screenshot(self, name: str, index: int | None = None) -> None:
        """Keep what the page looks like, with this cell and its output in view."""
        if index is not None:
            self.cell(index).evaluate("cell => cell.scrollIntoView({block: 'center'})")
        self._page.screenshot(path=ARTIFACTS / f"{name}.png")


def decoded(source: str) -> bytes:
    """The PNG of a picture's address."""
    assert source.startswith(PNG), source[:80]
    return base64.b64decode(source.removeprefix(PNG))
