"""`python -m sft_app`."""

from sft_app._cli import main

main()
