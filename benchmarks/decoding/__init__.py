"""What the benchmarks of models that write share."""
