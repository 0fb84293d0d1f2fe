import time


class Producer:
    def __init__(self):
        self.shutdown_requested = False
        self.consumed = 0

    def stop(self):
        self.shutdown_requested = True

    def run(self, made, deadline_s):
        while made > self.consumed and time.monotonic() < deadline_s:
            if self.shutdown_requested:
                return
            time.sleep(0.1)
