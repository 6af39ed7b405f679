"""Outside checkpoint formats: for each, one reversible table of names and a translation of its config."""
