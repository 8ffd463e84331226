"""A folder of metrics pages and a server that adds to it, judged by `twin.refinement.watch`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from twin.recording.scrapes import is_scrapes, read_scrapes, write_page
from twin.recording.upstream import Upstream, key_headers
from twin.refinement.watch import DRIFTED, Watch
from workloads.errors import BadInput


def judge_folder(watch: Watch, folder: Path, since: float) -> dict[str, Any]:
    """The verdict on the pages of a folder.

    Raises:
        BadInput: fewer than two pages.
    """
    if not folder.is_dir():
        raise BadInput("expected a folder of metrics pages", field="--pages", value=str(folder))
    return watch.judge(read_scrapes(folder, since))


def follow(
    watch: Watch,
    server: Upstream,
    folder: Path,
    since: float,
    every: float,
    duration: float | None,
    note: Callable[[str], object],
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """Add a page each `every` seconds and judge all so far, until a drift, after `duration` seconds, or on Ctrl-C.

    A server that stops answering later is waited for.

    Raises:
        BadInput: `folder` is a file.
        OSError: the server does not answer the first time.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput("expected a folder, found a file", field="--pages", value=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    earlier = is_scrapes(folder)
    headers, started = key_headers(), time.monotonic()
    new = write_page(server, folder, headers)
    pages = [replace(page, text="", buckets={}) for page in (read_scrapes(folder, since) if earlier else [new])]
    while True:
        document = watch.judge(pages)
        if document["verdict"] == DRIFTED or (duration is not None and time.monotonic() - started >= duration):
            return document
        try:
            sleep(every)
            pages.append(replace(write_page(server, folder, headers), text="", buckets={}))
        except KeyboardInterrupt:
            return document
        except OSError as error:
            note(f"the server does not answer /metrics ({error}); waiting for it")
