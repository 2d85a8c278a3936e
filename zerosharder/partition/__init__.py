"""What is sharded together and where each row lies: pure functions, no communication."""
