"""Ctrl-C as at a terminal, also where a shell has started the tests in the background and ignores it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
