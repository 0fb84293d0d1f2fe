"""The processes of a run, as its driver sees them: started, called, watched, started again, stopped."""
