"""`Run`: in memory, on disk, in the catalog of past runs, beside other runs."""
