import ray


def main():
    ray.init()
