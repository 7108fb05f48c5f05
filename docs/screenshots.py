"""Take the pictures of docs/observability.md of a real server under traffic, in headless Chromium."""

import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import sync_playwright

from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks
from hps.tools.profiling.workloads import power_law_keys
from tests.browser import CHROMIUM
from tests.servers.running_service import document_of, model_of, running_service

HERE = Path(__file__).parent
TABLES = {"user": (200_000, 32), "item": (100_000, 64), "category": (5_000, 16)}
TRAFFIC_S = 75.0


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for seed, (name, (rows, dim)) in enumerate(TABLES.items()):
            write_sparse_model(folder / f"{name}.model", sample_chunks(rows, dim, seed))
        dims = {name: dim for name, (_, dim) in TABLES.items()}
        model = model_of("ranker", [folder / f"{name}.model" for name in TABLES], dims, gpucache=True, gpucacheper=0.1)
        document = document_of(model, persistent=folder / "rocksdb")
        with running_service(document) as service, sync_playwright() as playwright:
            until, ended = time.monotonic() + TRAFFIC_S, threading.Event()

            def client(seed: int) -> None:
                rng = np.random.default_rng(seed)
                with httpx.Client(base_url=service.url) as http:
                    while not ended.is_set():
                        busy = 0.6 + 0.4 * np.sin(time.monotonic() / 9)
                        keys = {name: power_law_keys(rng, 100, rows, 1.05).tolist() for name, (rows, _) in TABLES.items()}
                        http.post("/v1/models/ranker/lookup", json={"tables": keys}).raise_for_status()
                        ended.wait(float(rng.exponential(0.02 / busy)))

            clients = [threading.Thread(target=client, args=(seed,)) for seed in range(2)]
            for one in clients:
                one.start()
            browser = playwright.chromium.launch(**CHROMIUM)
            for name, theme, width, height in (("page", "light", 1200, 1150), ("page-phone", "dark", 390, 844)):
                tab = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height}).new_page()
                tab.goto(service.url)
                if name == "page":
                    time.sleep(max(0.0, until - time.monotonic()))
                    tab.fill("#find-key", "4711")
                    tab.click("#find button")
                time.sleep(15 if name != "page" else 2)
                tab.screenshot(path=HERE / f"{name}.png", full_page=name == "page")
            browser.close()
            ended.set()
            for one in clients:
                one.join()


if __name__ == "__main__":
    main()
