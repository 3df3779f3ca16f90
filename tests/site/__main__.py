"""`make docs-walk`: the built site in a real browser, as a reader has it: every page at three widths, light and dark.

It fails on an error in the console, a page wider than the screen, a picture that is not there, a link that leads
nowhere, a formula that is not laid out, or a search that finds nothing. Needs playwright (PyPI) and a Chromium, the
system's (CHROMIUM, by default /usr/bin/chromium). Pictures of all pages are left in build/site-pictures.
"""

from __future__ import annotations

import functools
import http.server
import os
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "site-pictures"
WIDTHS = {"phone": 390, "tablet": 820, "desk": 1440}
SCHEMES = ("light", "dark")
SEARCHES = {"CoSENT": "losses", "rank_margin_loss": "ops/pairwise", "Matryoshka": "losses"}
# what a page has to tell of itself
LOOK = """() => ({
  wide: document.scrollingElement.scrollWidth - window.innerWidth,
  missing: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  links: [...document.links].map(a => a.href),
  flat: [...document.querySelectorAll('.math math')].filter(m => m.getBoundingClientRect().height < 8).length,
  title: document.querySelector('h1')?.innerText ?? '',
  background: getComputedStyle(document.body).backgroundColor,
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def main() -> int:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.name != "404.html")
    wrong: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"))
        for scheme in SCHEMES:
            for name, width in WIDTHS.items():
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                said: list[str] = []
                page.on("console", lambda line, said=said: said.append(line.text) if line.type == "error" else None)
                page.on("pageerror", lambda error, said=said: said.append(str(error)))
                for place in pages:
                    page.goto(base + place)
                    wrong += [f"{place} ({name}, {scheme}): {fault}" for fault in faults(page, scheme, said)]
                    picture = PICTURES / scheme / name / place.replace("/", "-").replace(".html", ".png")
                    page.screenshot(path=str(picture))
                wrong += [f"search ({name}, {scheme}): {fault}" for fault in search(page, base, name)]
                page.close()
        browser.close()
    for fault in wrong:
        print(fault)
    print(f"{len(pages)} pages x {len(WIDTHS)} widths x {len(SCHEMES)} schemes: {len(wrong)} faults")
    return bool(wrong or not pages)


def faults(page: Page, scheme: str, said: list[str]) -> list[str]:
    seen = page.evaluate(LOOK)
    found = [f"console: {line}" for line in said]
    said.clear()
    if seen["wide"] > 0:
        found.append(f"{seen['wide']} pixels wider than the screen")
    if seen["missing"]:
        found.append(f"pictures missing: {seen['missing']}")
    if seen["flat"]:
        found.append(f"{seen['flat']} formulas are not laid out")
    if not seen["title"].strip():
        found.append("no title")
    light = sum(map(int, seen["background"].removeprefix("rgb(").removesuffix(")").split(",")[:3])) > 380
    if light != (scheme == "light"):
        found.append(f"background {seen['background']} is not {scheme}")
    here = page.url.rpartition("/")[0]
    for link in seen["links"]:
        path, _, anchor = link.partition("#")
        if not path.startswith(page.url[: page.url.index("/", 8)]):
            continue
        file = SITE / path[path.index("/", 8) + 1 :] if path.rstrip("/") != here else SITE / "index.html"
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            found.append(f"{link} leads nowhere")
        elif anchor and f'id="{anchor}"' not in file.read_text(encoding="utf-8"):
            found.append(f"{link}: no such place on the page")
    return found


def search(page: Page, base: str, width: str) -> list[str]:
    found = []
    for word, wanted in SEARCHES.items():
        page.goto(base + "index.html")
        if width != "desk":
            page.locator("label[for=__search]").first.click()
        field = page.locator("input.md-search__input")
        field.fill(word)
        results = page.locator("a.md-search-result__link")
        try:
            results.first.wait_for(timeout=30_000)
        except Exception:
            found.append(f"{word!r} finds nothing")
            continue
        hits = [results.nth(row).get_attribute("href") or "" for row in range(min(10, results.count()))]
        if not any(wanted in hit for hit in hits):
            found.append(f"{word!r} finds {hits}, none of {wanted}")
        results.first.click()
        page.wait_for_load_state()
        if page.url.partition("?")[0].rstrip("/") == base.rstrip("/"):
            found.append(f"{word!r}: its first result leads nowhere")
    return found


if __name__ == "__main__":
    sys.exit(main())
