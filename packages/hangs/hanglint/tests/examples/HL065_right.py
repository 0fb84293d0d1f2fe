import ray


def main(num_cpus):
    ray.init(num_cpus=num_cpus)
