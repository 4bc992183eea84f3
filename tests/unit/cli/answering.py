"""A small HTTP server in a thread, for commands that ask one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


@contextmanager
def answering(reply: Callable[[bytes], tuple[int, bytes]]) -> Iterator[str]:
    """Its URL; `reply` makes status and body from a request's head."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = reply(self.raw_requestline + self.headers.as_bytes())
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
