"""Awaits several things at once, and lets none of them go on when one has failed."""

import asyncio
from typing import Any


async def all_or_first_error(calls: list[Any]) -> list[Any]:
    """Await all; on the first error cancel the rest and raise it as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
