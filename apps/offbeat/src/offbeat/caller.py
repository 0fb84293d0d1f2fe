"""The functions of the program that has started a run, by name: `reward.name = "offbeat.caller:score"` names one.

A scorer imports this module, which has no other names: a function may have any.
"""

from offbeat._stand_ins import stand_in as __getattr__  # noqa: F401  the import system calls it
