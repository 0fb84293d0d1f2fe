"""Sources of rows: files, libraries of tasks, OpenEnv servers, and several of them as one stream."""
