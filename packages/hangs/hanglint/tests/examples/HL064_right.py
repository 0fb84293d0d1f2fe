import ray


def pause(engines):
    ray.get([engine.pause.remote() for engine in engines], timeout=60)
