"""What the comparison of encoders with other tools consists of."""
