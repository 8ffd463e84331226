"""`twin observe`: the requests of a live server, recorded by a proxy in front of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from twin.recording.run_writer import RunWriter

FLAG = Parameter(negative=())


def observe(
    *,
    upstream: str | None = None,
    spans: Path | None = None,
    metrics: str | None = None,
    every: float = 10.0,
    duration: float | None = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    host: str = "127.0.0.1",
    port: int = 8001,
    keep_text: Annotated[bool, FLAG] = False,
    untouched: Annotated[bool, FLAG] = False,
) -> int:
    """Record a live server: its requests through a proxy, or pages of its metrics.

    Point clients at the proxy in place of the server. Responses pass as they come. Streamed completions and chats are
    written to requests.jsonl as they end, with the time of arrival, lengths, first and last token, for twin calibrate
    refine, twin replay and simulations. Ctrl-C ends it.

    Parameters
    ----------
    upstream
        URL of the server, such as http://127.0.0.1:8000.
    spans
        In place of a proxy: file of vLLM's OpenTelemetry spans, in OTLP-JSON, whose requests are written.
    metrics
        In place of a proxy: URL of a server whose /metrics (vLLM's, for Prometheus) is read again and again. Means
        alone can be learned from it.
    every
        With --metrics: seconds from one page to the next.
    duration
        With --metrics: seconds until the last page. Default: until Ctrl-C.
    output
        Folder for requests.jsonl and meta.json, or for pages of metrics, which must be empty.
    host
        Address to listen on. Others than loopback let other machines use the server through the proxy.
    port
        Port to listen on; 0: a free one.
    keep_text
        Store the bodies of requests in bodies.jsonl. Otherwise no text is stored.
    untouched
        Do not request counts of tokens of the server. Requests whose clients do not either are skipped.
    """
    from twin.cli.console import note
    from workloads.errors import BadInput

    if [upstream, spans, metrics].count(None) != 2:
        expected = "expected either this, or --spans with a file, or --metrics with a URL"
        raise BadInput(expected, field="--upstream", value=upstream)
    if metrics is not None:
        return _scrape(metrics, output, every, duration)
    if upstream is None:
        from twin.recording.spans import record_spans

        assert spans is not None
        recorded = record_spans(spans, output)
        _tell(recorded, output)
        return 0
    from twin.recording.proxy import Proxy
    from twin.recording.run_writer import RunWriter
    from twin.recording.upstream import Upstream, published_settings

    if not 0 <= port <= 65535:
        raise BadInput("expected a port from 0 to 65535", field="--port", value=port)
    server = Upstream.of(upstream, "--upstream")
    key = os.environ.get("OPENAI_API_KEY")
    settings = published_settings(server, {"authorization": f"Bearer {key}"} if key else {})
    meta = {"source": "twin observe", "upstream": upstream, "cache_config": settings}
    writer = RunWriter(output, meta)
    bodies = output / "bodies.jsonl" if keep_text else None
    try:
        proxy = Proxy((host, port), server, writer, untouched=untouched, bodies=bodies)
    except OSError as error:
        raise BadInput(f"expected an address that is free: {error.strerror}", field="--port", value=port) from None
    note(f"listening on http://{host}:{proxy.server_address[1]}, in front of {upstream}; Ctrl-C ends it")
    try:
        proxy.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        proxy.server_close()
        writer.close()
    _tell(writer, output)
    return 0


def _scrape(url: str, output: Path, every: float, duration: float | None) -> int:
    from twin.cli.console import note
    from twin.recording.scrapes import record_scrapes
    from twin.recording.upstream import Upstream
    from workloads.errors import BadInput

    for flag, value in (("--every", every), ("--duration", duration)):
        if value is not None and not 0 < value < float("inf"):
            raise BadInput("expected seconds above 0", field=flag, value=value)
    url = url.removesuffix("/metrics")
    server = Upstream.of(url, "--metrics")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    until = "; Ctrl-C ends it" if duration is None else f" for {duration:g} s"
    note(f"reading {url}/metrics every {every:g} s{until}")
    try:
        pages = record_scrapes(server, output, headers, every=every, duration=duration)
    except OSError as error:
        note(f"the server stopped answering ({error}); pages before are in {output}")
        return 1
    note(f"{pages} pages in {output}")
    return 0


def _tell(writer: RunWriter, output: Path) -> None:
    from twin.cli.console import note

    note(f"{writer.written} requests in {output / 'requests.jsonl'}"
         + (f"; {writer.skipped} without times, see skipped.jsonl" if writer.skipped else ""))  # fmt: skip
