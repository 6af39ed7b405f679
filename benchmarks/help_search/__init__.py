"""What the benchmarks on the help-search data share."""
