def next_batch(queue):
    return queue.get(timeout=60)
