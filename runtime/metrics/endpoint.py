"""The page of metrics over HTTP, on the machine itself unless asked otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server

from runtime.metrics.registry import Metrics
from runtime.tools.llama_server import LOOPBACK, NoPort


@contextmanager
def metrics_page(metrics: Metrics, port: int, host: str = LOOPBACK) -> Iterator[str]:
    """Serve /metrics while the block runs; its URL. Raises NoPort."""
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as problem:
        raise NoPort(host, port, problem.strerror or str(problem)) from None
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
