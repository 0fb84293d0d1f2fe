"""Options of other frameworks' supervised trainers, written as a configuration of this one."""
