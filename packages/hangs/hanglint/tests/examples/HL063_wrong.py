import time


class Producer:
    def __init__(self):
        self.shutdown_requested = False
        self.consumed = 0

    def run(self, made):
        while made > self.consumed:
            if self.shutdown_requested:
                return
            time.sleep(0.1)
