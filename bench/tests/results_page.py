#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""bench/tests/results_page.py PAGE DIR: looks at the page of all results in Chromium, on a phone's and a desk's screen, in light and in dark. A line per
claim; the screenshots stay in DIR. Needs what `scripts/bootstrap browser` installs."""

import base64
import io
import json
import pathlib
import sys

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

SCREENS = {"phone": (360, 740), "desk": (1280, 900)}
SCHEMES = ("light", "dark")
# Of WCAG 2.1, for text of ordinary size.
CONTRAST = 4.5
# Pixels of a CSS inch's ninety-sixth: smaller text is not read on a phone.
SMALLEST = 10

# Every piece of text that is seen: its words, where it is, its size, its colour and the colour behind it. What scrolls within its own box is cut at that box.
TEXTS = """
const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const behind = element => {
    for (let e = element; e; e = e.parentElement) {
        const colour = numbers(getComputedStyle(e).backgroundColor);
        if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
};
while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || element.closest('title, style, script') || !element.checkVisibility()) continue;
    const svg = element.ownerSVGElement, range = document.createRange();
    range.selectNodeContents(node);
    const box = element.closest('.scroll, .maps');
    const frame = box && box.getBoundingClientRect();
    for (const r of range.getClientRects()) {
        const left = frame ? Math.max(r.left, frame.left) : r.left, right = frame ? Math.min(r.right, frame.right) : r.right;
        if (right - left < 1 || r.height < 1) continue;
        texts.push({
            words: node.data.trim().slice(0, 40), left, right, top: r.top + scrollY, bottom: r.bottom + scrollY,
            size: parseFloat(style.fontSize) * (svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1),
            colour: numbers(svg ? style.fill : style.color), behind: behind(element),
        });
    }
}
return texts;
"""


def browser(size):
    options = Options()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    options.binary_location = "/usr/bin/chromium"
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(service=Service("/usr/bin/chromedriver"), options=options)
    width, height = size
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    )
    return driver


def screenshot(driver, file):
    """The whole page as a picture; the file is for those who look."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "fromSurface": True})
    data = base64.b64decode(shot["data"])
    file.write_bytes(data)
    return Image.open(io.BytesIO(data)).convert("RGB")


def requests(driver):
    """The addresses that the page asked for."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def overlaps(texts):
    """Pairs of texts of which one lies on the other by more than a pixel both ways."""
    texts = sorted(texts, key=lambda text: text["top"])
    found = []
    for i, one in enumerate(texts):
        for other in texts[i + 1 :]:
            if other["top"] > one["bottom"] - 1:
                break
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            down = min(one["bottom"], other["bottom"]) - other["top"]
            # Lines of one paragraph share the space between them.
            if across > 1 and down > 0.4 * min(one["size"], other["size"]):
                found.append(f"'{one['words']}' and '{other['words']}' at {one['left']:.0f},{one['top']:.0f}")
    return found


def luminance(colour):
    parts = [value / 255 for value in colour[:3]]
    parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(text):
    high, low = sorted((luminance(text["colour"]), luminance(text["behind"])), reverse=True)
    return (high + 0.05) / (low + 0.05)


class Claims:
    def __init__(self):
        self.passed = self.failed = 0

    def claim(self, words, offences):
        print(f"{'FAILED' if offences else 'ok    '}  {words}")
        for offence in offences[:8]:
            print(f"  | {offence}")
        self.failed += bool(offences)
        self.passed += not offences


def look(claims, page, name, scheme, shots):
    driver = browser(SCREENS[name])
    try:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        driver.get(page.as_uri())
        where = f"{name}, {scheme}"
        asked = requests(driver)
        claims.claim(f"{where}: nothing but the page is asked for", [url for url in asked if url != page.as_uri()] if asked else ["no request was seen"])
        claims.claim(f"{where}: the browser complains of nothing", [entry["message"] for entry in driver.get_log("browser")])
        for state in ("as it opens", "with all medians"):
            if state != "as it opens":
                driver.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
            picture = screenshot(driver, shots / f"{name}-{scheme}-{state.split()[-1]}.png")
            colours = picture.getcolors(picture.width * picture.height)
            most = max(count for count, _ in colours) / (picture.width * picture.height)
            blank = [f"{len(colours)} colours, one of them on {most:.0%}"] if len(colours) < 32 or most > 0.97 else []
            claims.claim(f"{where}, {state}: the screenshot is not blank", blank)
            wide = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            claims.claim(f"{where}, {state}: nothing is wider than the screen", [f"{wide[0]} pixels on {wide[1]}"] if wide[0] > wide[1] else [])
            texts = driver.execute_script(TEXTS)
            claims.claim(f"{where}, {state}: no text lies on another", overlaps(texts) if texts else ["no text was found"])
            pale = [f"'{text['words']}': {contrast(text):.1f}" for text in texts if contrast(text) < CONTRAST]
            claims.claim(f"{where}, {state}: text stands out from what is behind it", pale)
            small = [f"'{text['words']}': {text['size']:.1f} pixels" for text in texts if text["size"] < SMALLEST]
            claims.claim(f"{where}, {state}: text is large enough to be read", small)
        light = luminance(picture.getpixel((1, 1))) > 0.5
        claims.claim(f"{where}: the page is {scheme}", [] if light == (scheme == "light") else [f"the corner is {picture.getpixel((1, 1))}"])
    finally:
        driver.quit()


def main():
    page, shots = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    shots.mkdir(parents=True, exist_ok=True)
    claims = Claims()
    for name in SCREENS:
        for scheme in SCHEMES:
            look(claims, page, name, scheme, shots)
    print(f"{claims.passed} passed, {claims.failed} failed")
    sys.exit(bool(claims.failed))


if __name__ == "__main__":
    main()
