"""`twin observe`: the requests of a live server, recorded by a proxy in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twin.cli.options import Flag, Output
from workloads.errors import BadInput

if TYPE_CHECKING:
    from twin.recording.run_writer import RunWriter


def observe(
    *,
    upstream: str | None = None,
    spans: Path | None = None,
    metrics: str | None = None,
    vllm_log: Path | None = None,
    every: float = 10.0,
    duration: float | None = None,
    output: Output,
    host: str = "127.0.0.1",
    port: int = 8001,
    keep_text: Flag = False,
    untouched: Flag = False,
) -> int:
    """Record a live server: its requests through a proxy, or pages of its metrics.

    Point clients at the proxy in place of the server. Responses pass as they come. Streamed completions and chats are
    written to requests.jsonl as they end, with the time of arrival, lengths, first and last token, for twin calibrate
    refine, twin replay and simulations. Ctrl-C ends it.

    Args:
        upstream: URL of the server, such as http://127.0.0.1:8000.
        spans: In place of a proxy: file of vLLM's OpenTelemetry spans, in OTLP-JSON, whose requests are written.
        metrics: In place of a proxy: URL of a server whose /metrics (vLLM's, for Prometheus) is read again and again.
            Means alone can be learned from it.
        vllm_log: In place of a proxy: step log of a vLLM that runs a scheduler class of live.vllm, for twin calibrate
            steps.
        every: With --metrics: seconds from one page to the next.
        duration: With --metrics: seconds until the last page. Default: until Ctrl-C.
        output: Folder for requests.jsonl and meta.json, or for pages of metrics, which must be empty.
        host: Address to listen on. Others than loopback let other machines use the server through the proxy.
        port: Port to listen on; 0: a free one.
        keep_text: Store the bodies of requests in bodies.jsonl. Otherwise no text is stored.
        untouched: Do not request counts of tokens of the server. Requests whose clients do not either are skipped.
    """
    from twin.cli.console import note

    if [upstream, spans, metrics, vllm_log].count(None) != 3:
        expected = "expected either this, or --spans or --vllm-log with a file, or --metrics with a URL"
        raise BadInput(expected, field="--upstream", value=upstream)
    if vllm_log is not None:
        from twin.recording.step_logs import record_step_log, seen

        for line in seen(record_step_log(vllm_log, output)):
            note(line)
        return 0
    if metrics is not None:
        return _scrape(metrics, output, every, duration)
    if spans is not None:
        from twin.recording.spans import record_spans

        _note_written(record_spans(spans, output), output)
        return 0
    assert upstream is not None
    from twin.api.arguments import require_port
    from twin.recording.proxy import Proxy
    from twin.recording.run_writer import RunWriter
    from twin.recording.upstream import Upstream, key_headers, published_settings

    require_port(port)
    server = Upstream.of(upstream, "--upstream")
    settings = published_settings(server, key_headers())
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
    _note_written(writer, output)
    return 0


def _scrape(url: str, output: Path, every: float, duration: float | None) -> int:
    from twin.cli.console import note
    from twin.recording.scrapes import record_scrapes
    from twin.recording.upstream import Upstream, key_headers

    for flag, value in (("--every", every), ("--duration", duration)):
        if value is not None and not 0 < value < float("inf"):
            raise BadInput("expected seconds above 0", field=flag, value=value)
    url = url.removesuffix("/metrics")
    server = Upstream.of(url, "--metrics")
    until = "; Ctrl-C ends it" if duration is None else f" for {duration:g} s"
    note(f"reading {url}/metrics every {every:g} s{until}")
    try:
        pages = record_scrapes(server, output, key_headers(), every=every, duration=duration)
    except OSError as error:
        note(f"the server stopped answering ({error}); pages before are in {output}")
        return 1
    note(f"{pages} pages in {output}")
    return 0


def _note_written(writer: RunWriter, output: Path) -> None:
    from twin.cli.console import note

    note(f"{writer.written} requests in {output / 'requests.jsonl'}"
         + (f"; {writer.skipped} without times, see skipped.jsonl" if writer.skipped else ""))  # fmt: skip
