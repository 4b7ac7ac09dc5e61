"""Sources: files, folders, Parquet, `datasets` and hub ids into rows, and rows of several sources into examples."""
