"""The report over HTTP, made anew at every look: `report RUN --serve PORT`, for a run that is still going."""

import http.client
import http.server
from http import HTTPStatus

from offbeat_run._folder import RunFolder
from offbeat_run._report import write_report
from offbeat_types import ConfigError

HOST = "127.0.0.1"
"""Loopback only: the report holds prompts and completions, and there is no token."""


def serve_report(run: RunFolder, port: int) -> None:
    """Serve until interrupted.

    Args:
        run: open for reading.
        port: on the loopback interface, 1 to 65535.

    Raises:
        ConfigError: the port is out of range or in use.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"--serve needs a port from 1 to 65535: got {port}")

    # Another site may have its own name lead here (DNS rebinding), and a browser would then let it read the report.
    names = {f"{HOST}:{port}", f"localhost:{port}"} | ({HOST, "localhost"} if port == http.client.HTTP_PORT else set())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Host"] not in names:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            page = write_report(run).read_bytes()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} on {HOST} cannot be used: {error.strerror}; choose another") from error
    print(f"report of {run.path} at http://{HOST}:{port}/ (Ctrl-C ends)")
    with server:
        server.serve_forever()
