class Engine:
    async def generate(self, prompt):
        return await self.worker.generate.remote(prompt)
