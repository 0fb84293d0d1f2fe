"""Settings for all tests: a property test has no deadline, and Ctrl-C and a hangup arrive as at a terminal."""

import signal

from hypothesis import settings

settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup has started them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
