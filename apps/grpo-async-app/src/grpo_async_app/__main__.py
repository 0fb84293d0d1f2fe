"""`python -m grpo_async_app`."""

from grpo_async_app._cli import main

main()
