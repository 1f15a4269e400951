"""Take the pictures of docs/report.md: a report in Chromium, some minutes of compiling before.

    python docs/images/take.py

It wants the extras cli, test and demo, and chromium with its chromedriver.
"""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from fusec.tools.cli import main

ROOT = Path(__file__).parents[2]
MODEL = [f"{ROOT}/examples/gpt2_xl.py:step", "--input", "i64[1,1024]<50257", "--train"]
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
SIZE = 1480, 1000
PICTURES = {
    # name -> colours, the module and operation of the kernel that is shown, and the tab
    "report-graph": ("light", "attn.c_attn", "Overview"),
    "report-code": ("dark", "attn.c_attn", "Triton"),
}


def take(browser: webdriver.Chrome, address: str, name: str) -> None:
    """Write one picture, of 256 colours."""
    scheme, module, tab = PICTURES[name]
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")
    browser.get(address)
    time.sleep(2)
    inside = f"//span[@class='module'][.='{module}']/ancestor::button[contains(@class, 'kernel')]"
    box = browser.find_elements(By.XPATH, inside)[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    box.click()
    browser.find_element(By.XPATH, f"//button[@role='tab'][.='{tab}']").click()
    browser.execute_script("document.activeElement.blur()")
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    image.quantize(256).save(Path(__file__).parent / f"{name}.png", optimize=True)


def start() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for option in (*OPTIONS, f"--window-size={SIZE[0]},{SIZE[1]}"):
        options.add_argument(option)
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


if __name__ == "__main__":
    report = Path(tempfile.mkdtemp()) / "report.html"
    main(["report", *MODEL, "--target", "sm_90", "-o", str(report)])
    driver = start()
    for picture in PICTURES:
        take(driver, report.as_uri(), picture)
    driver.quit()
