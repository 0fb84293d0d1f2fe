"""The contracts between the packages: what sampling and training engines take and give, and what travels between."""
