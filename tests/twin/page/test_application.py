"""Requests to the what-if page's server that are answered without a page."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.ioloop import IOLoop

from tests.twin.page.scenarios import roofline
from twin.page.application import make_server
from twin.page.questions import Inquiry


@pytest.mark.parametrize("query", ["rate=%00%FF", "other=%C3"])
def test_a_link_that_is_no_text(query: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(Inquiry(roofline(), tmp_path / "s.yaml"), 0)

    async def fetch() -> HTTPResponse:
        return await AsyncHTTPClient().fetch(f"http://127.0.0.1:{server.port}/?{query}", raise_error=False)

    with caplog.at_level(logging.ERROR):
        server.start()
        try:
            response = IOLoop.current().run_sync(fetch)
        finally:
            server.stop()
    assert response.code == 400
    assert not caplog.records
