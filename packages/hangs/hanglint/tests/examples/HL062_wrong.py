import ray


class Engine:
    async def generate(self, prompt):
        return ray.get(self.worker.generate.remote(prompt), timeout=60)
