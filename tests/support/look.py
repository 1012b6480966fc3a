"""Look at the page of a drill in headless Chromium: console, width, light and dark. `make look` runs it.

Exit 1: the console has an error, or something is wider than 390 px. Writes wide and narrow pictures in both schemes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

from tests.unit.test_drill_report import page

NARROW = 390
SCHEMES = {"light": "1", "dark": "0"}


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise SystemExit("make look needs Chromium: apt install chromium, or brew install --cask chromium")


def main(out: Path, report: Path | None) -> int:
    found = browser()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    text = report.read_text() if report else page(out)[1]
    (out / "wide.html").write_text(text)
    probe = "document.title=document.querySelector('iframe').contentDocument.documentElement.scrollWidth"
    frame = (
        f'<iframe style="border:0;width:{NARROW}px;height:2400px" srcdoc="{escape(text)}" onload="{probe}"></iframe>'
    )
    (out / "narrow.html").write_text(f"<!doctype html><body style=margin:0>{frame}")
    wrong = []
    for scheme, number in SCHEMES.items():
        for name, size in (("wide", "1000,1500"), ("narrow", "500,2400")):
            command = [
                *(found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
                *(f"--user-data-dir={out / 'profile'}", f"--blink-settings=preferredColorScheme={number}"),
                *(f"--window-size={size}", "--virtual-time-budget=3000"),
            ]
            url = (out / f"{name}.html").absolute().as_uri()
            picture = f"--screenshot={out.absolute() / f'{name}-{scheme}.png'}"
            shot = subprocess.run([*command, picture, url], capture_output=True, text=True, check=True, timeout=90)
            wrong += [line for line in shot.stderr.splitlines() if "CONSOLE" in line]
        dom = subprocess.run(
            [*command, "--dump-dom", url], capture_output=True, text=True, check=True, timeout=90
        ).stdout
        title = re.search(r"<title>(\d+)</title>", dom.split("<iframe")[0])
        width = int(title.group(1)) if title else -1
        print(f"{scheme}: {width} px wide in {NARROW}")
        if width != NARROW:
            wrong.append(f"{scheme}: the page is {width} px wide in {NARROW}")
    print(*wrong or ["no console error"], sep="\n")
    print(f"pictures: {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
