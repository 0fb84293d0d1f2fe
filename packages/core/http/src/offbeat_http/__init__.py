"""One bounded HTTP server for everything in offbeat that listens. No torch."""

from offbeat_http._admission import ConnectionLimits
from offbeat_http._listening import address_of, is_loopback, listen, raise_descriptor_limit
from offbeat_http._pages import Page, PageServer
from offbeat_http._server import HttpServer

__all__ = [
    "ConnectionLimits",
    "HttpServer",
    "Page",
    "PageServer",
    "address_of",
    "is_loopback",
    "listen",
    "raise_descriptor_limit",
]
