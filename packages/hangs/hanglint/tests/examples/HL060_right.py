import ray


def update(workers, weights):
    return ray.get([worker.update.remote(weights) for worker in workers], timeout=600)
