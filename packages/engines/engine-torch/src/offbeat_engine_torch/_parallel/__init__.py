"""The ranks that train one model together: what each does, holds and adds up."""
